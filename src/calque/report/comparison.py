"""Two models' scores in a task side by side: the languages and seeds that both have.

One difference between a model and the baseline: how large, how sure, by which tests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from calque.report.bootstrap import ItemErrors, ItemTable, measure_item_errors
from calque.report.results import Row, read_items
from calque.report.statistics import (
    TINY,
    Error,
    Spread,
    add_errors,
    describe,
    find_half_width,
    find_p,
    flip_signs,
    judge_by_deviation,
    measure_hedges_g,
    measure_seed_error,
    measure_welch_error,
)

# Scores of a model in a task: by seed, then by language.
ModelRows = Mapping[int | None, Mapping[str, Row]]


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """Scores of one model: a row a seed, a column a language, and the items behind them.

    `fixed` says that no seed changes them.
    """

    model: str
    seeds: tuple[int | None, ...]
    values: npt.NDArray[np.float64]
    tables: Mapping[str, ItemTable]
    fixed: bool


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """A model and the baseline in one task, on what both have.

    `paired` says that row k of both sides has the same seed; `notes` what had to be left out.
    """

    task: str
    languages: tuple[str, ...]
    higher_is_better: bool
    source: str | None
    model: Side
    baseline: Side
    paired: bool
    notes: Sequence[str] = field(default_factory=tuple)


def pair_models(task: str, model: ModelRows, baseline: ModelRows) -> Pair | None:
    """Put two models side by side; None where they share no language.

    Seeds that both have are paired if there are two or more; else all seeds of both are used,
    as unrelated. Languages that a seed lacks are left out.
    """
    notes: list[str] = []
    mine, theirs = _choose_seeds(model, baseline)
    left_out = len(_own_seeds(model)) - len(mine) + len(_own_seeds(baseline)) - len(theirs)
    if left_out:
        notes.append(f"{left_out} of the seeds are one model's alone and left out")
    if any(None in side and len(side) > 1 for side in (model, baseline)):
        notes.append("scores without a seed beside others with one are left out")
    sets = [set(model[seed]) for seed in mine] + [set(baseline[seed]) for seed in theirs]
    union = dict.fromkeys(
        name for side in (baseline, model) for seed in side for name in side[seed]
    )
    languages = tuple(name for name in union if all(name in each for each in sets))
    if not languages:
        return None
    if len(languages) < len(union):
        absent = ", ".join(name for name in union if name not in languages)
        notes.append(f"not in all runs of both and left out: {absent}")
    first = baseline[theirs[0]][languages[0]]
    sides = [_make_side(model, mine, languages), _make_side(baseline, theirs, languages)]
    odd = [
        name
        for name in languages
        if name in sides[0].tables
        and name in sides[1].tables
        and sides[0].tables[name].n_items != sides[1].tables[name].n_items
    ]
    if odd:
        notes.append(f"the models have other test items in {', '.join(odd)}: not resampled there")
        sides = [_drop_tables(side, odd) for side in sides]
    return Pair(
        task,
        languages,
        first.higher_is_better,
        first.source,
        sides[0],
        sides[1],
        paired=mine == theirs,
        notes=notes,
    )


def _choose_seeds(
    model: ModelRows, baseline: ModelRows
) -> tuple[tuple[int | None, ...], tuple[int | None, ...]]:
    mine, theirs = _own_seeds(model), _own_seeds(baseline)
    common = tuple(seed for seed in mine if seed in theirs)
    least = min(2, len(mine), len(theirs))
    return (common, common) if len(common) >= least else (mine, theirs)


def _own_seeds(rows: ModelRows) -> tuple[int | None, ...]:
    """List the seeds in order; scores without a seed count only where there are no others."""
    seeds = sorted(seed for seed in rows if seed is not None)
    return tuple(seeds) or (None,)


def _make_side(rows: ModelRows, seeds: Sequence[int | None], languages: Sequence[str]) -> Side:
    values = np.array([[rows[seed][name].value for name in languages] for seed in seeds])
    constant = len(seeds) > 1 and bool((np.ptp(values, axis=0) <= TINY).all())
    tables = {name: _read_table([rows[seed][name] for seed in seeds]) for name in languages}
    found = {name: table for name, table in tables.items() if table is not None}
    model = rows[seeds[0]][languages[0]].model
    return Side(model, tuple(seeds), values, found, fixed=constant or tuple(seeds) == (None,))


def _read_table(rows: Sequence[Row]) -> ItemTable | None:
    """Stack the items of seeds; None where one has none, or others."""
    found = [items for row in rows if (items := read_items(row)) is not None]
    if len(found) < len(rows) or len({len(above) for above, _ in found}) > 1:
        return None
    return ItemTable(np.stack([above for above, _ in found]), np.stack([b for _, b in found]))


def _drop_tables(side: Side, names: Sequence[str]) -> Side:
    kept = {name: table for name, table in side.tables.items() if name not in names}
    return Side(side.model, side.seeds, side.values, kept, side.fixed)


Scope: TypeAlias = Literal["mean", "language", "gap"]
Category: TypeAlias = Literal["helps", "hurts", "within noise", "cannot tell"]
# Points; scores are percentages, so that an interval as wide to either side bounds nothing.
WHOLE_SCALE = 100


@dataclass(frozen=True, slots=True)
class Comparison:
    """A model minus the baseline, in points of the metric, and everything said about it.

    `name` is the language, or the scope. `p` is the largest of the tests that apply; `low` and
    `high` bound the difference with all errors taken together, if anything does; `item_low` and
    `item_high` by resampling the items alone. The last fields are known once all tests are
    (`verdict.judge`).
    """

    task: str
    name: str
    scope: Scope
    higher_is_better: bool
    model: Spread
    baseline: Spread
    difference: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    p_seeds: float | None = None
    p_flips: float | None = None
    p_items: float | None = None
    item_low: float | None = None
    item_high: float | None = None
    n_items: int = 0
    hedges_g: float | None = None
    rule: Literal["above", "below", "within"] | None = None
    paired: bool = True
    # One seed's deviation of the difference, and the errors over items: for seeds needed.
    deviation: float | None = None
    item_errors: ItemErrors | None = None
    p_adjusted: float | None = None
    n_tests: int = 1
    category: Category = "cannot tell"
    seeds_needed: int | None = None

    @property
    def gain(self) -> float:
        """The difference, positive where the model is better."""
        better = self.scope != "gap" and self.higher_is_better
        return self.difference if better else -self.difference

    @property
    def n_seeds(self) -> int:
        """The smaller number of seeds; 0 where none matters."""
        trained = [side.n for side in (self.model, self.baseline) if not side.fixed]
        return min(trained, default=0)


def weigh_mean(languages: tuple[str, ...]) -> dict[str, float]:
    """Weigh all languages alike, the source among them, as Wu and Dredze's averages do."""
    return dict.fromkeys(languages, 1 / len(languages))


def weigh_gap(
    languages: tuple[str, ...], source: str | None, *, higher_is_better: bool
) -> dict[str, float] | None:
    """Weigh the source against the mean of the others, so that a positive gap is a loss."""
    if source not in languages or len(languages) < 2:
        return None
    sign = 1 if higher_is_better else -1
    others = -sign / (len(languages) - 1)
    return {name: sign if name == source else others for name in languages}


def compare(
    pair: Pair,
    weights: Mapping[str, float],
    *,
    name: str,
    scope: Scope,
    alpha: float,
    resampled: npt.NDArray[np.float64] | None,
    generator: np.random.Generator,
) -> Comparison:
    """Compare a weighted sum of languages' scores.

    `resampled` has the differences with resampled items, a row for each weight in order.
    """
    places = [pair.languages.index(language) for language in weights]
    vector = np.array(list(weights.values()))
    ours, theirs = (side.values[:, places] @ vector for side in (pair.model, pair.baseline))
    model = describe(ours.tolist(), fixed=pair.model.fixed)
    baseline = describe(theirs.tolist(), fixed=pair.baseline.fixed)
    both_fixed = model.fixed and baseline.fixed
    is_paired = pair.paired and not (model.fixed or baseline.fixed)
    known = model.deviation is not None and baseline.deviation is not None
    seeds = None
    if known and not both_fixed:
        seeds = (
            measure_seed_error(ours.tolist(), theirs.tolist())
            if is_paired
            else measure_welch_error(model, baseline)
        )
    items = None
    if all(each in pair.model.tables and each in pair.baseline.tables for each in weights):
        items = measure_item_errors(pair.model.tables, pair.baseline.tables, weights)
    difference = model.mean - baseline.mean
    p_flips = flip_signs((ours - theirs).tolist(), generator) if seeds and is_paired else None
    low_item, high_item = _bound(resampled, vector, alpha)
    p, low, high = _conclude(difference, seeds, items, alpha) if known else (None,) * 3
    return Comparison(
        pair.task,
        name,
        scope,
        pair.higher_is_better,
        model,
        baseline,
        difference,
        low,
        high,
        p,
        None if seeds is None else find_p(difference, seeds),
        p_flips,
        None if items is None else find_p(difference, items.testing),
        low_item,
        high_item,
        sum(pair.model.tables[each].n_items for each in weights) if items else 0,
        measure_hedges_g(model, baseline),
        judge_by_deviation(model, baseline, _average_deviations(pair, places, scope)),
        is_paired,
        _deviate(model, baseline, seeds, paired=is_paired),
        items,
    )


def _average_deviations(pair: Pair, places: list[int], scope: Scope) -> float | None:
    """Average the baseline's deviations by language.

    Paper: that is the ± of all 88 averages in Wu and Dredze's Tables 3 and 4. It is larger than
    the deviation of the average, which the tests here use.
    """
    values = pair.baseline.values[:, places]
    return float(values.std(0, ddof=1).mean()) if scope == "mean" and len(values) > 1 else None


def _conclude(
    difference: float, seeds: Error | None, items: ItemErrors | None, alpha: float
) -> tuple[float | None, float | None, float | None]:
    """Give the largest p of the tests, and the widest interval.

    Over seeds alone, over items alone, and over both at once (min F′): to reject, all must. Where
    next to no item differs, nothing bounds the difference, and there is no interval.
    """
    if items is None:
        tests = spans = [] if seeds is None else [seeds]
    elif seeds is None:
        tests, spans = [items.testing], [items.resampling]
    else:
        spans = [seeds, add_errors(seeds, items.resampling)]
        tests = [*spans, items.testing]
    if not tests:
        return None, None, None
    p = max(find_p(difference, error) for error in tests)
    if p > alpha and items is not None:
        spans = [*spans, items.testing]  # an interval without 0 would contradict the test
    half = max(find_half_width(error, alpha) for error in spans)
    return (p, None, None) if half >= WHOLE_SCALE else (p, difference - half, difference + half)


def _deviate(model: Spread, baseline: Spread, seeds: Error | None, *, paired: bool) -> float | None:
    """Give the deviation of one more seed's difference."""
    if seeds is None:
        return None
    if paired:
        return seeds.se * math.sqrt(model.n)
    return math.hypot(model.deviation or 0.0, baseline.deviation or 0.0)


def _bound(
    resampled: npt.NDArray[np.float64] | None, weights: npt.NDArray[np.float64], alpha: float
) -> tuple[float | None, float | None]:
    if resampled is None:
        return None, None
    low, high = np.quantile(weights @ resampled, (alpha / 2, 1 - alpha / 2))
    return float(low), float(high)
