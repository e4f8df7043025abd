"""Word links in and out: Pharaoh's `i-j` lines, JSON, readable words, and gold links.

A line holds the links of one sentence pair, words counted from 0. With scores a link is written
`i-j:0.9300`: aligners agree on `i-j`, but each keeps its scores elsewhere. In gold files `i-j` is
sure, `ipj` or `i?j` only possible, and whatever follows a colon is left unread.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import numpy as np

from calque.errors import InputError
from calque.io.files import PathLike, display_name, read_lines
from calque.types import Links

if TYPE_CHECKING:
    import numpy.typing as npt

    Integers: TypeAlias = npt.NDArray[np.int64]

LinkFormat: TypeAlias = Literal["pharaoh", "jsonl", "words"]
WordPair: TypeAlias = tuple[Sequence[str], Sequence[str]]

LINK = re.compile(r"([0-9]{1,9})([-p?])([0-9]{1,9})(?::(.*))?")
DECIMALS = 4


@dataclass(frozen=True, slots=True)
class GoldLinks:
    """What annotators say of some pairs; the sure links are among the possible ones."""

    sure: Links
    possible: Links
    file: str

    @property
    def n_pairs(self) -> int:
        """How many pairs were annotated."""
        return self.sure.n_pairs

    def select(self, start: int, stop: int) -> GoldLinks:
        """Take some consecutive pairs, numbered from 0 again."""
        sure, possible = (select_pairs(links, start, stop) for links in (self.sure, self.possible))
        return GoldLinks(sure, possible, self.file)

    def check_words(self, pairs: Sequence[WordPair], first: int = 0) -> None:
        """Refuse a link to a word that is not there; these are pairs `first` and following."""
        found = select_pairs(self.possible, first, first + len(pairs))
        n_src, n_tgt = (np.array(list(map(len, side)), dtype=np.int64) for side in _sides(pairs))
        outside = (found.src >= n_src[found.pairs]) | (found.tgt >= n_tgt[found.pairs])
        if outside.any():
            k = int(outside.argmax())
            pair = int(found.pairs[k])
            raise InputError(
                f"a link between words {found.src[k]} and {found.tgt[k]}, counted from 0, "
                f"but the pair has {n_src[pair]} and {n_tgt[pair]} words",
                file=self.file,
                line=first + pair + 1,
                fix="if its words count from 1, say --gold-from-one",
            )


def read_links(path: PathLike, *, from_one: bool = False) -> Links:
    """Read links with their scores, where there are any; a link without one scores 1."""
    rows: list[tuple[int, int, int]] = []
    scores: list[float] = []
    number = 0
    for number, line in enumerate(read_lines(path), start=1):
        for src, _, tgt, score in _parse_line(line, path, number, from_one):
            rows.append((number - 1, src, tgt))
            scores.append(_parse_score(score, path, number))
    order = sorted(range(len(rows)), key=rows.__getitem__)
    return build_links([rows[k] for k in order], number, [scores[k] for k in order])


def read_gold(path: PathLike, *, from_one: bool = False) -> GoldLinks:
    """Read gold links, sure and possible."""
    sure: set[tuple[int, int, int]] = set()
    possible: set[tuple[int, int, int]] = set()
    number = 0
    for number, line in enumerate(read_lines(path), start=1):
        for src, kind, tgt, _ in _parse_line(line, path, number, from_one):
            (sure if kind == "-" else possible).add((number - 1, src, tgt))
    both = build_links(sorted(sure | possible), number)
    return GoldLinks(build_links(sorted(sure), number), both, display_name(path))


def build_links(
    rows: Sequence[tuple[int, int, int]], n_pairs: int, scores: Sequence[float] | None = None
) -> Links:
    """Make links out of sorted rows: pair, source word, target word."""
    table = np.array(rows, dtype=np.int64).reshape(-1, 3)
    values = np.ones(len(table)) if scores is None else np.array(scores)
    return Links(table[:, 0], table[:, 1], table[:, 2], values.astype(np.float32), n_pairs)


def select_pairs(links: Links, start: int, stop: int) -> Links:
    """Take the links of some consecutive pairs, numbered from 0 again."""
    stop = min(stop, links.n_pairs)
    begin, end = np.searchsorted(links.pairs, [start, stop]).tolist()
    mine = slice(begin, end)
    pairs = links.pairs[mine] - start
    return Links(pairs, links.src[mine], links.tgt[mine], links.scores[mine], stop - start)


def format_links(
    links: Links, pairs: Sequence[WordPair], format: LinkFormat = "pharaoh", *, scores: bool = False
) -> list[str]:
    """Write the links of each pair as a line, without its end.

    JSON always has the scores, with the words: `{"src": …, "tgt": …, "links": [[i, j, score]]}`.
    """
    if format not in get_args(LinkFormat):
        known = ", ".join(get_args(LinkFormat))
        raise InputError(f"unknown format {format!r}", fix=f"choose from: {known}")
    if format == "pharaoh":
        return format_pharaoh(links, scores=scores)
    if format == "jsonl":
        return _format_jsonl(links, pairs)
    cells = [
        f"{pairs[pair][0][i]}-{pairs[pair][1][j]}"
        for pair, i, j in zip(*_columns(links), strict=True)
    ]
    return _join_cells(links, _add_scores(links, cells) if scores else cells)


def format_pharaoh(links: Links, *, scores: bool = False) -> list[str]:
    """Write the links of each pair as `i-j`, or with scores as `i-j:0.9300`."""
    cells = list(map("%d-%d".__mod__, zip(links.src.tolist(), links.tgt.tolist(), strict=True)))
    return _join_cells(links, _add_scores(links, cells) if scores else cells)


def _parse_line(
    line: str, path: PathLike, number: int, from_one: bool
) -> Iterator[tuple[int, str, int, str | None]]:
    for cell in line.split():
        match = LINK.fullmatch(cell)
        if match is None:
            problem = f"{cell[:40]!r} is no link"
            fix = "write i-j, or ipj where a link is only possible"
            raise InputError(problem, file=display_name(path), line=number, fix=fix)
        src, tgt = (int(match[side]) - from_one for side in (1, 3))
        if src < 0 or tgt < 0:
            problem = f"{cell!r}, but words are said to count from 1"
            raise InputError(
                problem, file=display_name(path), line=number, fix="is it right that they do?"
            )
        yield src, match[2], tgt, match[4]


def _parse_score(text: str | None, path: PathLike, number: int) -> float:
    if text is None:
        return 1.0
    try:
        return float(text)
    except ValueError:
        problem = f"{text[:40]!r} is no score"
        raise InputError(
            problem, file=display_name(path), line=number, fix="write i-j:0.93"
        ) from None


def _format_jsonl(links: Links, pairs: Sequence[WordPair]) -> list[str]:
    rounded = links.scores.astype(np.float64).round(DECIMALS).tolist()
    cells = list(map(list, zip(links.src.tolist(), links.tgt.tolist(), rounded, strict=True)))
    return [
        json.dumps(
            {"src": list(src), "tgt": list(tgt), "links": cells[start:stop]}, ensure_ascii=False
        )
        for (src, tgt), (start, stop) in zip(pairs, pairwise(_bounds(links)), strict=True)
    ]


def _sides(pairs: Sequence[WordPair]) -> tuple[list[Sequence[str]], list[Sequence[str]]]:
    return [src for src, _ in pairs], [tgt for _, tgt in pairs]


def _columns(links: Links) -> tuple[list[int], list[int], list[int]]:
    return links.pairs.tolist(), links.src.tolist(), links.tgt.tolist()


def _add_scores(links: Links, cells: list[str]) -> list[str]:
    scores = links.scores.tolist()
    return [f"{cell}:{score:.{DECIMALS}f}" for cell, score in zip(cells, scores, strict=True)]


def _join_cells(links: Links, cells: list[str]) -> list[str]:
    return [" ".join(cells[start:stop]) for start, stop in pairwise(_bounds(links))]


def _bounds(links: Links) -> list[int]:
    """Give where the links of each pair begin, and where those of the last end."""
    bounds: list[int] = np.searchsorted(links.pairs, np.arange(links.n_pairs + 1)).tolist()
    return bounds
