"""A whole comparison: every model against the baseline, by task, by language, and in the gap."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from calque.errors import InputError
from calque.report.bootstrap import ItemTable, resample_scores
from calque.report.comparison import (
    Comparison,
    ModelRows,
    Pair,
    Scope,
    compare,
    pair_models,
    weigh_gap,
    weigh_mean,
)
from calque.report.results import (
    Results,
    Row,
    describe_failures,
    describe_files,
    describe_mixtures,
    forget_items,
)
from calque.report.statistics import Correction
from calque.report.verdict import judge


@dataclass(frozen=True, slots=True)
class Judging:
    """How to compare: the level, the correction, the resamples and where they start."""

    alpha: float = 0.05
    correction: Correction = "holm"
    n_resamples: int = 10_000
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ModelStudy:
    """One model against the baseline in one task."""

    overall: Comparison
    languages: Mapping[str, Comparison]
    gap: Comparison | None
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class TaskStudy:
    """One task: the scores of all models, and the comparisons by model."""

    task: str
    metric: str
    higher_is_better: bool
    source: str | None
    scores: Mapping[str, Mapping[str, Mapping[int | None, float]]]  # model, language, seed
    layers: Mapping[str, Mapping[int, float]]  # model, layer: mean of languages and seeds
    models: Mapping[str, ModelStudy]

    @property
    def languages(self) -> list[str]:
        """All languages of all models."""
        return list(dict.fromkeys(name for scores in self.scores.values() for name in scores))


@dataclass(frozen=True, slots=True)
class Study:
    """All tasks, with what the reader must know about the data."""

    baseline: str
    models: Sequence[str]
    tasks: Sequence[TaskStudy]
    judging: Judging
    notes: Sequence[str] = field(default_factory=tuple)


def make_study(
    results: Results,
    baseline: str,
    *,
    models: Sequence[str] | None = None,
    tasks: Sequence[str] | None = None,
    judging: Judging | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Study:
    """Compare models with the baseline on all that they share."""
    judging = judging or Judging()
    if not results.models:
        raise InputError("there are no results yet", fix="wait for the first of `calque evaluate`")
    baseline = find_name(baseline, results.models, "model")
    asked = results.models if models is None else models
    names = list(dict.fromkeys(find_name(name, results.models, "model") for name in asked))
    others = [name for name in names if name != baseline]
    if not others:
        there = ", ".join(results.models)
        fix = "evaluate another model, or name its folder too"
        raise InputError(f"no model to compare with {baseline}: there is only {there}", fix=fix)
    wanted = [find_name(name, results.tasks, "task") for name in tasks or results.tasks]
    kept = [row for row in results.rows if row.model in {baseline, *others} and row.task in wanted]
    studies: list[TaskStudy] = []
    notes = describe_files(results) + describe_failures(results, [baseline, *others], wanted)
    for number, task in enumerate(dict.fromkeys(wanted)):
        rows = [row for row in kept if row.task == task]
        study = _study_task(task, rows, baseline, others, judging)
        on_progress(number + 1, len(wanted))
        if study is None:
            notes.append(f"{task} is left out: {baseline} shares no language with another model")
            continue
        studies.append(study)
        notes += describe_mixtures(task, rows)
        for model, each in study.models.items():
            notes += [f"{task}, {model}: {note}" for note in each.notes]
    if not studies:
        problem = f"{baseline} shares no task and language with {', '.join(others)}"
        fix = "evaluate them on the same data"
        if any(each.model in (baseline, *others) for each in results.failures):
            failed = describe_failures(results, [baseline, *others], wanted)
            problem, fix = "; ".join([problem, *failed]), "mend what failed and evaluate again"
        raise InputError(problem, fix=fix)
    return Study(baseline, others, _judge_all(studies, judging), judging, notes)


def find_name(name: str, known: Sequence[str], kind: str) -> str:
    """Find a model or task by its name, or a model by the last parts of its path."""
    if name in known:
        return name
    ends = [each for each in known if each.rstrip("/").endswith(f"/{name.rstrip('/')}")]
    if kind == "model" and len(ends) == 1:
        return ends[0]
    raise InputError(f"no {kind} is called {name!r}", fix=f"choose from: {', '.join(known)}")


def _study_task(
    task: str, rows: Sequence[Row], baseline: str, others: Sequence[str], judging: Judging
) -> TaskStudy | None:
    by_model: dict[str, dict[int | None, dict[str, Row]]] = {}
    for row in rows:
        by_model.setdefault(row.model, {}).setdefault(row.seed, {})[row.language] = row
    there = [name for name in others if name in by_model]
    if baseline not in by_model or not there:
        return None
    metrics = {(row.metric, row.higher_is_better) for row in rows}
    if len(metrics) > 1:
        shown = ", ".join(sorted({name for name, _ in metrics}))
        raise InputError(f"{task} has several metrics: {shown}", fix="compare like with like")
    made = {name: pair_models(task, by_model[name], by_model[baseline]) for name in there}
    forget_items()
    pairs = {name: pair for name, pair in made.items() if pair is not None}
    if not pairs:
        return None
    generator = np.random.default_rng([judging.seed, *task.encode()])
    first = by_model[baseline][next(iter(by_model[baseline]))]
    row = next(iter(first.values()))
    in_order = [baseline, *there]
    return TaskStudy(
        task,
        row.metric,
        row.higher_is_better,
        row.source,
        {name: _arrange(by_model[name]) for name in in_order},
        {name: layers for name in in_order if (layers := _average_layers(by_model[name]))},
        compare_pairs(pairs, judging, generator),
    )


def compare_pairs(
    pairs: Mapping[str, Pair], judging: Judging, generator: np.random.Generator
) -> dict[str, ModelStudy]:
    """Compare pairs of one task, all on the same resampled items; nothing is judged yet."""
    resampled = _resample(list(pairs.values()), judging.n_resamples, generator)
    return {name: _study_pair(pair, resampled, judging) for name, pair in pairs.items()}


def _resample(
    pairs: Sequence[Pair], n_resamples: int, generator: np.random.Generator
) -> dict[int, npt.NDArray[np.float64]]:
    """Resample every table once, whichever comparisons it is in; by the table's identity."""
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


def _study_pair(
    pair: Pair, resampled: Mapping[int, npt.NDArray[np.float64]], judging: Judging
) -> ModelStudy:
    differences = {
        name: resampled[id(pair.model.tables[name])] - resampled[id(pair.baseline.tables[name])]
        for name in pair.languages
        if name in pair.model.tables and name in pair.baseline.tables
    }

    def look(weights: Mapping[str, float], name: str, scope: Scope) -> Comparison:
        has_items = all(language in differences for language in weights)
        return compare(
            pair,
            weights,
            name=name,
            scope=scope,
            alpha=judging.alpha,
            resampled=np.stack([differences[each] for each in weights]) if has_items else None,
            generator=np.random.default_rng(judging.seed),
        )

    gap = weigh_gap(pair.languages, pair.source, higher_is_better=pair.higher_is_better)
    return ModelStudy(
        look(weigh_mean(pair.languages), "mean", "mean"),
        {name: look({name: 1.0}, name, "language") for name in pair.languages},
        None if gap is None else look(gap, "gap", "gap"),
        pair.notes,
    )


def _judge_all(studies: Sequence[TaskStudy], judging: Judging) -> list[TaskStudy]:
    """Correct over all tasks and models: means, languages and gaps are a family each."""
    cells = [each for study in studies for each in study.models.values()]
    rule = partial(judge, alpha=judging.alpha, correction=judging.correction)
    overall = iter(rule([cell.overall for cell in cells]))
    languages = iter(rule([each for cell in cells for each in cell.languages.values()]))
    gaps = iter(rule([cell.gap for cell in cells if cell.gap is not None]))
    judged = []
    for study in studies:
        models = {
            name: ModelStudy(
                next(overall),
                {language: next(languages) for language in each.languages},
                None if each.gap is None else next(gaps),
                each.notes,
            )
            for name, each in study.models.items()
        }
        judged.append(replace(study, models=models))
    return judged


def _arrange(rows: ModelRows) -> dict[str, dict[int | None, float]]:
    names = dict.fromkeys(name for by_language in rows.values() for name in by_language)
    return {
        name: {seed: rows[seed][name].value for seed in rows if name in rows[seed]}
        for name in names
    }


def _average_layers(rows: ModelRows) -> dict[int, float]:
    """Average over seeds and languages the layers that all of them have."""
    found = [row.layers for by_language in rows.values() for row in by_language.values()]
    shared = [layer for layer in found[0] if all(layer in each for each in found)]
    return {layer: float(np.mean([each[layer] for each in found])) for layer in sorted(shared)}
