"""The results folder as a study: verdicts, scores by seed and plots, computed once per change."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calque.errors import InputError
from calque.report.compare import compare
from calque.report.difference import gap_weights, mean_weights
from calque.report.page import plot_task
from calque.report.plots import check_matplotlib, page_style
from calque.report.results import FILE, read_results
from calque.report.tables import short_model_names
from calque.report.verdict import verdict_sentence
from calque.server.folder_files import list_files

if TYPE_CHECKING:
    from calque.report.comparison import Comparison, TaskComparison
    from calque.report.difference import Difference

    Seeds = Mapping[int | None, float]
    FileStates = tuple[tuple[str, int, int], ...]

MEAN, GAP = "mean", "gap"
MAX_COMPARISONS = 8
SVG_NAMESPACE = '<svg xmlns="http://www.w3.org/2000/svg" '


@dataclass(slots=True)
class _Study:
    """A comparison, its JSON form, and the plots that were drawn so far."""

    comparison: Comparison
    document: dict[str, Any]
    plots: dict[str, str] = field(default_factory=dict)


class StudyFolder:
    """The results below a folder; they are compared again only when a file changes."""

    def __init__(self, folder: Path, baseline: str | None = None) -> None:
        if not folder.is_dir():
            fix = "pass a folder that `calque evaluate -o` has written (--results)"
            raise InputError("this folder does not exist", file=folder, fix=fix)
        self._folder, self._baseline = folder, baseline
        self._studies: dict[tuple[FileStates, str | None], _Study] = {}
        self._lock = threading.Lock()

    def describe(
        self, task: str | None = None, language: str | None = None, baseline: str | None = None
    ) -> dict[str, Any]:
        """Return verdicts, scores and the names of plots, of all or one task and language."""
        document = self._compare(baseline).document
        tasks = [each for each in document["tasks"] if task in (None, each["task"])]
        if language is not None:
            tasks = [
                each | {"cells": [cell for cell in each["cells"] if cell["language"] == language]}
                for each in tasks
            ]
        return document | {"tasks": tasks}

    def plot(self, name: str, baseline: str | None = None) -> str | None:
        """Return a plot as SVG, or None if there is no such plot."""
        study = self._compare(baseline)
        task = next((t for t in study.comparison.tasks if name in _plot_names(t)), None)
        if task is None:
            return None
        with self._lock:  # matplotlib is not safe for threads
            if name not in study.plots:
                check_matplotlib()
                with page_style():
                    drawn = plot_task(study.comparison, task)
                for plot in drawn:
                    svg = plot.svg.replace("<svg ", SVG_NAMESPACE, 1)
                    study.plots[f"{task.task}-{plot.kind}"] = svg
        return study.plots.get(name)

    def _compare(self, baseline: str | None) -> _Study:
        """Return the comparison with a baseline, by default with the first model of the results."""
        with self._lock:
            files = list_files(self._folder, FILE.__eq__)
            stats = {name: path.stat() for name, path in files.items()}
            states = tuple((name, s.st_mtime_ns, s.st_size) for name, s in stats.items())
            chosen = baseline or self._baseline
            if (states, chosen) not in self._studies:
                comparison = _compare(self._folder, list(files.values()), chosen)
                while len(self._studies) >= MAX_COMPARISONS:
                    self._studies.pop(next(iter(self._studies)))
                study = _Study(comparison, _to_document(comparison))
                self._studies[states, chosen] = study
            return self._studies[states, chosen]


def _compare(folder: Path, files: Sequence[Path], baseline: str | None) -> Comparison:
    if not files:
        fix = "wait for `calque evaluate -o` to write one"
        raise InputError(f"there is no {FILE} in this folder", file=folder.name, fix=fix)
    if baseline is None:
        models = read_results(files).models
        if not models:
            raise InputError("there are no results yet", file=folder.name)
        baseline = models[0]
    return compare(files, baseline=baseline)


def _to_document(comparison: Comparison) -> dict[str, Any]:
    names = short_model_names(comparison)
    return {
        "baseline": names[comparison.baseline],
        "models": [names[model] for model in comparison.models],
        "notes": list(comparison.notes),
        "tasks": [_describe_task(comparison, task) for task in comparison.tasks],
    }


def _describe_task(comparison: Comparison, task: TaskComparison) -> dict[str, Any]:
    names, settings = short_model_names(comparison), comparison.settings
    verdicts, cells = [], []
    for model, each in task.models.items():
        for difference in filter(None, [each.overall, each.gap]):
            text = verdict_sentence(
                difference, names[model], alpha=settings.alpha, correction=settings.correction
            )
            verdicts.append({"category": difference.category, "text": text})
        differences = {**each.languages, MEAN: each.overall, GAP: each.gap}
        for name, found in differences.items():
            if found is not None:
                seeds = _list_seeds(task, name, model, comparison.baseline)
                cells.append(_describe_cell(found, names[model], name, seeds))
    return {
        "task": task.task,
        "metric": task.metric,
        "higher_is_better": task.higher_is_better,
        "languages": task.languages,
        "verdicts": verdicts,
        "cells": cells,
        "plots": _plot_names(task),
    }


def _describe_cell(
    difference: Difference, model: str, language: str, seeds: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "model": model,
        "language": language,
        "mean": difference.model.mean,
        "deviation": difference.model.deviation,
        "baseline_mean": difference.baseline.mean,
        "baseline_deviation": difference.baseline.deviation,
        "difference": difference.difference,
        "low": difference.low,
        "high": difference.high,
        "p": difference.p_adjusted,
        "category": difference.category,
        "seeds": seeds,
    }


def _list_seeds(task: TaskComparison, name: str, model: str, baseline: str) -> list[dict[str, Any]]:
    """Return the scores of a model and of the baseline with every seed."""
    shared = tuple(task.models[model].languages)
    own = _score_seeds(task, name, task.scores[model], shared)
    other = _score_seeds(task, name, task.scores[baseline], shared)
    fixed = other.get(None)
    return [
        {"seed": seed, "score": score, "baseline": other.get(seed, fixed)}
        for seed, score in own.items()
    ]


def _score_seeds(
    task: TaskComparison, name: str, scores: Mapping[str, Seeds], shared: tuple[str, ...]
) -> Seeds:
    """Return the score of every seed in a language, their mean, or the gap to the source."""
    if name not in (MEAN, GAP):
        return scores.get(name, {})
    if name == MEAN:
        weights = mean_weights(shared)
    else:
        gap = gap_weights(shared, task.source, higher_is_better=task.higher_is_better)
        assert gap is not None  # the task has such a difference
        weights = gap
    seeds = dict.fromkeys(seed for language in shared for seed in scores.get(language, {}))
    return {
        seed: sum(weight * scores[language][seed] for language, weight in weights.items())
        for seed in seeds
        if all(seed in scores.get(language, {}) for language in shared)
    }


def _plot_names(task: TaskComparison) -> list[str]:
    """Return the names of a task's plots; those without data are left out."""
    kinds = ["differences"]
    if any(len(seeds) > 1 for scores in task.scores.values() for seeds in scores.values()):
        kinds.append("seeds")
    if task.layers:
        kinds.append("layers")
    return [f"{task.task}-{kind}" for kind in kinds]
