"""Comparison of models with a baseline: by task, by language and in the transfer gap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from calque.errors import InputError
from calque.report.bootstrap import ItemTable, resample_scores
from calque.report.difference import (
    Difference,
    ModelRows,
    PairedScores,
    Scope,
    gap_weights,
    mean_weights,
    measure_difference,
    pair_models,
)
from calque.report.results import (
    Results,
    Row,
    clear_item_cache,
    failure_notes,
    file_notes,
    mixture_notes,
)
from calque.report.statistics import Correction
from calque.report.verdict import assign_verdicts

if TYPE_CHECKING:
    from calque.types import Progress


@dataclass(frozen=True, slots=True)
class ComparisonSettings:
    """Significance level, correction for many tests, number of resamples and random seed."""

    alpha: float = 0.05
    correction: Correction = "holm"
    n_resamples: int = 10_000
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ModelComparison:
    """The differences of one model in one task: the mean, every language and the transfer gap."""

    overall: Difference
    languages: Mapping[str, Difference]
    gap: Difference | None
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class TaskComparison:
    """One task: the scores of all models, and their differences from the baseline."""

    task: str
    metric: str
    higher_is_better: bool
    source: str | None
    scores: Mapping[str, Mapping[str, Mapping[int | None, float]]]  # model, language, seed
    layers: Mapping[str, Mapping[int, float]]  # model, layer: mean of languages and seeds
    models: Mapping[str, ModelComparison]
    # Models whose scores are upper bounds, and why they are.
    upper_bounds: Mapping[str, str] = field(default_factory=dict)

    @property
    def languages(self) -> list[str]:
        """The languages of all models."""
        return list(dict.fromkeys(name for scores in self.scores.values() for name in scores))


@dataclass(frozen=True, slots=True)
class Comparison:
    """All tasks, and notes about the quality of the data."""

    baseline: str
    models: Sequence[str]
    tasks: Sequence[TaskComparison]
    settings: ComparisonSettings
    notes: Sequence[str] = field(default_factory=tuple)


def compare_results(
    results: Results,
    baseline: str,
    *,
    models: Sequence[str] | None = None,
    tasks: Sequence[str] | None = None,
    settings: ComparisonSettings | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Compare models with the baseline on the tasks, languages and seeds that they share."""
    settings = settings or ComparisonSettings()
    if not results.models:
        raise InputError("there are no results yet", fix="wait for `calque evaluate` to finish one")
    baseline = match_name(baseline, results.models, "model")
    asked = results.models if models is None else models
    names = list(dict.fromkeys(match_name(name, results.models, "model") for name in asked))
    others = [name for name in names if name != baseline]
    if not others:
        there = ", ".join(results.models)
        fix = "evaluate another model, or pass its results too"
        problem = f"there is no model to compare with {baseline}; the results have only {there}"
        raise InputError(problem, fix=fix)
    wanted = [match_name(name, results.tasks, "task") for name in tasks or results.tasks]
    kept = [row for row in results.rows if row.model in {baseline, *others} and row.task in wanted]
    comparisons: list[TaskComparison] = []
    notes = file_notes(results) + failure_notes(results, [baseline, *others], wanted)
    for number, task in enumerate(dict.fromkeys(wanted)):
        rows = [row for row in kept if row.task == task]
        task_comparison = _compare_task(task, rows, baseline, others, settings)
        if progress is not None:
            progress("tasks", number + 1, len(wanted))
        if task_comparison is None:
            notes.append(f"{task} is left out: no model shares a language with {baseline}")
            continue
        comparisons.append(task_comparison)
        notes += mixture_notes(task, rows)
        for model, reason in task_comparison.upper_bounds.items():
            notes.append(f"{task}: the score of {model} is an upper bound: {reason}")
        for model, each in task_comparison.models.items():
            notes += [f"{task}, {model}: {note}" for note in each.notes]
    if not comparisons:
        problem = f"{baseline} shares no task and language with {', '.join(others)}"
        fix = "evaluate them on the same data"
        if any(each.model in (baseline, *others) for each in results.failures):
            failed = failure_notes(results, [baseline, *others], wanted)
            problem, fix = "; ".join([problem, *failed]), "fix what failed and evaluate again"
        raise InputError(problem, fix=fix)
    return Comparison(
        baseline, others, _assign_all_verdicts(comparisons, settings), settings, notes
    )


def match_name(name: str, known: Sequence[str], kind: str) -> str:
    """Return the model or task with a name; a model is also found by the end of its path."""
    if name in known:
        return name
    ends = [each for each in known if each.rstrip("/").endswith(f"/{name.rstrip('/')}")]
    if kind == "model" and len(ends) == 1:
        return ends[0]
    raise InputError(
        f"there is no {kind} {name!r} in the results", fix=f"choose from: {', '.join(known)}"
    )


def _compare_task(
    task: str,
    rows: Sequence[Row],
    baseline: str,
    others: Sequence[str],
    settings: ComparisonSettings,
) -> TaskComparison | None:
    by_model: dict[str, dict[int | None, dict[str, Row]]] = {}
    for row in rows:
        by_model.setdefault(row.model, {}).setdefault(row.seed, {})[row.language] = row
    there = [name for name in others if name in by_model]
    if baseline not in by_model or not there:
        return None
    metrics = {(row.metric, row.higher_is_better) for row in rows}
    if len(metrics) > 1:
        shown = ", ".join(sorted({name for name, _ in metrics}))
        fix = "compare results of one metric"
        raise InputError(f"{task} was measured with several metrics: {shown}", fix=fix)
    made = {name: pair_models(task, by_model[name], by_model[baseline]) for name in there}
    clear_item_cache()
    pairs = {name: pair for name, pair in made.items() if pair is not None}
    if not pairs:
        return None
    generator = np.random.default_rng([settings.seed, *task.encode()])
    first = by_model[baseline][next(iter(by_model[baseline]))]
    row = next(iter(first.values()))
    in_order = [baseline, *there]
    return TaskComparison(
        task,
        row.metric,
        row.higher_is_better,
        row.source,
        {name: _by_language(by_model[name]) for name in in_order},
        {name: layers for name in in_order if (layers := _average_layers(by_model[name]))},
        compare_pairs(pairs, settings, generator),
        {row.model: row.upper_bound for row in rows if row.upper_bound is not None},
    )


def compare_pairs(
    pairs: Mapping[str, PairedScores], settings: ComparisonSettings, generator: np.random.Generator
) -> dict[str, ModelComparison]:
    """Return the differences of all models in a task, on the same resampled items, unjudged."""
    resampled = _resample(list(pairs.values()), settings.n_resamples, generator)
    return {name: _compare_pair(pair, resampled, settings) for name, pair in pairs.items()}


def _resample(
    pairs: Sequence[PairedScores], n_resamples: int, generator: np.random.Generator
) -> dict[int, npt.NDArray[np.float64]]:
    """Resample every table once; the result is keyed by the identity of the table."""
    known: dict[tuple[str, tuple[int | None, ...], str], ItemTable] = {}
    places: dict[int, tuple[str, tuple[int | None, ...], str]] = {}
    for pair in pairs:
        for side in (pair.model, pair.baseline):
            for name, table in side.tables.items():
                key = (side.model, side.seeds, name)
                known.setdefault(key, table)
                places[id(table)] = key
    scores = resample_scores(list(known.values()), n_resamples, generator)
    by_key = dict(zip(known, scores, strict=True))
    return {identity: by_key[key] for identity, key in places.items()}


def _compare_pair(
    pair: PairedScores,
    resampled: Mapping[int, npt.NDArray[np.float64]],
    settings: ComparisonSettings,
) -> ModelComparison:
    differences = {
        name: resampled[id(pair.model.tables[name])] - resampled[id(pair.baseline.tables[name])]
        for name in pair.languages
        if name in pair.model.tables and name in pair.baseline.tables
    }

    def measure(weights: Mapping[str, float], name: str, scope: Scope) -> Difference:
        has_items = all(language in differences for language in weights)
        return measure_difference(
            pair,
            weights,
            name=name,
            scope=scope,
            alpha=settings.alpha,
            resampled=np.stack([differences[each] for each in weights]) if has_items else None,
            generator=np.random.default_rng(settings.seed),
        )

    gap = gap_weights(pair.languages, pair.source, higher_is_better=pair.higher_is_better)
    return ModelComparison(
        measure(mean_weights(pair.languages), "mean", "mean"),
        {name: measure({name: 1.0}, name, "language") for name in pair.languages},
        None if gap is None else measure(gap, "gap", "gap"),
        pair.notes,
    )


def _assign_all_verdicts(
    comparisons: Sequence[TaskComparison], settings: ComparisonSettings
) -> list[TaskComparison]:
    """Assign verdicts; p-values of means, languages and gaps are adjusted as three families."""
    cells = [each for task_comparison in comparisons for each in task_comparison.models.values()]
    rule = partial(assign_verdicts, alpha=settings.alpha, correction=settings.correction)
    overall = iter(rule([cell.overall for cell in cells]))
    languages = iter(rule([each for cell in cells for each in cell.languages.values()]))
    gaps = iter(rule([cell.gap for cell in cells if cell.gap is not None]))
    judged = []
    for task_comparison in comparisons:
        models = {
            name: ModelComparison(
                next(overall),
                {language: next(languages) for language in each.languages},
                None if each.gap is None else next(gaps),
                each.notes,
            )
            for name, each in task_comparison.models.items()
        }
        judged.append(replace(task_comparison, models=models))
    return judged


def _by_language(rows: ModelRows) -> dict[str, dict[int | None, float]]:
    names = dict.fromkeys(name for by_language in rows.values() for name in by_language)
    return {
        name: {seed: rows[seed][name].value for seed in rows if name in rows[seed]}
        for name in names
    }


def _average_layers(rows: ModelRows) -> dict[int, float]:
    """Return the mean over seeds and languages of every layer that all of them have."""
    found = [row.layers for by_language in rows.values() for row in by_language.values()]
    shared = [layer for layer in found[0] if all(layer in each for each in found)]
    return {layer: float(np.mean([each[layer] for each in found])) for layer in sorted(shared)}
