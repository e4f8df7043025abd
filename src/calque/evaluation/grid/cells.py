"""A cell of a study: one model on one task with one seed, and the hash of all it depends on.

Rows of results.jsonl: one for every language of a cell, or one with a failed cell's error.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from calque.errors import InputError
from calque.evaluation.grid.model_specs import hash_values
from calque.evaluation.settings import TaskSettings

if TYPE_CHECKING:
    from calque.evaluation.grid.model_specs import Entrant
    from calque.evaluation.records import Outcome
    from calque.evaluation.registry import TaskKind


CellKey: TypeAlias = tuple[str, str, int | None]
PARTS = ("settings", "data", "model")


@dataclass(frozen=True, slots=True)
class Cell:
    """One model, task and seed; `seed` is None where none decides anything.

    `config` has three hashes: of the settings and languages, of the data files, and of the
    model's files, so that what changed can be told.
    """

    entrant: Entrant
    task: str
    kind: TaskKind
    seed: int | None
    data: Path
    languages: tuple[str, ...] | None
    settings: TaskSettings
    config: str

    @property
    def key(self) -> CellKey:
        """What identifies a cell in the results."""
        return self.entrant.name, self.task, self.seed

    def __str__(self) -> str:
        name = f"{self.entrant.name}, {self.task}"
        return name if self.seed is None else f"{name}, seed {self.seed}"


def choose_settings(kind: TaskKind, chosen: Mapping[str, Any]) -> TaskSettings:
    """Take what is chosen, then the task's own defaults, then those of all tasks."""
    known = {field.name for field in fields(TaskSettings)}
    for name in chosen:
        if name not in known:
            fix = f"choose from: {', '.join(sorted(known))}"
            raise InputError(f"no setting is called {name!r}", fix=fix)
    values: dict[str, Any] = {**kind.defaults, **chosen}
    return TaskSettings(**values)


def hash_settings(
    task: str, kind: TaskKind, settings: TaskSettings, languages: Sequence[str] | None
) -> str:
    """Name the settings a task looks at, and the languages it is measured in."""
    values = settings.values
    used = values if kind.trained else {name: values.get(name) for name in kind.reads}
    return hash_values([task, used, None if languages is None else list(languages)])


def name_changes(old: str, new: str) -> str:
    """Say in which parts two configurations differ.

    >>> name_changes("1-2-3", "1-4-5")
    'data, model'
    """
    pairs = zip(PARTS, old.split("-"), new.split("-"), strict=False)
    return ", ".join(part for part, before, now in pairs if before != now) or "settings"


Row: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class CellResult:
    """What came of a cell: outcomes or an error, and what it cost."""

    outcomes: tuple[Outcome, ...] = ()
    error: str | None = None
    seconds: float = 0.0
    memory_mb: float | None = None
    device: str | None = None
    # Of a GPU, what other processes may have while the cell holds the most it needs.
    free_mb: float | None = None
    # Whether the process that had the cell is of no more use: out of memory, or dead.
    ended_worker: bool = False


def make_rows(cell: Cell, result: CellResult) -> list[Row]:
    """Describe a cell's result, language by language."""
    common = _describe(cell, result)
    if result.error is not None:
        return [{**common, "error": result.error}]
    items = name_items(cell) if any(o.items is not None for o in result.outcomes) else None
    rows = []
    for outcome in result.outcomes:
        metric, value = next(iter(outcome.metrics.items()))
        rows.append(
            common
            | {
                "language": outcome.language,
                "metric": metric,
                "value": float(value),
                "metrics": {name: float(found) for name, found in outcome.metrics.items()},
                "n_items": int(outcome.n_items),
                "layers": {str(layer): float(found) for layer, found in outcome.layers.items()},
                "counts": {name: int(count) for name, count in outcome.counts.items()},
                "items": None if outcome.items is None else items,
            }
            | ({"notes": dict(outcome.notes)} if outcome.notes else {})
        )
    return rows


def name_items(cell: Cell) -> str:
    """Name the file with a cell's test items; the hash keeps results of other settings apart."""
    name = re.sub(r"[^A-Za-z0-9_-]+", "_", cell.entrant.name).strip("_")[-60:]
    seed = "all" if cell.seed is None else cell.seed
    return f"items/{name}.{cell.task}.{seed}.{cell.config.replace('-', '')}.npz"


def key_of(row: Mapping[str, Any]) -> CellKey:
    """Tell which cell a row belongs to."""
    return row["model"], row["task"], row["seed"]


def list_versions() -> dict[str, str]:
    """Name the software that results depend on."""
    found = {"python": platform.python_version()}
    for package in ("calque", "torch", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # run from a source tree
            found[package] = "unknown"
    return found


def _describe(cell: Cell, result: CellResult) -> Row:
    kind, setting = cell.kind, cell.settings.setting
    # Where every language learns for itself, none is the others' source.
    has_source = kind.trained and setting != "supervised"
    return {
        "model": cell.entrant.name,
        "task": cell.task,
        "language": None,
        "seed": cell.seed,
        "metric": kind.metric,
        "value": None,
        "metrics": {},
        "n_items": 0,
        "layers": {},
        "counts": {},
        "setting": setting if kind.trained else None,
        "source": cell.settings.source if has_source else None,
        "higher_is_better": kind.higher_is_better,
        "config": cell.config,
        "versions": list_versions(),
        "seconds": round(result.seconds, 3),
        "memory_mb": None if result.memory_mb is None else round(result.memory_mb, 1),
        "device": result.device,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "error": None,
        "items": None,
    }
