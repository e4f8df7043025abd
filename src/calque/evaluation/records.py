"""Scores of one model on one task, one record per language."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class ItemScores:
    """Contribution of every test item to a score of the form 100 · Σ numerators / Σ denominators.

    For accuracy all denominators are 1. For F1 the numerator is twice the number of correct
    predictions and the denominator the number of predictions plus the number of gold answers.
    `calque compare` resamples these items to test whether two models differ.
    """

    numerators: npt.NDArray[np.float64]
    denominators: npt.NDArray[np.float64]

    @property
    def score(self) -> float:
        """The score in percent; 0 if the denominators sum to 0."""
        total = float(self.denominators.sum())
        return 100 * float(self.numerators.sum()) / total if total else 0.0


@dataclass(frozen=True, slots=True)
class LanguageScores:
    """Scores of one model in one language of a task, in percent.

    Attributes:
        language: Language or language pair of the test.
        metrics: All metrics; the first one is the main metric.
        n_items: Number of test items.
        items: Contribution of every item to the main metric, if it is a ratio of sums.
        layers: All metrics by layer, for tasks that measure several layers.
        counts: Facts about the data, such as the layer used or the sentences that were split.
        notes: Facts that are not numbers, such as the signature of a BLEU score.
    """

    language: str
    metrics: Mapping[str, float]
    n_items: int
    items: ItemScores | None = None
    layers: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)


def note_upper_bound(n_human: int) -> dict[str, str]:
    """Return the note on a score for which tests were read beside human translations (plug=in).

    A system that is used has machine translations at best, so that such a score is an upper bound.
    """
    return {"upper_bound": "tests are read beside human translations"} if n_human else {}
