"""Statistics of seeds: means, tests, effect sizes, corrections for many tests, seeds needed."""

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
MOST_SEEDS = 1000  # beyond it, no one will train them
# Up to so many seeds all signs are tried, beyond them so many are drawn.
EXACT_SEEDS, N_DRAWN_SIGNS = 16, 100_000
FAR = 30  # standard errors, where all is seen
TINY = 1e-9  # points; scores that differ less are the same


@dataclass(frozen=True, slots=True)
class Spread:
    """Scores over seeds: their mean, sample standard deviation (n − 1) and number.

    The deviation is None for a single seed, and 0 for what no seed touches (`fixed`).
    """

    mean: float
    deviation: float | None
    n: int
    fixed: bool = False


@dataclass(frozen=True, slots=True)
class Error:
    """A standard error and its degrees of freedom."""

    se: float
    df: float


def check_scipy() -> None:
    """Refuse before the work begins where the distributions are not installed."""
    try:
        import scipy.special  # noqa: F401
    except ImportError:
        raise MissingExtra("scipy", "eval") from None


def describe(values: Sequence[float], *, fixed: bool = False) -> Spread:
    """Summarize scores of seeds.

    >>> describe([1.0, 2.0, 3.0])
    Spread(mean=2.0, deviation=1.0, n=3, fixed=False)
    """
    mean = math.fsum(values) / len(values)
    if fixed:
        return Spread(mean, 0.0, len(values), True)
    if len(values) < 2:
        return Spread(mean, None, len(values))
    squares = math.fsum((value - mean) ** 2 for value in values)
    return Spread(mean, math.sqrt(squares / (len(values) - 1)), len(values))


def judge_by_deviation(
    model: Spread, baseline: Spread, deviation: float | None = None
) -> Literal["above", "below", "within"] | None:
    """Apply Wu and Dredze's rule: a mean one standard deviation off the baseline's mean.

    Paper: "one standard deviation above or below the mean of baseline" (their Table 1) leaves
    open whose deviation. It is the baseline's: weak alignment of mBERT (parsing, 53.1 ± 0.6
    against 52.6 ± 0.4) counts as better in their text, which the model's own would not allow.
    `deviation` replaces it where their tables do so: for an average of languages.
    """
    if baseline.deviation is None or baseline.fixed:
        return None
    off = model.mean - baseline.mean
    if abs(off) <= (baseline.deviation if deviation is None else deviation):
        return "within"
    return "above" if off > 0 else "below"


def measure_seed_error(model: Sequence[float], baseline: Sequence[float]) -> Error:
    """Give the error of the mean difference of scores that share their seeds, in order."""
    spread = describe([a - b for a, b in zip(model, baseline, strict=True)])
    if spread.deviation is None:
        raise ValueError("one seed has no deviation")
    if spread.deviation <= TINY < abs(spread.mean):
        # Coarse scores can differ by the same number everywhere: no proof of anything.
        return measure_welch_error(describe(model), describe(baseline))
    return Error(spread.deviation / math.sqrt(spread.n), spread.n - 1)


def measure_welch_error(model: Spread, baseline: Spread) -> Error:
    """Give the error of the difference of means of unrelated seeds (Welch, 1947)."""
    parts = [
        Error(side.deviation / math.sqrt(side.n), side.n - 1)
        for side in (model, baseline)
        if side.deviation is not None and not side.fixed
    ]
    return add_errors(*parts)


def add_errors(*errors: Error) -> Error:
    """Add independent errors, with Satterthwaite's degrees of freedom.

    For an error over seeds and one over items, (difference / se)² is Clark's (1973) min F′,
    F₁F₂ / (F₁ + F₂), with its degrees of freedom.
    """
    squares = [error.se**2 for error in errors]
    total = math.fsum(squares)
    if math.isinf(total):  # nothing is known, which no other error makes better
        return Error(math.inf, min(error.df for error in errors if math.isinf(error.se)))
    below = math.fsum(
        square**2 / error.df for square, error in zip(squares, errors, strict=True) if square
    )
    df = total**2 / below if below else math.inf
    return Error(math.sqrt(total), df)


def find_p(difference: float, error: Error) -> float:
    """Give the two-sided p of a difference by Student's t."""
    from scipy.special import ndtr, stdtr

    if abs(difference) <= TINY:
        return 1.0
    if error.se <= TINY or error.df <= 0:
        return 0.0 if error.df > 0 else 1.0
    t = abs(difference) / error.se
    return float(2 * (ndtr(-t) if math.isinf(error.df) else stdtr(error.df, -t)))


def find_half_width(error: Error, alpha: float) -> float:
    """Give half the width of the 1 − alpha interval around a difference."""
    return _find_critical(error.df, alpha) * error.se if error.df > 0 else math.inf


def flip_signs(differences: Sequence[float], generator: np.random.Generator) -> float:
    """Give the p of seeds' differences if their signs were thrown: no normal curve assumed.

    With n seeds it cannot fall below 2 / 2ⁿ: five seeds give 0.0625 at best.
    """
    import numpy as np

    values = np.asarray(differences, np.float64)
    n = len(values)
    if n <= EXACT_SEEDS:
        # Signs and their opposites count alike: half of them are enough.
        signs = np.array(list(islice(product((1.0, -1.0), repeat=n), 2 ** (n - 1))))
        drawn = 0
    else:
        signs = generator.choice((1.0, -1.0), (N_DRAWN_SIGNS, n))
        drawn = 1  # the observed signs are among the possible ones
    extreme = np.abs(signs @ values) >= abs(values.sum()) - TINY
    return float((extreme.sum() + drawn) / (len(signs) + drawn))


def measure_hedges_g(model: Spread, baseline: Spread) -> float | None:
    """Give the difference in pooled deviations over seeds, freed of small-sample bias.

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


def correct(ps: Sequence[float], method: Correction) -> list[float]:
    """Correct the p of many tests: Holm (1979) or Benjamini and Hochberg (1995).

    Holm bounds the chance of one false alarm or more; the other the share of false alarms.

    >>> correct([0.01, 0.04, 0.03], "holm")
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


def find_power(difference: float, error: Error, alpha: float) -> float:
    """Give the chance that a two-sided t-test sees a true difference (noncentral t)."""
    from scipy.special import nctdtr, ndtr

    shift = abs(difference) / error.se if error.se > 0 else math.inf
    critical = _find_critical(error.df, alpha)
    if math.isinf(error.df) or shift > FAR:
        return float(ndtr(shift - critical) + ndtr(-shift - critical))
    # The other tail is nothing by then, and SciPy gives not-a-number for it.
    wrong_way = 0.0 if shift > 5 else nctdtr(error.df, shift, -critical)
    return float(1 - nctdtr(error.df, shift, critical) + wrong_way)


def count_seeds_needed(
    difference: float, deviation: float, items: Callable[[int], Error] | None, alpha: float
) -> int | None:
    """Count the seeds with which a difference as large would be seen in four of five studies.

    `deviation` is that of one seed's difference; `items` gives the error over items with a
    number of seeds. None says that no number up to the limit is enough.
    """

    def is_enough(n: int) -> bool:
        seeds = Error(deviation / math.sqrt(n), n - 1)
        errors = [seeds] if items is None else [seeds, add_errors(seeds, items(n))]
        return all(find_power(difference, error, alpha) >= POWER for error in errors)

    if abs(difference) <= TINY or not is_enough(MOST_SEEDS):
        return None
    low, high = 1, MOST_SEEDS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def _find_critical(df: float, alpha: float) -> float:
    from scipy.special import ndtri, stdtrit

    return float(-ndtri(alpha / 2) if math.isinf(df) else -stdtrit(df, alpha / 2))
