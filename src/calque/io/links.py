"""Word links: reading `i-j` lines and gold links, writing Pharaoh, JSON and readable words.

A line holds the links of one sentence pair, with words counted from 0 (or from 1 with `from_one`):

    0-0 1-2           links
    0-0:0.9300        a link with a score
    1p2 or 1?2        a link that is only possible, in gold files
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import numpy as np

from calque.errors import InputError, check_choice, printable
from calque.io.files import PathLike, display_name, read_lines
from calque.types import Links

if TYPE_CHECKING:
    import numpy.typing as npt

    Integers: TypeAlias = npt.NDArray[np.int64]

LinkFormat: TypeAlias = Literal["pharaoh", "jsonl", "words"]
WordPair: TypeAlias = tuple[Sequence[str], Sequence[str]]

LINK = re.compile(r"([0-9]{1,9})([-p?])([0-9]{1,9})(?::(.*))?")
# Lines that hold nothing but i-j can be parsed all at once.
SIMPLE_LINES = re.compile(r"\s*+(?:[0-9]{1,9}+-[0-9]{1,9}+(?:\s++|$))*+", re.ASCII)
N_SCORE_DECIMALS = 4


@dataclass(frozen=True, slots=True)
class ParsedLinks:
    """The links of some lines, in the order of the text; `lines` numbers the lines from 0.

    `scores` is NaN for a link without a score, and for all if scores were ignored.
    """

    lines: Integers
    src: Integers
    tgt: Integers
    is_sure: npt.NDArray[np.bool_]
    scores: npt.NDArray[np.float64]

    def check_bounds(
        self,
        n_src: Integers,
        n_tgt: Integers,
        file: PathLike,
        *,
        numbers: Sequence[int] | None = None,
        fix: str,
    ) -> None:
        """Raise InputError if a link is outside its pair, whose sides have n_src and n_tgt words.

        `numbers` are the line numbers in the file, by default 1, 2, …
        """
        outside = (self.src >= n_src[self.lines]) | (self.tgt >= n_tgt[self.lines])
        if outside.any():
            k = int(outside.argmax())
            line = int(self.lines[k])
            raise InputError(
                f"the link {self.src[k]}-{self.tgt[k]} (counted from 0) is outside the pair, "
                f"which has {n_src[line]} and {n_tgt[line]} words",
                file=display_name(file),
                line=line + 1 if numbers is None else numbers[line],
                fix=fix,
            )


def parse_links(
    lines: Sequence[str],
    file: PathLike,
    *,
    numbers: Sequence[int] | None = None,
    from_one: bool = False,
    possible: bool = False,
    scores: bool = True,
) -> ParsedLinks:
    """Parse lines of links; an invalid link is an InputError that names the file and the line.

    Args:
        lines: One line per sentence pair.
        file: Name of the file, for error messages.
        numbers: Line numbers in the file, for error messages. Default: 1, 2, …
        from_one: Words are counted from 1 in the text; the result always counts from 0.
        possible: Accept possible links, `ipj` and `i?j`.
        scores: Read the scores after a colon; otherwise any text after a colon is ignored.

    >>> found = parse_links(["0-1 1-0:0.5", "", "2-2"], "links.txt")
    >>> found.lines.tolist(), found.src.tolist(), found.tgt.tolist(), found.scores.tolist()
    ([0, 0, 2], [0, 1, 2], [1, 0, 2], [nan, 0.5, nan])
    """
    text = "\n".join(lines)
    if not from_one and SIMPLE_LINES.fullmatch(text):
        n_links = np.fromiter((line.count("-") for line in lines), np.int64, len(lines))
        # NumPy would find a number in a text of white space alone.
        numbers_text = text.replace("-", " ") if n_links.any() else ""
        ends = np.fromstring(numbers_text, np.int64, sep=" ").reshape(-1, 2)
        owners = np.repeat(np.arange(len(lines)), n_links)
        return ParsedLinks(
            owners,
            ends[:, 0],
            ends[:, 1],
            np.ones(len(ends), dtype=np.bool_),
            np.full(len(ends), np.nan),
        )
    rows: list[tuple[int, int, int, bool, float]] = []
    for row, line in enumerate(lines):
        for cell in line.split():
            try:
                rows.append((row, *_parse_link(cell, from_one, possible, scores)))
            except ValueError:
                number = row + 1 if numbers is None else numbers[row]
                raise _invalid_link(cell, file, number, from_one, possible, scores) from None
    columns = list(zip(*rows, strict=True)) or [()] * 5
    owners, src, tgt = (np.array(column, dtype=np.int64) for column in columns[:3])
    return ParsedLinks(
        owners, src, tgt, np.array(columns[3], np.bool_), np.array(columns[4], float)
    )


def _parse_link(
    cell: str, from_one: bool, possible: bool, scores: bool
) -> tuple[int, int, bool, float]:
    match = LINK.fullmatch(cell)
    if match is None or (match[2] != "-" and not possible):
        raise ValueError(cell)
    src, tgt = int(match[1]) - from_one, int(match[3]) - from_one
    if src < 0 or tgt < 0:
        raise ValueError(cell)
    if not scores or match[4] is None:
        return src, tgt, match[2] == "-", math.nan
    score = float(match[4])
    if not math.isfinite(score):
        raise ValueError(cell)
    return src, tgt, match[2] == "-", score


def _invalid_link(
    cell: str, file: PathLike, number: int, from_one: bool, possible: bool, scores: bool
) -> InputError:
    forms = ["i-j", *["ipj for a possible link"] * possible, *["i-j:0.93 with a score"] * scores]
    fix = f"write {' or '.join(forms)}" + ", with words counted from 1" * from_one
    problem = f"{cell[:40]!r} is not a link"
    return InputError(problem, file=display_name(file), line=number, fix=fix)


@dataclass(frozen=True, slots=True)
class GoldLinks:
    """Links by human annotators; the sure links are among the possible ones."""

    sure: Links
    possible: Links
    file: str

    @property
    def n_pairs(self) -> int:
        """Number of annotated pairs."""
        return self.sure.n_pairs

    def select(self, start: int, stop: int) -> GoldLinks:
        """Return consecutive pairs, renumbered from 0."""
        sure, possible = (select_pairs(links, start, stop) for links in (self.sure, self.possible))
        return GoldLinks(sure, possible, self.file)

    def take(self, numbers: Sequence[int]) -> GoldLinks:
        """Return some pairs, given in ascending order and renumbered from 0."""
        sure, possible = (take_pairs(links, numbers) for links in (self.sure, self.possible))
        return GoldLinks(sure, possible, self.file)

    def check_words(self, pairs: Sequence[WordPair], first: int = 0) -> None:
        """Raise InputError if a link is outside its pair; `pairs` start at number `first`."""
        found = select_pairs(self.possible, first, first + len(pairs))
        n_src, n_tgt = (
            np.array([len(pair[side]) for pair in pairs], dtype=np.int64) for side in (0, 1)
        )
        links = ParsedLinks(found.pairs, found.src, found.tgt, np.empty(0, bool), np.empty(0))
        links.check_bounds(
            n_src,
            n_tgt,
            self.file,
            numbers=range(first + 1, first + 1 + len(pairs)),
            fix="use --gold-from-one if the words of the file are counted from 1",
        )


def read_links(path: PathLike, *, from_one: bool = False) -> Links:
    """Read links with their scores, sorted; a link without a score has score 1."""
    lines = list(read_lines(path))
    found = parse_links(lines, path, from_one=from_one, possible=True)
    order = np.lexsort((found.tgt, found.src, found.lines))
    scores = np.where(np.isnan(found.scores), 1.0, found.scores)[order].astype(np.float32)
    return Links(found.lines[order], found.src[order], found.tgt[order], scores, len(lines))


def read_gold(path: PathLike, *, from_one: bool = False) -> GoldLinks:
    """Read gold links, sure and possible; text after a colon is ignored."""
    lines = list(read_lines(path))
    found = parse_links(lines, path, from_one=from_one, possible=True, scores=False)
    rows = np.stack([found.lines, found.src, found.tgt], axis=1)
    sure, both = (
        build_links(sorted(set(map(tuple, chosen.tolist()))), len(lines))
        for chosen in (rows[found.is_sure], rows)
    )
    return GoldLinks(sure, both, display_name(path))


def build_links(
    rows: Sequence[tuple[int, int, int]], n_pairs: int, scores: Sequence[float] | None = None
) -> Links:
    """Return links from sorted rows of pair, source word and target word."""
    table = np.array(rows, dtype=np.int64).reshape(-1, 3)
    values = np.ones(len(table)) if scores is None else np.array(scores)
    return Links(table[:, 0], table[:, 1], table[:, 2], values.astype(np.float32), n_pairs)


def select_pairs(links: Links, start: int, stop: int) -> Links:
    """Return the links of consecutive pairs, renumbered from 0."""
    stop = min(stop, links.n_pairs)
    own = slice(*np.searchsorted(links.pairs, [start, stop]).tolist())
    pairs = links.pairs[own] - start
    return Links(pairs, links.src[own], links.tgt[own], links.scores[own], stop - start)


def take_pairs(links: Links, numbers: Sequence[int]) -> Links:
    """Return the links of some pairs, given in ascending order and renumbered from 0."""
    wanted = np.array(numbers, dtype=np.int64)
    own = np.isin(links.pairs, wanted)
    pairs = np.searchsorted(wanted, links.pairs[own])
    return Links(pairs, links.src[own], links.tgt[own], links.scores[own], len(wanted))


def format_links(
    links: Links, pairs: Sequence[WordPair], format: LinkFormat = "pharaoh", *, scores: bool = False
) -> list[str]:
    """Return one line of links per pair, without line ends.

    `pharaoh` is `i-j`, `words` is `word-word` with control characters escaped, and `jsonl` holds
    the words and always the scores: `{"src": …, "tgt": …, "links": [[i, j, score]]}`.
    """
    check_choice("format", format, get_args(LinkFormat))
    if format == "pharaoh":
        return format_pharaoh(links, scores=scores)
    if format == "jsonl":
        return _format_jsonl(links, pairs)
    cells = [
        printable(f"{pairs[pair][0][i]}-{pairs[pair][1][j]}", None)
        for pair, i, j in zip(
            links.pairs.tolist(), links.src.tolist(), links.tgt.tolist(), strict=True
        )
    ]
    return _join_cells(links, cells, scores)


def format_pharaoh(links: Links, *, scores: bool = False) -> list[str]:
    """Return the links of each pair as `i-j`, or with scores as `i-j:0.9300`."""
    cells = list(map("%d-%d".__mod__, zip(links.src.tolist(), links.tgt.tolist(), strict=True)))
    return _join_cells(links, cells, scores)


def _join_cells(links: Links, cells: list[str], scores: bool) -> list[str]:
    if scores:
        values = links.scores.tolist()
        cells = [
            f"{cell}:{value:.{N_SCORE_DECIMALS}f}"
            for cell, value in zip(cells, values, strict=True)
        ]
    return [" ".join(cells[start:stop]) for start, stop in pairwise(_offsets(links))]


def _format_jsonl(links: Links, pairs: Sequence[WordPair]) -> list[str]:
    rounded = links.scores.astype(np.float64).round(N_SCORE_DECIMALS).tolist()
    cells = list(map(list, zip(links.src.tolist(), links.tgt.tolist(), rounded, strict=True)))
    return [
        json.dumps(
            {"src": list(src), "tgt": list(tgt), "links": cells[start:stop]}, ensure_ascii=False
        )
        for (src, tgt), (start, stop) in zip(pairs, pairwise(_offsets(links)), strict=True)
    ]


def _offsets(links: Links) -> list[int]:
    """Return where the links of each pair begin, and where those of the last pair end."""
    offsets: list[int] = np.searchsorted(links.pairs, np.arange(links.n_pairs + 1)).tolist()
    return offsets
