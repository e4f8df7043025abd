"""Verdicts in words: helps, hurts, within noise, or cannot tell."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from calque.report.difference import Category, Difference
from calque.report.statistics import (
    MAX_SEEDS,
    POWER,
    Correction,
    StandardError,
    adjust_p_values,
    count_seeds_needed,
    power_of_test,
)

MIN_DIFFERENCE = 0.005  # points; tables show less as 0.0
MAX_FACTOR = 1000  # times as many test items
CORRECTION_NAMES = {"holm": "Holm", "bh": "Benjamini–Hochberg", "none": "no correction"}


def assign_verdicts(
    differences: Sequence[Difference], *, alpha: float, correction: Correction
) -> list[Difference]:
    """Return the differences of one family with adjusted p-values and verdicts."""
    tested = [each.p for each in differences if each.p is not None]
    adjusted = iter(adjust_p_values(tested, correction))
    judged = []
    for each in differences:
        p = None if each.p is None else next(adjusted)
        judged.append(_verdict(each, p, len(tested), alpha=alpha, correction=correction))
    return judged


def verdict_sentence(
    difference: Difference, model: str, *, alpha: float = 0.05, correction: Correction
) -> str:
    """Return the verdict of a difference as one sentence.

    For example "weak: +0.4 [−0.2, 1.0] on ner: within noise with 5 seeds; 23 would be needed".
    """
    c = difference
    place = f"the gap of {c.task}" if c.scope == "gap" else c.task
    if c.scope == "language":
        place += f" in {c.name}"
    start = f"{model}: {format_difference(c)} on {place}: "
    return start + _explain(c, alpha=alpha, correction=correction)


def format_difference(difference: Difference) -> str:
    """Return a difference with its interval, if it has one, as text."""
    c = difference
    shown = format_signed(c.difference)
    if c.low is None or c.high is None:
        return shown
    return f"{shown} [{format_signed(c.low, plus=False)}, {format_signed(c.high, plus=False)}]"


def format_signed(value: float, *, plus: bool = True, digits: int = 1) -> str:
    """Return a number with a minus sign (−), or a plus if asked.

    >>> format_signed(0.44), format_signed(-0.26), format_signed(-0.01)
    ('+0.4', '−0.3', '0.0')
    >>> format_signed(1.0, plus=False)
    '1.0'
    """
    text = f"{abs(value):.{digits}f}"
    if not float(text):
        return text
    return ("−" if value < 0 else "+" if plus else "") + text


def verdict_name(difference: Difference) -> str:
    """Return the name of the verdict; a gap is narrowed or widened."""
    if difference.scope != "gap":
        return difference.category
    names = {"helps": "narrowed", "hurts": "widened"}
    return names.get(difference.category, difference.category)


def summarize_verdicts(differences: Sequence[Difference], model: str) -> str:
    """Return one line that counts the verdicts of a model over all tasks."""
    counts = dict.fromkeys(("helps", "hurts", "within noise", "cannot tell"), 0)
    for each in differences:
        counts[each.category] += 1
    parts = [f"{name} on {n}" for name, n in counts.items() if n or name in ("helps", "hurts")]
    n_tasks = f"{len(differences)} task" + ("s" if len(differences) > 1 else "")
    return f"{model}, {n_tasks}: {', '.join(parts)}"


def _verdict(
    c: Difference, p: float | None, n_tests: int, *, alpha: float, correction: Correction
) -> Difference:
    if p is None:
        return replace(c, category="cannot tell", n_tests=n_tests)
    excluded = c.item_low is None or c.item_high is None or c.item_low > 0 or c.item_high < 0
    category: Category = "helps" if c.gain > 0 else "hurts"
    if p > alpha or not excluded:
        category = "within noise"
    needed = None
    if category == "within noise" and c.deviation is not None:
        level = alpha if correction == "none" else alpha / n_tests
        needed = count_seeds_needed(c.difference, c.deviation, _item_error_by_seeds(c), level)
    return replace(c, p_adjusted=p, category=category, n_tests=n_tests, seeds_needed=needed)


def _explain(c: Difference, *, alpha: float, correction: Correction) -> str:
    if c.p is None or c.p_adjusted is None:
        return _unknown_reason(c)
    basis = _basis(c)
    if c.category != "within noise":
        after = "" if correction == "none" or c.n_tests == 1 else f" after {c.n_tests} tests"
        return f"{verdict_name(c)} ({basis}; p {format_p(c.p_adjusted)}{after})"
    if c.difference == 0 and c.low is not None and c.low == c.high:
        return f"there is no difference ({basis})"
    words = f"within noise with {basis}"
    if c.p <= alpha < c.p_adjusted:
        words += f", corrected for {c.n_tests} tests"
    return f"{words}; {_needed(c, alpha=alpha, correction=correction)}"


def format_p(p: float) -> str:
    """Return a p-value with its relation.

    >>> format_p(0.0312), format_p(0.0000001)
    ('= 0.031', '< 0.001')
    """
    return "< 0.001" if p < 0.001 else f"= {p:.3f}" if p < 0.1 else f"= {p:.2f}"


def _basis(c: Difference) -> str:
    items = f"{c.n_items:,} test items"
    if not c.n_seeds:
        return f"{items}, no seeds"
    seeds = f"{c.n_seeds} seeds" + ("" if c.paired else " per model, unpaired")
    return seeds if c.n_items else f"{seeds}, without test items"


def _unknown_reason(c: Difference) -> str:
    if c.n_seeds == 1:
        return "one seed is not enough for a verdict; run 5 (--seeds 5)"
    return "a verdict needs seeds or test items"


def _needed(c: Difference, *, alpha: float, correction: Correction) -> str:
    """Return what would be needed to detect a difference of this size."""
    level = alpha if correction == "none" else alpha / c.n_tests
    if c.deviation is None:
        return _items_needed(c, level).replace("as many", "as many test items")
    if c.seeds_needed is not None:
        if c.seeds_needed <= c.n_seeds:  # the power is sufficient, but the test did not reject
            return "a few more seeds would decide"
        return f"{c.seeds_needed} seeds would be needed to detect it"
    irreducible = None if c.item_errors is None else c.item_errors.irreducible
    if (
        irreducible
        and irreducible.se > 0
        and power_of_test(c.difference, irreducible, level) < POWER
    ):
        return f"no number of seeds would detect it on these items: {_items_needed(c, level)}"
    return f"more than {MAX_SEEDS:,} seeds would be needed to detect it"


def _item_error_by_seeds(c: Difference) -> Callable[[int], StandardError] | None:
    """Return the error over items as a function of the number of seeds, which reduce part of it."""
    if c.item_errors is None:
        return None
    whole, irreducible = c.item_errors.resampling, c.item_errors.irreducible
    reducible = max(0.0, whole.se**2 - irreducible.se**2) * c.n_seeds
    return lambda n: StandardError(math.sqrt(irreducible.se**2 + reducible / n), whole.df)


def _items_needed(c: Difference, level: float) -> str:
    """Return how many times as many items would be needed, whatever the number of seeds."""
    nothing = "the difference is close to zero"
    if c.item_errors is None or abs(c.difference) < MIN_DIFFERENCE:
        return nothing
    error = c.item_errors.resampling if c.deviation is None else c.item_errors.irreducible
    factor = 1.0
    while power_of_test(c.difference, _with_more_items(error, factor), level) < POWER:
        factor *= 1.02
        if factor > MAX_FACTOR:
            return nothing
    shown = f"{factor:.1f}" if factor < 3 else f"{factor:,.0f}"
    return f"about {shown} times as many would be needed"


def _with_more_items(error: StandardError, factor: float) -> StandardError:
    """Return the error with `factor` times as many items."""
    return StandardError(error.se / math.sqrt(factor), error.df * factor)
