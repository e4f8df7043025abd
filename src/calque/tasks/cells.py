"""A cell of a study: one model on one task with one seed, and the hash of all it depends on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from calque.tasks.fingerprints import hash_values
from calque.tasks.task_settings import TaskSettings
from calque.types import InputError

if TYPE_CHECKING:
    from calque.tasks.entrants import Entrant
    from calque.tasks.suite import TaskKind

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
