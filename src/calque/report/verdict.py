"""What comparisons say in plain words: helps, hurts, within noise, or cannot tell."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from calque.report.comparison import Category, Comparison
from calque.report.statistics import (
    MOST_SEEDS,
    POWER,
    Correction,
    Error,
    correct,
    count_seeds_needed,
    find_power,
)

SMALLEST = 0.005  # points, that a table shows as 0.0
MOST_TIMES = 1000
CORRECTION_NAMES = {"holm": "Holm", "bh": "Benjamini–Hochberg", "none": "no correction"}


def judge(
    comparisons: Sequence[Comparison], *, alpha: float, correction: Correction
) -> list[Comparison]:
    """Judge a family of comparisons together, with their p corrected for one another."""
    tested = [each.p for each in comparisons if each.p is not None]
    adjusted = iter(correct(tested, correction))
    judged = []
    for each in comparisons:
        p = None if each.p is None else next(adjusted)
        judged.append(_judge_one(each, p, len(tested), alpha=alpha, correction=correction))
    return judged


def say(comparison: Comparison, model: str, *, alpha: float = 0.05, correction: Correction) -> str:
    """Put a judged comparison in one sentence.

    Such as "weak: +0.4 [−0.2, 1.0] on ner: within noise with 5 seeds; 23 would be needed".
    """
    c = comparison
    place = f"the gap of {c.task}" if c.scope == "gap" else c.task
    if c.scope == "language":
        place += f" in {c.name}"
    start = f"{model}: {show_difference(c)} on {place}: "
    return start + _explain(c, alpha=alpha, correction=correction)


def show_difference(comparison: Comparison) -> str:
    """Show a difference with its interval, where it has one."""
    c = comparison
    shown = sign(c.difference)
    if c.low is None or c.high is None:
        return shown
    return f"{shown} [{sign(c.low, plus=False)}, {sign(c.high, plus=False)}]"


def sign(value: float, *, plus: bool = True, digits: int = 1) -> str:
    """Write a number with a real minus, and a plus.

    >>> sign(0.44), sign(-0.26), sign(-0.01), sign(1.0, plus=False)
    ('+0.4', '−0.3', '0.0', '1.0')
    """
    text = f"{abs(value):.{digits}f}"
    if not float(text):
        return text
    return ("−" if value < 0 else "+" if plus else "") + text


def name_category(comparison: Comparison) -> str:
    """Name the verdict; a gap narrows or widens."""
    if comparison.scope != "gap":
        return comparison.category
    names = {"helps": "narrowed", "hurts": "widened"}
    return names.get(comparison.category, comparison.category)


def count_verdicts(comparisons: Sequence[Comparison], model: str) -> str:
    """Sum up a model over all tasks in a line."""
    counts = dict.fromkeys(("helps", "hurts", "within noise", "cannot tell"), 0)
    for each in comparisons:
        counts[each.category] += 1
    parts = [f"{name} on {n}" for name, n in counts.items() if n or name in ("helps", "hurts")]
    n_tasks = f"{len(comparisons)} task" + ("s" if len(comparisons) > 1 else "")
    return f"{model}, {n_tasks}: {', '.join(parts)}"


def _judge_one(
    c: Comparison, p: float | None, n_tests: int, *, alpha: float, correction: Correction
) -> Comparison:
    if p is None:
        return replace(c, category="cannot tell", n_tests=n_tests)
    excluded = c.item_low is None or c.item_high is None or c.item_low > 0 or c.item_high < 0
    category: Category = "helps" if c.gain > 0 else "hurts"
    if p > alpha or not excluded:
        category = "within noise"
    needed = None
    if category == "within noise" and c.deviation is not None:
        level = alpha if correction == "none" else alpha / n_tests
        needed = count_seeds_needed(c.difference, c.deviation, _foresee_items(c), level)
    return replace(c, p_adjusted=p, category=category, n_tests=n_tests, seeds_needed=needed)


def _explain(c: Comparison, *, alpha: float, correction: Correction) -> str:
    if c.p is None or c.p_adjusted is None:
        return _say_unknown(c)
    basis = _say_basis(c)
    if c.category != "within noise":
        after = "" if correction == "none" or c.n_tests == 1 else f" after {c.n_tests} tests"
        return f"{name_category(c)} ({basis}; p {show_p(c.p_adjusted)}{after})"
    if c.difference == 0 and c.low is not None and c.low == c.high:
        return f"no difference at all ({basis})"
    words = f"within noise with {basis}"
    if c.p <= alpha < c.p_adjusted:
        words += f", corrected for {c.n_tests} tests"
    return f"{words}; {_say_needed(c, alpha=alpha, correction=correction)}"


def show_p(p: float) -> str:
    """Write a p with its relation.

    >>> show_p(0.0312), show_p(0.0000001)
    ('= 0.031', '< 0.001')
    """
    return "< 0.001" if p < 0.001 else f"= {p:.3f}" if p < 0.1 else f"= {p:.2f}"


def _say_basis(c: Comparison) -> str:
    items = f"{c.n_items:,} test items"
    if not c.n_seeds:
        return f"{items}, no seeds"
    seeds = f"{c.n_seeds} seeds" + ("" if c.paired else " a model, unpaired")
    return seeds if c.n_items else f"{seeds}, test items unknown"


def _say_unknown(c: Comparison) -> str:
    if c.n_seeds == 1:
        return "cannot tell from one seed; run 5 (--seeds 5)"
    return "cannot tell without seeds or test items"


def _say_needed(c: Comparison, *, alpha: float, correction: Correction) -> str:
    """Say what it would take to see such a difference."""
    level = alpha if correction == "none" else alpha / c.n_tests
    if c.deviation is None:
        return _say_items_needed(c, level).replace("as many", "as many test items")
    if c.seeds_needed is not None:
        if c.seeds_needed <= c.n_seeds:  # lucky in power, unlucky in the test
            return "a few more seeds would decide"
        return f"{c.seeds_needed} seeds would be needed to see it"
    lasting = None if c.item_errors is None else c.item_errors.lasting
    if lasting and lasting.se > 0 and find_power(c.difference, lasting, level) < POWER:
        return f"no number of seeds would show it on these items: {_say_items_needed(c, level)}"
    return f"more than {MOST_SEEDS:,} seeds would be needed to see it"


def _foresee_items(c: Comparison) -> Callable[[int], Error] | None:
    """Foresee the error over items with another number of seeds: a part of it goes with them."""
    if c.item_errors is None:
        return None
    whole, lasting = c.item_errors.resampling, c.item_errors.lasting
    passing = max(0.0, whole.se**2 - lasting.se**2) * c.n_seeds
    return lambda n: Error(math.sqrt(lasting.se**2 + passing / n), whole.df)


def _say_items_needed(c: Comparison, level: float) -> str:
    """Say how many more items it would take, seeds apart."""
    nothing = "there is next to nothing to see"
    if c.item_errors is None or abs(c.difference) < SMALLEST:
        return nothing
    error = c.item_errors.resampling if c.deviation is None else c.item_errors.lasting
    times = 1.0
    while find_power(c.difference, _shrink(error, times), level) < POWER:
        times *= 1.02
        if times > MOST_TIMES:
            return nothing
    shown = f"{times:.1f}" if times < 3 else f"{times:,.0f}"
    return f"about {shown} times as many would be needed"


def _shrink(error: Error, times: float) -> Error:
    """Give the error with more items."""
    return Error(error.se / math.sqrt(times), error.df * times)
