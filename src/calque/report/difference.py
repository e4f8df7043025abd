"""The difference between a model and a baseline in one task: size, tests and interval."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from calque.report.bootstrap import ItemErrors, ItemTable, measure_item_errors
from calque.report.results import Row, read_items
from calque.report.statistics import (
    TINY,
    Spread,
    StandardError,
    add_errors,
    hedges_g,
    interval_half_width,
    one_deviation_rule,
    p_value,
    paired_error,
    sign_flip_p,
    summarize,
    welch_error,
)

# The rows of a model in a task: by seed, then by language.
ModelRows: TypeAlias = Mapping[int | None, Mapping[str, Row]]
Scope: TypeAlias = Literal["mean", "language", "gap"]
Category: TypeAlias = Literal["helps", "hurts", "within noise", "cannot tell"]
# Scores are percentages, so an interval of this half-width (points) says nothing.
FULL_SCALE = 100


@dataclass(frozen=True, slots=True, eq=False)
class ModelScores:
    """Scores of one model (rows: seeds, columns: languages) and the test items behind them.

    `fixed` means that the scores do not depend on a seed.
    """

    model: str
    seeds: tuple[int | None, ...]
    values: npt.NDArray[np.float64]
    tables: Mapping[str, ItemTable]
    fixed: bool


@dataclass(frozen=True, slots=True, eq=False)
class PairedScores:
    """A model and the baseline in one task, restricted to the languages and seeds both have.

    `paired` means that row k of both sides has the same seed; `notes` say what was left out.
    """

    task: str
    languages: tuple[str, ...]
    higher_is_better: bool
    source: str | None
    model: ModelScores
    baseline: ModelScores
    paired: bool
    notes: Sequence[str] = field(default_factory=tuple)


@dataclass(frozen=True, slots=True)
class Difference:
    """A model minus the baseline, in points of the metric, with its tests and verdict.

    `name` is the language, or the scope. `p` is the largest p-value of the tests that apply;
    `low` and `high` bound the difference with all errors together, `item_low` and `item_high` by
    resampling the items alone. `p_adjusted` and the fields after it are set by
    `verdict.assign_verdicts`, once all tests are known.
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
    # Standard deviation of one seed's difference and the errors over items: for seeds needed.
    deviation: float | None = None
    item_errors: ItemErrors | None = None
    p_adjusted: float | None = None
    n_tests: int = 1
    category: Category = "cannot tell"
    seeds_needed: int | None = None

    @property
    def gain(self) -> float:
        """The difference with its sign chosen so that a positive value is an improvement."""
        better = self.scope != "gap" and self.higher_is_better
        return self.difference if better else -self.difference

    @property
    def n_seeds(self) -> int:
        """The smaller number of seeds of the two models; 0 if seeds do not matter."""
        trained = [side.n for side in (self.model, self.baseline) if not side.fixed]
        return min(trained, default=0)


def pair_models(task: str, model: ModelRows, baseline: ModelRows) -> PairedScores | None:
    """Return the scores of two models on what both have, or None if they share no language.

    Seeds that both have are paired if there are at least two; otherwise all seeds of both models
    are used as unrelated samples. Languages that are missing for a seed are left out.
    """
    notes: list[str] = []
    mine, theirs = _choose_seeds(model, baseline)
    left_out = len(_own_seeds(model)) - len(mine) + len(_own_seeds(baseline)) - len(theirs)
    if left_out:
        notes.append(f"{left_out} seeds that only one model has are left out")
    if any(None in side and len(side) > 1 for side in (model, baseline)):
        notes.append("scores without a seed are left out, because others have a seed")
    sets = [set(model[seed]) for seed in mine] + [set(baseline[seed]) for seed in theirs]
    union = dict.fromkeys(
        name for side in (baseline, model) for seed in side for name in side[seed]
    )
    languages = tuple(name for name in union if all(name in each for each in sets))
    if not languages:
        return None
    if len(languages) < len(union):
        absent = ", ".join(name for name in union if name not in languages)
        notes.append(f"languages that some runs lack are left out: {absent}")
    sides = [_gather_scores(model, mine, languages), _gather_scores(baseline, theirs, languages)]
    if not any(side.tables for side in sides):
        notes.append("scores of test items are missing, so no test over items can be made")
    odd = [
        name
        for name in languages
        if name in sides[0].tables
        and name in sides[1].tables
        and sides[0].tables[name].n_items != sides[1].tables[name].n_items
    ]
    if odd:
        shown = ", ".join(odd)
        notes.append(f"the models have different test items in {shown}, which are not resampled")
        sides = [
            replace(side, tables={n: table for n, table in side.tables.items() if n not in odd})
            for side in sides
        ]
    first = baseline[theirs[0]][languages[0]]
    return PairedScores(
        task,
        languages,
        first.higher_is_better,
        first.source,
        sides[0],
        sides[1],
        paired=mine == theirs,
        notes=notes,
    )


def mean_weights(languages: tuple[str, ...]) -> dict[str, float]:
    """Return equal weights for all languages, the source included, as in Wu and Dredze (2020)."""
    return dict.fromkeys(languages, 1 / len(languages))


def gap_weights(
    languages: tuple[str, ...], source: str | None, *, higher_is_better: bool
) -> dict[str, float] | None:
    """Return the weights of the transfer gap: source minus the mean of the others.

    The sign is chosen so that a larger gap is a larger loss. None without a source language.
    """
    if source not in languages or len(languages) < 2:
        return None
    sign = 1 if higher_is_better else -1
    others = -sign / (len(languages) - 1)
    return {name: sign if name == source else others for name in languages}


def measure_difference(
    pair: PairedScores,
    weights: Mapping[str, float],
    *,
    name: str,
    scope: Scope,
    alpha: float,
    resampled: npt.NDArray[np.float64] | None,
    generator: np.random.Generator,
) -> Difference:
    """Return the difference of a weighted sum of the languages' scores, with all its tests.

    `resampled` has the differences for resampled items, one row per language of `weights`.
    """
    columns = [pair.languages.index(language) for language in weights]
    vector = np.array(list(weights.values()))
    ours, theirs = (side.values[:, columns] @ vector for side in (pair.model, pair.baseline))
    model = summarize(ours.tolist(), fixed=pair.model.fixed)
    baseline = summarize(theirs.tolist(), fixed=pair.baseline.fixed)
    is_paired = pair.paired and not (model.fixed or baseline.fixed)
    has_deviations = model.deviation is not None and baseline.deviation is not None
    seeds = None
    if has_deviations and not (model.fixed and baseline.fixed):
        seeds = (
            paired_error(ours.tolist(), theirs.tolist())
            if is_paired
            else welch_error(model, baseline)
        )
    items = None
    if all(each in pair.model.tables and each in pair.baseline.tables for each in weights):
        items = measure_item_errors(pair.model.tables, pair.baseline.tables, weights)
    difference = model.mean - baseline.mean
    p, low, high = _combine(difference, seeds, items, alpha) if has_deviations else (None,) * 3
    item_low = item_high = None
    if resampled is not None:
        item_low, item_high = np.quantile(vector @ resampled, (alpha / 2, 1 - alpha / 2)).tolist()
    return Difference(
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
        p_seeds=None if seeds is None else p_value(difference, seeds),
        p_flips=sign_flip_p((ours - theirs).tolist(), generator) if seeds and is_paired else None,
        p_items=None if items is None else p_value(difference, items.testing),
        item_low=item_low,
        item_high=item_high,
        n_items=sum(pair.model.tables[each].n_items for each in weights) if items else 0,
        hedges_g=hedges_g(model, baseline),
        rule=one_deviation_rule(model, baseline, _mean_deviation(pair, columns, scope)),
        paired=is_paired,
        deviation=_seed_deviation(model, baseline, seeds, paired=is_paired),
        item_errors=items,
    )


def _choose_seeds(
    model: ModelRows, baseline: ModelRows
) -> tuple[tuple[int | None, ...], tuple[int | None, ...]]:
    mine, theirs = _own_seeds(model), _own_seeds(baseline)
    common = tuple(seed for seed in mine if seed in theirs)
    least = min(2, len(mine), len(theirs))
    return (common, common) if len(common) >= least else (mine, theirs)


def _own_seeds(rows: ModelRows) -> tuple[int | None, ...]:
    """Return the sorted seeds; scores without a seed count only if there are no others."""
    seeds = sorted(seed for seed in rows if seed is not None)
    return tuple(seeds) or (None,)


def _gather_scores(
    rows: ModelRows, seeds: Sequence[int | None], languages: Sequence[str]
) -> ModelScores:
    values = np.array([[rows[seed][name].value for name in languages] for seed in seeds])
    constant = len(seeds) > 1 and bool((np.ptp(values, axis=0) <= TINY).all())
    tables = {name: _read_table([rows[seed][name] for seed in seeds]) for name in languages}
    return ModelScores(
        rows[seeds[0]][languages[0]].model,
        tuple(seeds),
        values,
        {name: table for name, table in tables.items() if table is not None},
        fixed=constant or tuple(seeds) == (None,),
    )


def _read_table(rows: Sequence[Row]) -> ItemTable | None:
    """Return the items of all seeds, or None if a seed has none or a different number."""
    found = [items for row in rows if (items := read_items(row)) is not None]
    if len(found) < len(rows) or len({len(above) for above, _ in found}) > 1:
        return None
    return ItemTable(np.stack([above for above, _ in found]), np.stack([b for _, b in found]))


def _mean_deviation(pair: PairedScores, columns: list[int], scope: Scope) -> float | None:
    """Return the mean of the baseline's standard deviations by language, for scope "mean".

    Paper: this is the ± of all 88 averages in Tables 3 and 4 of Wu and Dredze. It is larger than
    the deviation of the average, which the tests here use.
    """
    values = pair.baseline.values[:, columns]
    return float(values.std(0, ddof=1).mean()) if scope == "mean" and len(values) > 1 else None


def _combine(
    difference: float, seeds: StandardError | None, items: ItemErrors | None, alpha: float
) -> tuple[float | None, float | None, float | None]:
    """Return the largest p-value of the tests, and the widest interval.

    There are tests over seeds, over items, and over both at once (min F′); all must reject. If
    almost no item differs, nothing bounds the difference, and there is no interval.
    """
    if items is None:
        tests = intervals = [] if seeds is None else [seeds]
    elif seeds is None:
        tests, intervals = [items.testing], [items.resampling]
    else:
        intervals = [seeds, add_errors(seeds, items.resampling)]
        tests = [*intervals, items.testing]
    if not tests:
        return None, None, None
    p = max(p_value(difference, error) for error in tests)
    if p > alpha and items is not None:
        # Without it, the interval could exclude 0 and contradict the test.
        intervals = [*intervals, items.testing]
    half = max(interval_half_width(error, alpha) for error in intervals)
    return (p, None, None) if half >= FULL_SCALE else (p, difference - half, difference + half)


def _seed_deviation(
    model: Spread, baseline: Spread, seeds: StandardError | None, *, paired: bool
) -> float | None:
    """Return the standard deviation of the difference of one more seed."""
    if seeds is None:
        return None
    if paired:
        return seeds.se * math.sqrt(model.n)
    return math.hypot(model.deviation or 0.0, baseline.deviation or 0.0)
