"""Where to cut a list of scored pairs so that what is kept agrees best with a gold list."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Cut:
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


def choose_cut(scores: npt.NDArray[np.float32], is_gold: npt.NDArray[np.bool_], n_gold: int) -> Cut:
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
        return Cut(np.inf, 0, 0, n_gold)
    f1 = 2 * hits[ends] / (ends + 1 + n_gold)
    end = int(ends[f1.argmax()])
    after = ranked[end + 1] if end + 1 < len(ranked) else ranked[end]
    return Cut(float((ranked[end] + after) / 2), end + 1, int(hits[end]), n_gold)
