"""Numbers out of predictions; nothing here formats or prints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from calque.tools.embedder import normalize_rows
from calque.types import InputError, Links

if TYPE_CHECKING:
    import numpy.typing as npt

    Vectors = npt.NDArray[np.float32]

BLOCK_ROWS = 4096


@dataclass(frozen=True, slots=True)
class LinkCounts:
    """How many links there are, and how many of them the annotators know (Och and Ney, 2003).

    Counts of sentences add up to those of a corpus, of which the rates are meant. A rate of
    nothing is perfect: no link is wrong where there is none.

    >>> LinkCounts(n_links=4, n_sure=3, n_sure_found=2, n_possible_found=3).aer
    0.2857142857142857
    """

    n_links: int = 0
    n_sure: int = 0
    n_sure_found: int = 0
    n_possible_found: int = 0

    def __add__(self, other: LinkCounts) -> LinkCounts:
        return LinkCounts(
            self.n_links + other.n_links,
            self.n_sure + other.n_sure,
            self.n_sure_found + other.n_sure_found,
            self.n_possible_found + other.n_possible_found,
        )

    @property
    def precision(self) -> float:
        """The share of links that are at least possible: |A ∩ P| / |A|."""
        return self.n_possible_found / self.n_links if self.n_links else 1.0

    @property
    def recall(self) -> float:
        """The share of sure links that were found: |A ∩ S| / |S|."""
        return self.n_sure_found / self.n_sure if self.n_sure else 1.0

    @property
    def f1(self) -> float:
        """The harmonic mean of precision and recall."""
        total = self.precision + self.recall
        return 2 * self.precision * self.recall / total if total else 0.0

    @property
    def aer(self) -> float:
        """The alignment error rate: 1 − (|A ∩ S| + |A ∩ P|) / (|A| + |S|)."""
        n_all = self.n_links + self.n_sure
        return 1 - (self.n_sure_found + self.n_possible_found) / n_all if n_all else 0.0


def count_links(links: Links, sure: Links, possible: Links) -> LinkCounts:
    """Compare links with gold ones; a sure link counts as possible whether it is listed or not."""
    if not links.n_pairs == sure.n_pairs == possible.n_pairs:
        raise InputError(
            f"links of {links.n_pairs} pairs, gold of {sure.n_pairs} and {possible.n_pairs}",
            fix="give links and gold of the same pairs",
        )
    mine, certain, others = map(np.unique, _number_links(links, sure, possible))
    is_sure = np.isin(mine, certain, assume_unique=True)
    is_possible = is_sure | np.isin(mine, others, assume_unique=True)
    return LinkCounts(len(mine), len(certain), int(is_sure.sum()), int(is_possible.sum()))


def _number_links(*groups: Links) -> list[npt.NDArray[np.int64]]:
    """Give equal links equal numbers, whichever group they are in."""
    width = 1 + max((int(group.tgt.max(initial=0)) for group in groups), default=0)
    places = [group.src * width + group.tgt for group in groups]
    known = np.unique(np.concatenate(places))  # so that the product below stays small
    return [
        group.pairs * len(known) + np.searchsorted(known, place)
        for group, place in zip(groups, places, strict=True)
    ]


def find_nearest(queries: Vectors, candidates: Vectors) -> npt.NDArray[np.int64]:
    """Find for every query its nearest candidate by cosine; of equals, the first.

    >>> find_nearest(np.float32([[2, 1], [0, 3]]), np.float32([[0, 1], [1, 0], [0, 2]])).tolist()
    [1, 0]
    """
    if len(candidates) == 0:
        raise InputError("there is nothing to search among", fix="give at least one candidate")
    targets = normalize_rows(candidates).T
    blocks = [
        (normalize_rows(queries[start : start + BLOCK_ROWS]) @ targets).argmax(axis=1)
        for start in range(0, len(queries), BLOCK_ROWS)
    ]
    return np.concatenate([np.zeros(0, dtype=np.int64), *blocks])


def retrieval_accuracy(src: Vectors, tgt: Vectors) -> tuple[float, float]:
    """Return how often row k's nearest row on the other side is k: src → tgt, tgt → src.

    >>> retrieval_accuracy(np.float32([[1, 0], [1, 1]]), np.float32([[1, 0.1], [1, 0.2]]))
    (1.0, 0.5)
    """
    if len(src) != len(tgt) or len(src) == 0:
        raise InputError(
            f"{len(src)} vectors cannot be paired with {len(tgt)}", fix="give pairs, row by row"
        )
    gold = np.arange(len(src))
    forward, backward = find_nearest(src, tgt) == gold, find_nearest(tgt, src) == gold
    return float(forward.mean()), float(backward.mean())
