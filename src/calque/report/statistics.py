"""Statistics over seeds: means, tests, effect sizes, multiple-test correction, power."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import TYPE_CHECKING, Literal, TypeAlias

from calque.errors import MissingExtra

if TYPE_CHECKING:
    import numpy as np


Correction: TypeAlias = Literal["holm", "bh", "none"]
CORRECTIONS: tuple[Correction, ...] = ("holm", "bh", "none")
POWER = 0.8
MAX_SEEDS = 1000  # the largest number of seeds that is ever recommended
# With up to EXACT_SEEDS seeds all sign patterns are enumerated; with more they are sampled.
EXACT_SEEDS, N_SIGN_SAMPLES = 16, 100_000
MAX_SHIFT = 30  # standard errors beyond which the noncentral t equals the normal distribution
TINY = 1e-9  # points; scores that differ by less are equal


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean, sample standard deviation (n − 1) and number of the scores over seeds.

    The deviation is None for a single seed, and 0 if the score does not depend on a seed (`fixed`).
    """

    mean: float
    deviation: float | None
    n: int
    fixed: bool = False


@dataclass(frozen=True, slots=True)
class StandardError:
    """A standard error and its degrees of freedom."""

    se: float
    df: float


def check_scipy() -> None:
    """Raise MissingExtra if scipy, which has the distributions, is not installed."""
    try:
        import scipy.special  # noqa: F401
    except ImportError:
        raise MissingExtra("scipy", "eval") from None


def summarize(values: Sequence[float], *, fixed: bool = False) -> Spread:
    """Return mean and standard deviation of the scores over seeds.

    >>> summarize([1.0, 2.0, 3.0])
    Spread(mean=2.0, deviation=1.0, n=3, fixed=False)
    """
    mean = math.fsum(values) / len(values)
    if fixed:
        return Spread(mean, 0.0, len(values), True)
    if len(values) < 2:
        return Spread(mean, None, len(values))
    squares = math.fsum((value - mean) ** 2 for value in values)
    return Spread(mean, math.sqrt(squares / (len(values) - 1)), len(values))


def one_deviation_rule(
    model: Spread, baseline: Spread, deviation: float | None = None
) -> Literal["above", "below", "within"] | None:
    """Return on which side of the baseline's mean ± one standard deviation a model's mean is.

    This is the rule of Wu and Dredze (2020).
    Paper: "one standard deviation above or below the mean of baseline" (Table 1) does not say
    whose deviation. It is the baseline's: weak alignment of mBERT (parsing, 53.1 ± 0.6 against
    52.6 ± 0.4) counts as better in their text, which the model's own deviation would not allow.
    `deviation` replaces the baseline's deviation, as in their averages over languages.
    """
    if baseline.deviation is None or baseline.fixed:
        return None
    off = model.mean - baseline.mean
    if abs(off) <= (baseline.deviation if deviation is None else deviation):
        return "within"
    return "above" if off > 0 else "below"


def paired_error(model: Sequence[float], baseline: Sequence[float]) -> StandardError:
    """Return the standard error of the mean difference of scores that are paired by seed."""
    spread = summarize([a - b for a, b in zip(model, baseline, strict=True)])
    if spread.deviation is None:
        raise ValueError("one seed has no standard deviation")
    if spread.deviation <= TINY < abs(spread.mean):
        # Coarse scores can differ by the same amount for every seed, which proves nothing.
        return welch_error(summarize(model), summarize(baseline))
    return StandardError(spread.deviation / math.sqrt(spread.n), spread.n - 1)


def welch_error(model: Spread, baseline: Spread) -> StandardError:
    """Return the standard error of the difference of means over unrelated seeds (Welch, 1947)."""
    parts = [
        StandardError(side.deviation / math.sqrt(side.n), side.n - 1)
        for side in (model, baseline)
        if side.deviation is not None and not side.fixed
    ]
    return add_errors(*parts)


def add_errors(*errors: StandardError) -> StandardError:
    """Return the sum of independent errors, with Satterthwaite's degrees of freedom.

    For an error over seeds and one over items, (difference / se)² is min F′ of Clark (1973),
    F₁F₂ / (F₁ + F₂), with its degrees of freedom.
    """
    squares = [error.se**2 for error in errors]
    total = math.fsum(squares)
    if math.isinf(total):  # one unknown error makes the sum unknown
        return StandardError(math.inf, min(error.df for error in errors if math.isinf(error.se)))
    below = math.fsum(
        square**2 / error.df for square, error in zip(squares, errors, strict=True) if square
    )
    df = total**2 / below if below else math.inf
    return StandardError(math.sqrt(total), df)


def p_value(difference: float, error: StandardError) -> float:
    """Return the two-sided p-value of a difference (Student's t)."""
    from scipy.special import ndtr, stdtr

    if abs(difference) <= TINY:
        return 1.0
    if error.se <= TINY or error.df <= 0:
        return 0.0 if error.df > 0 else 1.0
    t = abs(difference) / error.se
    return float(2 * (ndtr(-t) if math.isinf(error.df) else stdtr(error.df, -t)))


def interval_half_width(error: StandardError, alpha: float) -> float:
    """Return half the width of the 1 − alpha confidence interval of a difference."""
    return _critical_value(error.df, alpha) * error.se if error.df > 0 else math.inf


def sign_flip_p(differences: Sequence[float], generator: np.random.Generator) -> float:
    """Return the p-value of paired differences under random sign flips, an exact permutation test.

    With n seeds it cannot be smaller than 2 / 2ⁿ: five seeds give at least 0.0625.
    """
    import numpy as np

    values = np.asarray(differences, np.float64)
    n = len(values)
    if n <= EXACT_SEEDS:
        # A sign pattern and its opposite give the same result, so half of them are enough.
        signs = np.array(list(islice(product((1.0, -1.0), repeat=n), 2 ** (n - 1))))
        n_observed = 0
    else:
        signs = generator.choice((1.0, -1.0), (N_SIGN_SAMPLES, n))
        n_observed = 1  # the observed pattern counts as one of the samples
    extreme = np.abs(signs @ values) >= abs(values.sum()) - TINY
    return float((extreme.sum() + n_observed) / (len(signs) + n_observed))


def hedges_g(model: Spread, baseline: Spread) -> float | None:
    """Return the difference in pooled standard deviations, corrected for small samples.

    Hedges (1981): g = J(df) · difference / pooled, J(df) = Γ(df/2) / (√(df/2) Γ((df − 1)/2)).
    """
    sides = [side for side in (model, baseline) if not side.fixed]
    if not sides or any(side.deviation is None for side in sides):
        return None
    df = sum(side.n - 1 for side in sides)
    pooled = math.sqrt(sum((side.n - 1) * (side.deviation or 0) ** 2 for side in sides) / df)
    if pooled <= TINY or df < 2:
        return None
    bias = math.exp(math.lgamma(df / 2) - math.lgamma((df - 1) / 2)) / math.sqrt(df / 2)
    return bias * (model.mean - baseline.mean) / pooled


def adjust_p_values(ps: Sequence[float], method: Correction) -> list[float]:
    """Return p-values adjusted for many tests: Holm (1979) or Benjamini and Hochberg (1995).

    Holm controls the probability of any false positive, Benjamini–Hochberg the share of false
    positives.

    >>> adjust_p_values([0.01, 0.04, 0.03], "holm")
    [0.03, 0.06, 0.06]
    """
    if method == "none":
        return list(ps)
    order = sorted(range(len(ps)), key=lambda index: ps[index])
    adjusted = list(ps)
    n, bound = len(ps), 0.0 if method == "holm" else 1.0
    if method == "holm":
        for rank, index in enumerate(order):
            adjusted[index] = bound = max(bound, min(1.0, (n - rank) * ps[index]))
    else:
        for rank, index in reversed(list(enumerate(order, start=1))):
            adjusted[index] = bound = min(bound, n * ps[index] / rank)
    return adjusted


def power_of_test(difference: float, error: StandardError, alpha: float) -> float:
    """Return the power of a two-sided t-test for a true difference (noncentral t)."""
    from scipy.special import nctdtr, ndtr

    shift = abs(difference) / error.se if error.se > 0 else math.inf
    critical = _critical_value(error.df, alpha)
    if math.isinf(error.df) or shift > MAX_SHIFT:
        return float(ndtr(shift - critical) + ndtr(-shift - critical))
    # The other tail is negligible for large shifts, where SciPy returns NaN.
    other_tail = 0.0 if shift > 5 else nctdtr(error.df, shift, -critical)
    return float(1 - nctdtr(error.df, shift, critical) + other_tail)


def count_seeds_needed(
    difference: float, deviation: float, items: Callable[[int], StandardError] | None, alpha: float
) -> int | None:
    """Return the number of seeds for a power of 80 %, or None if MAX_SEEDS are not enough.

    `deviation` is the standard deviation of one seed's difference; `items` returns the error over
    items for a number of seeds.
    """

    def is_enough(n: int) -> bool:
        seeds = StandardError(deviation / math.sqrt(n), n - 1)
        errors = [seeds] if items is None else [seeds, add_errors(seeds, items(n))]
        return all(power_of_test(difference, error, alpha) >= POWER for error in errors)

    if abs(difference) <= TINY or not is_enough(MAX_SEEDS):
        return None
    low, high = 1, MAX_SEEDS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def _critical_value(df: float, alpha: float) -> float:
    from scipy.special import ndtri, stdtrit

    return float(-ndtri(alpha / 2) if math.isinf(df) else -stdtrit(df, alpha / 2))
