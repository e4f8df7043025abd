"""Translations out of two texts that were not translated line by line: bitext mining."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO, get_args

import numpy as np

from calque.align.margin import Margin, MinedPairs, Retrieval, mine_pairs
from calque.align.neighbors import EXACT, UnitRows, find_neighbors
from calque.align.thresholds import Cut, choose_cut
from calque.text.files import PathLike, shown
from calque.text.identified import read_id_pairs
from calque.types import InputError

if TYPE_CHECKING:
    import numpy.typing as npt

    from calque.tools.sentence_store import SentenceStore

MARGINS: tuple[str, ...] = get_args(Margin)
RETRIEVALS: tuple[str, ...] = get_args(Retrieval)
DECIMALS = 6


@dataclass(frozen=True, slots=True)
class MiningSettings:
    """How neighbors are found and pairs chosen; see `calque.align.margin`."""

    margin: Margin = "ratio"
    retrieval: Retrieval = "max"
    k: int = 4
    index: str = EXACT
    probes: int = 16

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        for name, value, known in (
            ("margin", self.margin, MARGINS),
            ("retrieval", self.retrieval, RETRIEVALS),
        ):
            if value not in known:
                raise InputError(f"no {name} {value!r}", fix=f"choose from: {', '.join(known)}")
        if self.k < 1 or self.probes < 1:
            raise InputError(f"k={self.k}, probes={self.probes}", fix="give 1 or more")


@dataclass(frozen=True, slots=True)
class Side:
    """One language of a search: its vectors, and whose they are.

    `rows` has the row of `store` of every vector. Without a store, sentences go by the number of
    their line.
    """

    vectors: UnitRows
    rows: npt.NDArray[np.int64]
    store: SentenceStore | None = None

    def show(self, place: int) -> tuple[str, str]:
        """Give the name, if there is one, and the text of a sentence."""
        row = int(self.rows[place])
        return ("", str(row + 1)) if self.store is None else self.store[row]


def mine(
    src: Side,
    tgt: Side,
    settings: MiningSettings | None = None,
    on_rows: Callable[[int], None] | None = None,
) -> MinedPairs:
    """Find the pairs of sentences that may be translations, the most likely first."""
    settings = settings or MiningSettings()
    if not len(src.vectors) or not len(tgt.vectors):
        raise InputError("a side without sentences", fix="give other files")
    if src.vectors.width != tgt.vectors.width:
        problem = f"vectors of {src.vectors.width} and {tgt.vectors.width} numbers"
        raise InputError(problem, fix="embed both texts with the same model")
    k = min(settings.k, len(src.vectors), len(tgt.vectors))
    near = find_neighbors(
        src.vectors, tgt.vectors, k, index=settings.index, probes=settings.probes, on_rows=on_rows
    )
    return mine_pairs(near, settings.margin, settings.retrieval)


def locate_gold(gold: PathLike, texts: Sequence[SentenceStore | int]) -> set[tuple[int, int]]:
    """Find the rows of a list of true pairs, by names or sentences, in the two texts.

    Of vectors alone, which are given by their number, pairs are those of lines. One that is not
    there is an error, which no one should have to wait for until the text is embedded.
    """
    entries = list(read_id_pairs(gold))
    if not entries:
        raise InputError("holds no pairs", file=shown(gold), fix="give another list")
    found = [
        _locate(text, {entry[column] for entry in entries}) for column, text in enumerate(texts)
    ]
    for number, entry in enumerate(entries, start=1):
        for name, known, text in zip(entry, found, texts, strict=True):
            if name not in known:
                file = "the vectors" if isinstance(text, int) else shown(text.file)
                problem, fix = f"{name[:40]!r} is not in {file}", "list pairs of these texts"
                raise InputError(problem, file=shown(gold), line=number, fix=fix)
    return {(found[0][entry[0]], found[1][entry[1]]) for entry in entries}


def choose_threshold(pairs: MinedPairs, src: Side, tgt: Side, gold: set[tuple[int, int]]) -> Cut:
    """Find the score to cut at, by the rows of true pairs."""
    chosen = zip(src.rows[pairs.src].tolist(), tgt.rows[pairs.tgt].tolist(), strict=True)
    is_gold = np.fromiter((pair in gold for pair in chosen), np.bool_, len(pairs))
    return choose_cut(pairs.scores, is_gold, len(gold))


def write_pairs(stream: TextIO, pairs: MinedPairs, src: Side, tgt: Side) -> int:
    """Write `score ⇥ source ⇥ target` lines, and the names after them where there are any.

    A tab inside a sentence becomes a space; how many sentences had one is given back.
    """
    n_tabs = 0
    for score, left, right in zip(
        pairs.scores.tolist(), pairs.src.tolist(), pairs.tgt.tolist(), strict=True
    ):
        shown_pair = src.show(left), tgt.show(right)
        n_tabs += sum("\t" in text for _, text in shown_pair)
        texts = [text.replace("\t", " ") for _, text in shown_pair]
        names = [name for name, _ in shown_pair] if any(name for name, _ in shown_pair) else []
        stream.write("\t".join([f"{score:.{DECIMALS}f}", *texts, *names]) + "\n")
    return n_tabs


def _locate(text: SentenceStore | int, wanted: set[str]) -> dict[str, int]:
    if not isinstance(text, int):
        return text.find(wanted)
    known = range(1, text + 1)
    return {name: int(name) - 1 for name in wanted if name.isdecimal() and int(name) in known}
