"""What a model did on a task, language by language, with every test item's share of the score."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Items:
    """Test items of a score that is a ratio of sums: 100 · Σ numerators / Σ denominators.

    Accuracy has ones below; F1 has twice the hits above and predicted plus gold below; an error
    rate has its errors above. So resampling items resamples the score itself, whatever it is.
    """

    numerators: npt.NDArray[np.float64]
    denominators: npt.NDArray[np.float64]

    @property
    def score(self) -> float:
        """The score in percent; 0 where there is nothing to divide by."""
        total = float(self.denominators.sum())
        return 100 * float(self.numerators.sum()) / total if total else 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Scores of one model in one language of a task. The first metric is the main one.

    `layers` has the main metric by layer where a task looks at several; `counts` says what
    happened to the data: sentences in windows, tags repaired, questions without an answer;
    `notes` has what is no number, such as the signature of a score.
    """

    language: str
    metrics: Mapping[str, float]
    n_items: int
    items: Items | None = None
    layers: Mapping[int, float] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
