"""Precision, recall, F1 and alignment error rate (AER) of word links against gold links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from calque.errors import InputError
from calque.io.links import GoldLinks
from calque.types import Links
from calque.word_alignment.protocol import AlignedBlock, Aligner, WordPair

if TYPE_CHECKING:
    import numpy.typing as npt

    IntArray = npt.NDArray[np.int64]
    BoolArray = npt.NDArray[np.bool_]

BLOCK_PAIRS = 2048


class LayeredAligner(Aligner, Protocol):
    """An aligner that works at any layer of its encoder.

    If it can align at several layers in one pass of the encoder, it also has a method
    `align_layers(pairs, layers) -> Mapping[int, AlignedBlock]`.
    """

    def with_layer(self, layer: int) -> Aligner:
        """Return the same aligner at another layer."""
        ...


@dataclass(frozen=True, slots=True)
class LinkCounts:
    """Counts of found links A, sure gold links S and possible gold links P (Och and Ney, 2003).

    Counts of sentence pairs can be added; the rates are those of the whole corpus. A rate whose
    denominator is 0 counts as perfect.

    >>> LinkCounts(n_links=4, n_sure=3, n_sure_found=2, n_possible_found=3).aer
    0.2857142857142857
    """

    n_links: int = 0
    n_sure: int = 0
    n_sure_found: int = 0
    n_possible_found: int = 0

    def __add__(self, other: LinkCounts) -> LinkCounts:
        return LinkCounts(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    @property
    def precision(self) -> float:
        """Share of found links that are at least possible: |A ∩ P| / |A|."""
        return self.n_possible_found / self.n_links if self.n_links else 1.0

    @property
    def recall(self) -> float:
        """Share of sure links that were found: |A ∩ S| / |S|."""
        return self.n_sure_found / self.n_sure if self.n_sure else 1.0

    @property
    def f1(self) -> float:
        """Harmonic mean of precision and recall."""
        total = self.precision + self.recall
        return 2 * self.precision * self.recall / total if total else 0.0

    @property
    def aer(self) -> float:
        """Alignment error rate: 1 − (|A ∩ S| + |A ∩ P|) / (|A| + |S|)."""
        n_all = self.n_links + self.n_sure
        return 1 - (self.n_sure_found + self.n_possible_found) / n_all if n_all else 0.0


def count_links(links: Links, sure: Links, possible: Links) -> LinkCounts:
    """Compare links with gold links; a sure link always counts as possible too."""
    return LinkCounts(*count_links_by_pair(links, sure, possible).sum(axis=1).tolist())


def count_links_by_pair(links: Links, sure: Links, possible: Links) -> IntArray:
    """Compare links with gold links pair by pair.

    Row k of the result is field k of `LinkCounts`; column p is sentence pair p.
    """
    if not links.n_pairs == sure.n_pairs == possible.n_pairs:
        raise InputError(
            f"there are links of {links.n_pairs} pairs, but gold links of {sure.n_pairs} and "
            f"{possible.n_pairs}",
            fix="pass links and gold links of the same pairs",
        )
    numbers, n_cells = _number_links(links, sure, possible)
    found, certain, others = map(np.unique, numbers)
    is_sure = np.isin(found, certain, assume_unique=True)
    is_possible = is_sure | np.isin(found, others, assume_unique=True)
    groups = (found, certain, found[is_sure], found[is_possible])
    return np.stack([np.bincount(g // n_cells, minlength=links.n_pairs) for g in groups])


def judge_links(links: Links, gold: GoldLinks) -> tuple[BoolArray, BoolArray]:
    """Return for every link whether it is a sure gold link, and whether it is at least possible."""
    (found, sure, possible), _ = _number_links(links, gold.sure, gold.possible)
    is_sure = np.isin(found, sure)
    return is_sure, is_sure | np.isin(found, possible)


def count_layers(
    aligner: LayeredAligner, pairs: Sequence[WordPair], gold: GoldLinks, layers: Sequence[int]
) -> dict[int, LinkCounts]:
    """Align pairs at several layers and compare the links of each layer with the gold links."""
    tables = count_layers_by_pair(aligner, pairs, gold, layers)
    return {layer: LinkCounts(*table.sum(axis=1).tolist()) for layer, table in tables.items()}


def count_layers_by_pair(
    aligner: LayeredAligner, pairs: Sequence[WordPair], gold: GoldLinks, layers: Sequence[int]
) -> dict[int, IntArray]:
    """Align pairs at several layers; return a table as of `count_links_by_pair` for each layer."""
    parts = {layer: [np.zeros((4, 0), dtype=np.int64)] for layer in layers}
    for start in range(0, len(pairs), BLOCK_PAIRS):
        block = pairs[start : start + BLOCK_PAIRS]
        known = gold.select(start, start + len(block))
        aligned: Mapping[int, AlignedBlock]
        if hasattr(aligner, "align_layers"):
            aligned = aligner.align_layers(block, layers)
        else:
            aligned = {layer: aligner.with_layer(layer).align_block(block) for layer in layers}
        for layer, found in aligned.items():
            parts[layer].append(count_links_by_pair(found.links, known.sure, known.possible))
    return {layer: np.concatenate(tables, axis=1) for layer, tables in parts.items()}


def find_best_layer(scores: Mapping[int, float], *, higher_is_better: bool) -> int:
    """Return the layer with the best score; of equally good layers, the lowest.

    >>> find_best_layer({0: 0.3, 1: 0.1, 2: 0.1}, higher_is_better=False)
    1
    """
    sign = -1 if higher_is_better else 1
    return min(scores, key=lambda layer: (sign * scores[layer], layer))


def check_gold(gold: GoldLinks, n_pairs: int, text: object) -> None:
    """Raise InputError unless there is one line of gold links for every pair of a text."""
    if gold.n_pairs != n_pairs:
        raise InputError(
            f"the file has {gold.n_pairs:,} lines, but {text} has {n_pairs:,} pairs",
            file=gold.file,
            fix="write one line of links per pair",
        )


def _number_links(*groups: Links) -> tuple[list[IntArray], int]:
    """Return the links of every group as numbers `pair · n_cells + cell`, and n_cells.

    Equal links have equal numbers in all groups.
    """
    width = 1 + max((int(group.tgt.max(initial=0)) for group in groups), default=0)
    cells = [group.src * width + group.tgt for group in groups]
    known = np.unique(np.concatenate(cells))  # keeps the numbers small
    n_cells = max(1, len(known))
    numbers = [
        group.pairs * n_cells + np.searchsorted(known, cell)
        for group, cell in zip(groups, cells, strict=True)
    ]
    return numbers, n_cells
