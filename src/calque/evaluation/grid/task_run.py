"""One run of an evaluation: one model on one task with one seed, its result and its records.

A record is a row of results.jsonl: a dictionary with the scores of one language of a run, or with
the error of a failed run.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from calque.evaluation.grid.model_specs import hash_values
from calque.io.result_records import CONFIG_PARTS, Record

if TYPE_CHECKING:
    from calque.evaluation.grid.model_specs import ModelSpec
    from calque.evaluation.records import LanguageScores
    from calque.evaluation.registry import Task
    from calque.evaluation.settings import TaskSettings

RunKey: TypeAlias = tuple[str, str, int | None]


@dataclass(frozen=True, slots=True)
class TaskRun:
    """One model on one task with one seed; the seed is None if the result does not depend on it.

    `config` is "settings-data-model": hashes of the settings and languages, of the data files and
    of the model's files.
    """

    model: ModelSpec
    task_name: str
    task: Task
    seed: int | None
    data: Path
    languages: tuple[str, ...] | None
    settings: TaskSettings
    config: str

    @property
    def key(self) -> RunKey:
        """Model, task and seed, which identify a run in the results."""
        return self.model.name, self.task_name, self.seed

    def __str__(self) -> str:
        return describe_run(*self.key)


@dataclass(frozen=True, slots=True)
class RunResult:
    """Scores or the error of a run, with its time and memory."""

    scores: tuple[LanguageScores, ...] = ()
    error: str | None = None
    seconds: float = 0.0
    memory_mb: float | None = None
    device: str | None = None
    # Free memory of the GPU while the run uses the most it needs.
    free_mb: float | None = None
    # Whether the worker process cannot be used again: it is out of memory, or it died.
    ended_worker: bool = False


def describe_run(model: str, task: str, seed: int | None) -> str:
    """Return the name of a run for people.

    >>> describe_run("calque-mini", "pos", 3), describe_run("calque-mini", "bucc", None)
    ('calque-mini, pos, seed 3', 'calque-mini, bucc')
    """
    return f"{model}, {task}" + ("" if seed is None else f", seed {seed}")


def hash_settings(
    task_name: str, task: Task, settings: TaskSettings, languages: Sequence[str] | None
) -> str:
    """Return the hash of the languages and of the settings that matter for a task."""
    values = settings.values
    if not task.trained:
        values = {name: values[name] for name in task.settings if name in values}
    return hash_values([task_name, values, None if languages is None else list(languages)])


def describe_changes(old: str, new: str) -> str:
    """Return the parts in which two configurations differ.

    >>> describe_changes("1-2-3", "1-4-5")
    'data, model'
    """
    pairs = zip(CONFIG_PARTS, old.split("-"), new.split("-"), strict=False)
    return ", ".join(part for part, before, now in pairs if before != now) or CONFIG_PARTS[0]


def build_records(run: TaskRun, result: RunResult, *, with_items: bool = True) -> list[Record]:
    """Return one record per language, or one with the error.

    The field `items` names the file of the items' scores; it is None without `with_items`.
    `n_records` is the number of records of the run.
    """
    # With separate training in each language there is no common source.
    is_separate = run.settings.setting in ("supervised", "directions")
    has_source = run.task.trained and not is_separate
    common: Record = {
        "model": run.model.name,
        "task": run.task_name,
        "language": None,
        "seed": run.seed,
        "metric": run.task.metric,
        "value": None,
        "metrics": {},
        "n_items": 0,
        "layers": {},
        "counts": {},
        "setting": run.settings.setting if run.task.trained else None,
        "source": run.settings.source if has_source else None,
        "maps": run.model.maps is not None,
        "higher_is_better": run.task.higher_is_better,
        "config": run.config,
        "versions": _list_versions(),
        "seconds": round(result.seconds, 3),
        "memory_mb": None if result.memory_mb is None else round(result.memory_mb, 1),
        "device": result.device,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "error": result.error,
        "items": None,
        "n_records": len(result.scores) or 1,
    }
    if result.error is not None:
        return [common]
    records = []
    for scores in result.scores:
        metric, value = next(iter(scores.metrics.items()))
        record = common | {
            "language": scores.language,
            "metric": metric,
            "value": float(value),
            "metrics": {name: float(found) for name, found in scores.metrics.items()},
            "n_items": int(scores.n_items),
            "layers": {str(layer): float(found[metric]) for layer, found in scores.layers.items()},
            "counts": {name: int(count) for name, count in scores.counts.items()},
            "items": _name_items(run) if with_items and scores.items is not None else None,
        }
        records.append(record | ({"notes": dict(scores.notes)} if scores.notes else {}))
    return records


def key_of(record: Mapping[str, Any]) -> RunKey:
    """Return the key of the run that a record belongs to."""
    return record["model"], record["task"], record["seed"]


def _name_items(run: TaskRun) -> str:
    """Return the file name of a run's items; the hash separates results of other settings."""
    name = re.sub(r"[^A-Za-z0-9_-]+", "_", run.model.name).strip("_")[-60:]
    seed = "all" if run.seed is None else run.seed
    return f"items/{name}.{run.task_name}.{seed}.{run.config.replace('-', '')}.npz"


def _list_versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("calque", "torch", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # run from a source tree
            found[package] = "unknown"
    return found
