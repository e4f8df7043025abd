"""Mining translation pairs by margin score, and the threshold that separates them.

A cosine alone is a poor score, because some sentences are close to everything. The margin compares
it with the mean cosines of both sentences to their k nearest neighbors (Artetxe & Schwenk, 2019).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from calque.algorithms.nearest import Neighbors

    Floats: TypeAlias = npt.NDArray[np.float32]
    Rows: TypeAlias = npt.NDArray[np.int64]

Margin: TypeAlias = Literal["ratio", "distance", "absolute"]
Retrieval: TypeAlias = Literal["max", "intersect", "forward", "backward"]

# A smaller (or negative) mean is replaced by this: dividing by it would reverse the order.
SMALLEST_MEAN = 1e-6
MARGIN_NEIGHBORS = 4  # whose mean cosine a cosine is compared with; also LASER's number


@dataclass(frozen=True, slots=True)
class MinedPairs:
    """Pairs of rows and their scores, highest first; ties are ordered by source."""

    src: Rows
    tgt: Rows
    scores: Floats

    def __len__(self) -> int:
        return len(self.scores)

    def above(self, threshold: float) -> MinedPairs:
        """Return the pairs whose score is at least the threshold."""
        kept = slice(0, int(np.count_nonzero(self.scores >= threshold)))
        return MinedPairs(self.src[kept], self.tgt[kept], self.scores[kept])


def margin_scores(cosines: Floats, means: Floats, margin: Margin = "ratio") -> Floats:
    """Return cos(x, y) compared with m = (r(x) + r(y)) / 2 (Artetxe & Schwenk, 2019).

    The ratio is cos / m, the distance cos − m, and the absolute score cos itself; r is the mean
    cosine to the k nearest neighbors.

    >>> margin_scores(np.float32([0.8]), np.float32([0.4])).tolist()
    [2.0]
    """
    if margin == "absolute":
        return cosines
    if margin == "distance":
        return cosines - means
    return np.asarray(cosines / np.maximum(means, SMALLEST_MEAN), dtype=np.float32)


def mine_pairs(
    neighbors: Neighbors, margin: Margin = "ratio", retrieval: Retrieval = "max"
) -> MinedPairs:
    """Return the best pairs by margin (Artetxe & Schwenk, 2019).

    `forward` takes the best target of each source, `backward` the best source of each target,
    `intersect` the pairs in both, and `max` goes through all of them from the highest score and
    uses every sentence once.
    """
    src_means, tgt_means = neighbors.src_cosines.mean(axis=1), neighbors.tgt_cosines.mean(axis=1)
    src_rows, best_tgt, src_scores = _find_best(
        neighbors.src_cosines, neighbors.src_indices, src_means, tgt_means, margin
    )
    if retrieval == "forward":
        return _sort(src_rows, best_tgt, src_scores)
    tgt_rows, best_src, tgt_scores = _find_best(
        neighbors.tgt_cosines, neighbors.tgt_indices, tgt_means, src_means, margin
    )
    if retrieval == "backward":
        return _sort(best_src, tgt_rows, tgt_scores)
    if retrieval == "intersect":
        mutual = best_tgt[best_src] == tgt_rows
        return _sort(best_src[mutual], tgt_rows[mutual], tgt_scores[mutual])
    return _use_once(
        _sort(
            np.concatenate([src_rows, best_src]),
            np.concatenate([best_tgt, tgt_rows]),
            np.concatenate([src_scores, tgt_scores]),
        )
    )


def _find_best(
    cosines: Floats, indices: Rows, own_means: Floats, other_means: Floats, margin: Margin
) -> tuple[Rows, Rows, Floats]:
    """Return all rows, the neighbor of each with the highest margin, and that margin."""
    means = np.asarray((own_means[:, None] + other_means[indices]) / 2, dtype=np.float32)
    scores = margin_scores(cosines, means, margin)
    best = scores.argmax(axis=1)
    rows = np.arange(len(indices), dtype=np.int64)
    return rows, indices[rows, best], scores[rows, best]


def _sort(src: Rows, tgt: Rows, scores: Floats) -> MinedPairs:
    order = np.lexsort((tgt, src, -scores))
    return MinedPairs(src[order], tgt[order], scores[order])


def _use_once(pairs: MinedPairs) -> MinedPairs:
    """Keep pairs from the best on, without those whose source or target is already used."""
    n_src, n_tgt = (int(side.max(initial=-1)) + 1 for side in (pairs.src, pairs.tgt))
    src_used, tgt_used = bytearray(n_src), bytearray(n_tgt)
    kept = np.zeros(len(pairs), dtype=np.bool_)
    for row, (src, tgt) in enumerate(zip(pairs.src.tolist(), pairs.tgt.tolist(), strict=True)):
        if not (src_used[src] or tgt_used[tgt]):
            src_used[src] = tgt_used[tgt] = 1
            kept[row] = True
    return MinedPairs(pairs.src[kept], pairs.tgt[kept], pairs.scores[kept])


@dataclass(frozen=True, slots=True)
class ThresholdScore:
    """A threshold, how many pairs it keeps, and how many of those are gold pairs."""

    threshold: float
    n_kept: int
    n_correct: int
    n_gold: int

    @property
    def precision(self) -> float:
        """Share of the kept pairs that are gold."""
        return self.n_correct / self.n_kept if self.n_kept else 0.0

    @property
    def recall(self) -> float:
        """Share of the gold pairs that are kept."""
        return self.n_correct / self.n_gold if self.n_gold else 0.0

    @property
    def f1(self) -> float:
        """Harmonic mean of precision and recall."""
        total = self.n_kept + self.n_gold
        return 2 * self.n_correct / total if total else 0.0


def find_best_threshold(
    scores: Floats, is_gold: npt.NDArray[np.bool_], n_gold: int
) -> ThresholdScore:
    """Return the threshold with the best F1; among equals, the one that keeps the fewest pairs.

    It is halfway between the last pair kept and the next. If no pair is gold, it keeps nothing.

    >>> best = find_best_threshold(np.float32([0.9, 0.7, 0.4]), np.array([True, False, False]), 2)
    >>> round(best.threshold, 3), best.precision, best.recall
    (0.8, 1.0, 0.5)
    """
    order = np.argsort(-scores, kind="stable")
    ranked, n_correct = scores[order].astype(np.float64), np.cumsum(is_gold[order])
    # Pairs with the same score are kept together.
    ends = np.flatnonzero(np.append(ranked[1:] < ranked[:-1], [True] * bool(len(ranked))))
    if not len(ends) or not n_correct[-1]:
        return ThresholdScore(np.inf, 0, 0, n_gold)
    f1 = 2 * n_correct[ends] / (ends + 1 + n_gold)
    end = int(ends[f1.argmax()])
    following = ranked[end + 1] if end + 1 < len(ranked) else ranked[end]
    threshold = float((ranked[end] + following) / 2)
    return ThresholdScore(threshold, end + 1, int(n_correct[end]), n_gold)
