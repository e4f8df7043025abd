"""Scores as probabilities: logistic regression on their log-odds, and how reliable the result is.

Platt (1999), "Probabilistic outputs for support vector machines".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from calque.errors import InputError
from calque.types import Reliability

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Float
    from torch import Tensor

    FloatArray = npt.NDArray[np.float64]

# Scores closer to 0 or 1 count as this close: their log-odds would be infinite.
MIN_SCORE = 1e-6
MAX_STEPS, TOLERANCE = 100, 1e-8


@dataclass(frozen=True, slots=True)
class Calibration:
    """Turns a score s from 0 to 1 into the probability σ(slope · log(s / (1 − s)) + intercept).

    `threshold` is the probability from which on a word pair is linked by default.
    """

    slope: float
    intercept: float
    threshold: float = 0.5

    def apply(self, scores: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return the probabilities of scores.

        >>> import torch
        >>> Calibration(2.0, 0.0).apply(torch.tensor([0.5, 0.75])).tolist()
        [0.5, 0.8999999761581421]
        """
        return (self.slope * scores.logit(eps=MIN_SCORE) + self.intercept).sigmoid()


def fit_calibration(
    scores: npt.NDArray[np.float32], is_right: npt.NDArray[np.bool_]
) -> Calibration:
    """Return the calibration with the highest likelihood of what is right and what is not.

    As Platt does, the likelihood has targets of (n₊ + 1) / (n₊ + 2) and 1 / (n₋ + 2) instead of 1
    and 0, so that it has a maximum even if a score separates right from wrong.
    """
    n_right, n_wrong = int(is_right.sum()), int((~is_right).sum())
    if not n_right or not n_wrong:
        problem = f"{n_right:,} word pairs are gold links and {n_wrong:,} are not"
        raise InputError(problem, fix="calibrate with more sentence pairs, which have some of both")
    targets = np.where(is_right, (n_right + 1) / (n_right + 2), 1 / (n_wrong + 2))
    clipped = scores.astype(np.float64).clip(MIN_SCORE, 1 - MIN_SCORE)
    log_odds = np.log(clipped) - np.log1p(-clipped)
    inputs = np.stack([log_odds, np.ones_like(log_odds)])
    return Calibration(*_maximize_likelihood(inputs, targets).tolist())


def bin_reliability(
    probabilities: npt.NDArray[np.float32], is_right: npt.NDArray[np.bool_], n_bins: int = 10
) -> Reliability:
    """Compare probabilities with the share of what is right, in bins of equal width.

    >>> found = bin_reliability(np.array([0.1, 0.3, 0.9]), np.array([False, True, True]), 2)
    >>> found.n_items.tolist(), found.right.tolist()
    ([2, 1], [0.5, 1.0])
    """
    bins = (probabilities * n_bins).astype(np.int64).clip(max=n_bins - 1)
    n_items = np.bincount(bins, minlength=n_bins)
    divisor = np.maximum(n_items, 1)
    return Reliability(
        n_items,
        np.bincount(bins, probabilities, minlength=n_bins) / divisor,
        np.bincount(bins, is_right, minlength=n_bins) / divisor,
    )


def _maximize_likelihood(inputs: FloatArray, targets: FloatArray) -> FloatArray:
    """Return the weights of a logistic regression by Newton's method; row k belongs to weight k."""
    weights = np.zeros(len(inputs))
    for _ in range(MAX_STEPS):
        expected = 1 / (1 + np.exp(-(weights @ inputs)))
        gradient = inputs @ (expected - targets)
        hessian = (inputs * (expected * (1 - expected))) @ inputs.T
        step = np.linalg.lstsq(hessian, gradient)[0]  # equal scores have no unique solution
        weights = weights - step
        if abs(step).max() < TOLERANCE:
            break
    return weights
