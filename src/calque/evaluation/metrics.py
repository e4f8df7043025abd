"""Numbers out of predictions; nothing here formats or prints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from calque.errors import InputError
from calque.sentences.embed import normalize_rows
from calque.types import Links

if TYPE_CHECKING:
    import numpy.typing as npt

    Vectors = npt.NDArray[np.float32]
    IntArray = npt.NDArray[np.int64]

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
    return LinkCounts(*count_links_by_pair(links, sure, possible).sum(axis=1).tolist())


def count_links_by_pair(links: Links, sure: Links, possible: Links) -> npt.NDArray[np.int64]:
    """Compare links with gold ones pair by pair: a row a field of `LinkCounts`, a column a pair."""
    if not links.n_pairs == sure.n_pairs == possible.n_pairs:
        raise InputError(
            f"links of {links.n_pairs} pairs, gold of {sure.n_pairs} and {possible.n_pairs}",
            fix="give links and gold of the same pairs",
        )
    numbers, n_places = _number_links(links, sure, possible)
    mine, certain, others = map(np.unique, numbers)
    is_sure = np.isin(mine, certain, assume_unique=True)
    is_possible = is_sure | np.isin(mine, others, assume_unique=True)
    groups = (mine, certain, mine[is_sure], mine[is_possible])
    return np.stack([np.bincount(g // n_places, minlength=links.n_pairs) for g in groups])


def _number_links(*groups: Links) -> tuple[list[npt.NDArray[np.int64]], int]:
    """Give equal links equal numbers, whichever group they are in: pair · places + place."""
    width = 1 + max((int(group.tgt.max(initial=0)) for group in groups), default=0)
    places = [group.src * width + group.tgt for group in groups]
    known = np.unique(np.concatenate(places))  # so that the product below stays small
    n_places = max(1, len(known))
    numbers = [
        group.pairs * n_places + np.searchsorted(known, place)
        for group, place in zip(groups, places, strict=True)
    ]
    return numbers, n_places


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


def find_ranks(found: IntArray, queries: IntArray, answers: IntArray) -> IntArray:
    """Give the place of each query's first right answer, counted from 0; the width if none is.

    Row q of `found` holds what was found for query q, the best first; `queries[e]` may be answered
    by `answers[e]`, and a query by several.

    >>> find_ranks(np.array([[7, 8], [9, 7]]), np.array([0, 1, 1]), np.array([8, 5, 9])).tolist()
    [1, 0]
    """
    is_right = found[queries] == answers[:, None]
    n_queries, width = found.shape
    places = np.where(is_right.any(axis=1), is_right.argmax(axis=1), width)
    ranks = np.full(n_queries, width, dtype=np.int64)
    np.minimum.at(ranks, queries, places)
    return ranks


def precision_at_k(ranks: IntArray, k: int, n_queries: int | None = None) -> float:
    """Give the share of queries with a right answer among their first k; of none, 0.

    With `n_queries`, that many were asked: those without a rank found nothing.

    >>> precision_at_k(np.array([0, 4, 1]), 2), precision_at_k(np.array([0, 4, 1]), 2, 4)
    (0.6666666666666666, 0.5)
    """
    n_asked = len(ranks) if n_queries is None else n_queries
    return int((ranks < k).sum()) / n_asked if n_asked else 0.0


def pearson_correlation(x: npt.ArrayLike, y: npt.ArrayLike) -> float:
    """Give the linear correlation of two sets of numbers; 0 where one of them is constant.

    >>> round(pearson_correlation([1, 2, 3], [1, 2, 6]), 3)
    0.945
    """
    sides = [np.asarray(side, dtype=np.float64) for side in (x, y)]
    if sides[0].shape != sides[1].shape or sides[0].ndim != 1:
        shapes = " and ".join(str(side.shape) for side in sides)
        raise InputError(f"numbers of shapes {shapes} cannot be paired", fix="give pairs")
    if any(side.size < 2 or side.min() == side.max() for side in sides):
        return 0.0
    centered = [side - side.mean() for side in sides]
    lengths = [float(np.linalg.norm(side)) for side in centered]
    if not all(lengths):
        return 0.0
    product = (centered[0] / lengths[0]) @ (centered[1] / lengths[1])
    return float(np.clip(product, -1.0, 1.0))


def spearman_correlation(x: npt.ArrayLike, y: npt.ArrayLike) -> float:
    """Give the correlation of ranks, where equal numbers share the mean of theirs.

    >>> round(spearman_correlation([1, 2, 3, 4], [1, 2, 2, 100]), 3)
    0.949
    """
    return pearson_correlation(*(_rank(np.asarray(side)) for side in (x, y)))


def harmonic_mean(x: float, y: float) -> float:
    """Give 2xy / (x + y), and 0 unless both are above it.

    >>> harmonic_mean(0.6, 0.3), harmonic_mean(-0.1, 0.5)
    (0.4, 0.0)
    """
    return 2 * x * y / (x + y) if min(x, y) > 0 else 0.0


def _rank(values: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: npt.NDArray[np.float64] = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return ranks
