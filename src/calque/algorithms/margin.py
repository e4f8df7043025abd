"""Which sentences of two languages translate each other: margins over their neighborhoods.

A cosine alone does not tell: some sentences are near to everything. The margin asks how much
nearer a pair is than its k nearest neighbors either way (Artetxe & Schwenk, 2019).

Where to cut a list of scored pairs so that what is kept agrees best with a gold list.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats: TypeAlias = npt.NDArray[np.float32]
    Rows: TypeAlias = npt.NDArray[np.int64]

Margin: TypeAlias = Literal["ratio", "distance", "absolute"]
Retrieval: TypeAlias = Literal["max", "intersect", "forward", "backward"]

# Below this a mean cosine says nothing, and dividing by it would turn the order around.
SMALLEST_MEAN = 1e-6


@dataclass(frozen=True, slots=True)
class Neighbors:
    """Every source's k nearest targets and every target's k nearest sources, with their cosines."""

    src_cosines: Floats  # sources × k
    src_places: Rows
    tgt_cosines: Floats  # targets × k
    tgt_places: Rows


@dataclass(frozen=True, slots=True)
class MinedPairs:
    """Pairs of rows and their scores, the highest first; of equals, in the order of sources."""

    src: Rows
    tgt: Rows
    scores: Floats

    def __len__(self) -> int:
        return len(self.scores)

    def above(self, threshold: float) -> MinedPairs:
        """Keep the pairs that score at least so much."""
        kept = slice(0, int(np.count_nonzero(self.scores >= threshold)))
        return MinedPairs(self.src[kept], self.tgt[kept], self.scores[kept])


def margin_scores(cosines: Floats, means: Floats, margin: Margin = "ratio") -> Floats:
    """Compare cosines with the mean cosines of the neighborhoods, (r(x) + r(y)) / 2.

    >>> margin_scores(np.float32([0.8]), np.float32([0.4])).tolist()
    [2.0]
    """
    if margin == "absolute":
        return cosines
    if margin == "distance":
        return cosines - means
    return np.asarray(cosines / np.maximum(means, SMALLEST_MEAN), dtype=np.float32)


def mine_pairs(
    near: Neighbors, margin: Margin = "ratio", retrieval: Retrieval = "max"
) -> MinedPairs:
    """Choose pairs by their margins: each source takes its best target, each target its source.

    `forward` and `backward` take one of both, `intersect` the pairs that both choose, and `max`
    goes through all of them from the best on and uses every sentence once.
    """
    src_means, tgt_means = near.src_cosines.mean(axis=1), near.tgt_cosines.mean(axis=1)
    forward = _best(near.src_cosines, near.src_places, src_means, tgt_means, margin)
    if retrieval == "forward":
        return _sort(forward)
    tgt, src, scores = _best(near.tgt_cosines, near.tgt_places, tgt_means, src_means, margin)
    backward = src, tgt, scores
    if retrieval == "backward":
        return _sort(backward)
    if retrieval == "intersect":
        chosen = forward[1]
        mutual = chosen[src] == tgt
        return _sort((src[mutual], tgt[mutual], scores[mutual]))
    all_src = np.concatenate([forward[0], src])
    all_tgt = np.concatenate([forward[1], tgt])
    return _use_once(_sort((all_src, all_tgt, np.concatenate([forward[2], scores]))))


def _best(
    cosines: Floats, places: Rows, own_means: Floats, other_means: Floats, margin: Margin
) -> tuple[Rows, Rows, Floats]:
    means = np.asarray((own_means[:, None] + other_means[places]) / 2, dtype=np.float32)
    scores = margin_scores(cosines, means, margin)
    best = scores.argmax(axis=1)
    rows = np.arange(len(places), dtype=np.int64)
    return rows, places[rows, best], scores[rows, best]


def _sort(pairs: tuple[Rows, Rows, Floats]) -> MinedPairs:
    src, tgt, scores = pairs
    order = np.lexsort((tgt, src, -scores))
    return MinedPairs(src[order], tgt[order], scores[order])


def _use_once(pairs: MinedPairs) -> MinedPairs:
    """Take pairs from the best on, but none whose source or target was taken before."""
    n_src, n_tgt = (int(side.max(initial=-1)) + 1 for side in (pairs.src, pairs.tgt))
    src_taken, tgt_taken = bytearray(n_src), bytearray(n_tgt)
    kept = np.zeros(len(pairs), dtype=np.bool_)
    for row, (src, tgt) in enumerate(zip(pairs.src.tolist(), pairs.tgt.tolist(), strict=True)):
        if not (src_taken[src] or tgt_taken[tgt]):
            src_taken[src] = tgt_taken[tgt] = 1
            kept[row] = True
    return MinedPairs(pairs.src[kept], pairs.tgt[kept], pairs.scores[kept])


@dataclass(frozen=True, slots=True)
class ThresholdScore:
    """Keep what scores at least `threshold`: so many pairs, so many of them among the gold ones."""

    threshold: float
    n_kept: int
    n_hits: int
    n_gold: int

    @property
    def precision(self) -> float:
        """The share of the kept pairs that are gold."""
        return self.n_hits / self.n_kept if self.n_kept else 0.0

    @property
    def recall(self) -> float:
        """The share of the gold pairs that are kept."""
        return self.n_hits / self.n_gold if self.n_gold else 0.0

    @property
    def f1(self) -> float:
        """Twice the hits over kept plus gold, the harmonic mean of precision and recall."""
        total = self.n_kept + self.n_gold
        return 2 * self.n_hits / total if total else 0.0


def find_best_threshold(
    scores: npt.NDArray[np.float32], is_gold: npt.NDArray[np.bool_], n_gold: int
) -> ThresholdScore:
    """Find the threshold of the best F1; of equals, the one that keeps fewest.

    It lies midway between the last pair kept and the next. Where no pair is gold, nothing is kept.

    >>> cut = choose_cut(np.float32([0.9, 0.7, 0.4]), np.array([True, False, False]), n_gold=2)
    >>> round(cut.threshold, 3), cut.precision, cut.recall
    (0.8, 1.0, 0.5)
    """
    order = np.argsort(-scores, kind="stable")
    ranked, hits = scores[order].astype(np.float64), np.cumsum(is_gold[order])
    # Pairs of one score stay together.
    ends = np.flatnonzero(np.append(ranked[1:] < ranked[:-1], [True] * bool(len(ranked))))
    if not len(ends) or not hits[-1]:
        return ThresholdScore(np.inf, 0, 0, n_gold)
    f1 = 2 * hits[ends] / (ends + 1 + n_gold)
    end = int(ends[f1.argmax()])
    after = ranked[end + 1] if end + 1 < len(ranked) else ranked[end]
    return ThresholdScore(float((ranked[end] + after) / 2), end + 1, int(hits[end]), n_gold)
