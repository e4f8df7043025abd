"""Scores as `calque evaluate` wrote them: rows of results.jsonl, and the items behind them.

What a reader of results must know: lines cut off, cells failed or missing, settings mixed.
"""

from __future__ import annotations

import json
import math
import zipfile
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from calque.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


FILE = "results.jsonl"
# A row's score and its items' must be the same; the file has more digits than that.
TOLERANCE = 1e-3
OPEN_FILES = 64


@dataclass(frozen=True, slots=True)
class Row:
    """The score of one model in one language of a task with one seed; None where none matters."""

    model: str
    task: str
    language: str
    seed: int | None
    metric: str
    value: float
    higher_is_better: bool
    n_items: int = 0
    layers: Mapping[int, float] = field(default_factory=dict)
    setting: str | None = None
    source: str | None = None
    config: str | None = None
    versions: str = ""
    items: Path | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """A model, task and seed that gave an error instead of scores."""

    model: str
    task: str
    seed: int | None
    error: str


@dataclass(frozen=True, slots=True)
class Results:
    """Rows of one or several folders, and what was odd about their files."""

    rows: Sequence[Row]
    failures: Sequence[Failure]
    n_torn: int = 0
    n_duplicates: int = 0

    @property
    def models(self) -> list[str]:
        """The models in the order of the files, those that only failed too."""
        names = [row.model for row in self.rows] + [each.model for each in self.failures]
        return list(dict.fromkeys(names))

    @property
    def tasks(self) -> list[str]:
        """The tasks in the order of the files."""
        names = [row.task for row in self.rows] + [each.task for each in self.failures]
        return list(dict.fromkeys(names))


def read_results(folders: Iterable[Path]) -> Results:
    """Read folders of results; of rows for the same cell the last counts.

    A last line that was cut off, as a killed run leaves it, is counted and left out. A failure
    is forgotten once its cell has scores: a resumed run tries again.
    """
    rows: dict[tuple[str, str, str, int | None], Row] = {}
    failures: dict[tuple[str, str, int | None], Failure] = {}
    n_torn = n_duplicates = 0
    for folder in dict.fromkeys(folders):
        path = folder if folder.is_file() else folder / FILE
        for found in _read_file(path):
            if found is None:
                n_torn += 1
            elif isinstance(found, Failure):
                failures[found.model, found.task, found.seed] = found
            else:
                key = (found.model, found.task, found.language, found.seed)
                n_duplicates += key in rows
                rows[key] = found
    scored = {(row.model, row.task, row.seed) for row in rows.values()}
    left = [failure for key, failure in failures.items() if key not in scored]
    return Results(list(rows.values()), left, n_torn, n_duplicates)


def read_items(row: Row) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]] | None:
    """Read what each test item gives to a row's score, above and below the line, if it is there."""
    if row.items is None:
        return None
    arrays = _load(row.items)
    try:
        above, below = arrays[f"{row.language}.num"], arrays[f"{row.language}.den"]
    except KeyError as error:
        raise InputError(f"holds no {error.args[0]}", file=row.items) from None
    if above.ndim != 1 or above.shape != below.shape or not len(above):
        raise InputError(f"{row.language}: unequal or empty lists of items", file=row.items)
    total = float(below.sum())
    score = 100 * float(above.sum()) / total if total else 0.0
    if not abs(score - row.value) <= TOLERANCE:  # not-a-number neither
        problem = f"{row.language}: the items give {score:.4f}, the row {row.value:.4f}"
        raise InputError(problem, file=row.items, fix="evaluate it again")
    return above, below


def forget_items() -> None:
    """Free the memory of files that were read: their languages have been taken out."""
    _load.cache_clear()


def _read_file(path: Path) -> Iterator[Row | Failure | None]:
    """Give the rows of a file, and None for a last line without its end."""
    try:
        data = path.read_bytes()
    except OSError as error:
        problem = f"cannot be read: {error.strerror or error}"
        raise InputError(problem, file=path, fix="name folders of `calque evaluate -o`") from None
    lines = data.split(b"\n")
    last = lines.pop()
    for number, line in enumerate(lines, start=1):
        yield _parse(line, path, number)
    if last:
        try:
            yield _parse(last, path, len(lines) + 1)
        except InputError:
            yield None


def _parse(line: bytes, path: Path, number: int) -> Row | Failure:
    try:
        row = json.loads(line)
    except ValueError:  # UnicodeDecodeError is one
        raise InputError("is no JSON", file=path, line=number, fix="remove the line") from None
    problem = "is no row of results" if not isinstance(row, dict) else _find_problem(row)
    if problem is not None:
        raise InputError(problem, file=path, line=number, fix="evaluate it again")
    if row.get("error") is not None:
        return Failure(row["model"], row["task"], row["seed"], str(row["error"]))
    return Row(
        row["model"],
        row["task"],
        row["language"],
        row["seed"],
        row["metric"],
        float(row["value"]),
        row["higher_is_better"],
        row.get("n_items") or 0,
        {int(layer): float(value) for layer, value in (row.get("layers") or {}).items()},
        row.get("setting"),
        row.get("source"),
        row.get("config"),
        json.dumps(row.get("versions") or {}, sort_keys=True),
        None if row.get("items") is None else path.parent / row["items"],
    )


def _find_problem(row: Mapping[str, Any]) -> str | None:
    """Say what is wrong with a row, if anything is."""
    if "seed" not in row or not _is_whole(row["seed"], or_none=True):
        return f"seed {row.get('seed', 'missing')!r} is neither a whole number nor null"
    names = ["model", "task"] if row.get("error") is not None else ["model", "task", "language"]
    for name in names if row.get("error") is not None else [*names, "metric"]:
        if not isinstance(row.get(name), str) or not row[name]:
            return f"{name} {row.get(name, 'missing')!r} is no name"
    if row.get("error") is not None:
        return None
    if not _is_number(row.get("value")):
        return f"value {row.get('value', 'missing')!r} is no number"
    if not isinstance(row.get("higher_is_better"), bool):
        return "higher_is_better is neither true nor false"
    if not _is_whole(row.get("n_items"), or_none=True):
        return f"n_items {row['n_items']!r} is no whole number"
    layers = row.get("layers") or {}
    if not isinstance(layers, dict) or not all(
        name.lstrip("-").isdecimal() and _is_number(value) for name, value in layers.items()
    ):
        return "layers are no scores by number"
    for name in ("setting", "source", "config", "items"):
        if row.get(name) is not None and not isinstance(row[name], str):
            return f"{name} {row[name]!r} is no text"
    inside = PurePosixPath(row.get("items") or "items")
    return f"items {inside} lie elsewhere" if inside.is_absolute() or ".." in inside.parts else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: object, *, or_none: bool) -> bool:
    return (value is None and or_none) or (isinstance(value, int) and not isinstance(value, bool))


@lru_cache(OPEN_FILES)
def _load(path: Path) -> dict[str, npt.NDArray[np.float64]]:
    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: np.asarray(archive[name], np.float64) for name in archive.files}
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        problem = f"is no file of items: {type(error).__name__}"
        raise InputError(problem, file=path, fix="evaluate it again") from None


MOST_NAMED = 5


def describe_files(results: Results) -> list[str]:
    """Say what was odd about the files."""
    notes = []
    if results.n_torn:
        notes.append(f"{_count(results.n_torn, 'last line')} cut off and left out: a killed run?")
    if results.n_duplicates:
        notes.append(f"{_count(results.n_duplicates, 'row')} given again: the last one counts")
    return notes


def describe_failures(results: Results, models: Sequence[str], tasks: Sequence[str]) -> list[str]:
    """Count and name cells that failed, and those that were never tried."""
    failed = [each for each in results.failures if each.model in models and each.task in tasks]
    notes = []
    if failed:
        shown = [f"{_name(e.model, e.task, e.seed)}: {_shorten(e.error)}" for e in failed]
        notes.append(f"{_count(len(failed), 'cell')} failed: {_list(shown)}")
    tried = {(row.model, row.task, row.seed) for row in results.rows}
    tried |= {(each.model, each.task, each.seed) for each in failed}
    missing = []
    for task in tasks:
        seeds = {seed for model, name, seed in tried if name == task and seed is not None}
        for model in models:
            own = {seed for name, other, seed in tried if name == model and other == task}
            if not own:
                missing.append(f"{model}, {task}")
            elif None not in own:
                missing += [_name(model, task, seed) for seed in sorted(seeds - own)]
    if missing:
        notes.append(f"{_count(len(missing), 'cell')} missing: {_list(missing)}")
    return notes


def describe_mixtures(task: str, rows: Sequence[Row]) -> list[str]:
    """Warn where scores of a task were not made alike: settings, data, versions, test items.

    A configuration is named settings-data-model, of which the first two must agree, and the third
    within a model: folders that are read together may know two models by one name.
    """
    facts: dict[str, Callable[[Row], Hashable]] = {
        "setting": lambda row: row.setting,
        "source language": lambda row: row.source,
        "settings": lambda row: _part(row.config, 0),
        "data": lambda row: _part(row.config, 1),
    }
    notes: list[str] = []
    for name, read in facts.items():
        values = Counter(read(row) for row in rows)
        if len(values) > 1 and not (name == "settings" and notes):
            shown = "" if name in ("settings", "data") else f" ({_list(map(str, values))})"
            notes.append(f"{task}: the {name} of the scores differ{shown}: not made alike")
    weights: dict[str, set[str]] = {}
    for row in rows:
        if (part := _part(row.config, 2)) is not None:
            weights.setdefault(row.model, set()).add(part)
    if mixed := [model for model, found in weights.items() if len(found) > 1]:
        notes.append(f"{task}: more than one model is called {_list(mixed)}: not one's seeds")
    if len({row.versions for row in rows}) > 1:
        kinds = [json.loads(text) for text in dict.fromkeys(row.versions for row in rows)]
        names = dict.fromkeys(name for kind in kinds for name in kind)
        odd = [name for name in names if len({str(kind.get(name)) for kind in kinds}) > 1]
        notes.append(f"{task}: scores were made with other versions of {_list(odd)}")
    sizes: dict[str, set[int]] = {}
    for row in rows:
        sizes.setdefault(row.language, set()).add(row.n_items)
    odd = [language for language, found in sizes.items() if len(found) > 1]
    if odd:
        notes.append(f"{task}: the test items differ in number in {_list(odd)}")
    return notes


def _part(config: str | None, place: int) -> str | None:
    parts = (config or "").split("-")
    return parts[place] if len(parts) == 3 else None


def _name(model: str, task: str, seed: int | None) -> str:
    return f"{model}, {task}" + ("" if seed is None else f", seed {seed}")


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}" + ("" if n == 1 else "s")


def _shorten(error: str) -> str:
    line = (error.strip().splitlines() or ["unknown"])[0]
    return line if len(line) <= 100 else line[:99] + "…"


def _list(names: object) -> str:
    """List names, the first few of many."""
    shown = list(names)  # type: ignore[call-overload]
    more = len(shown) - MOST_NAMED
    return "; ".join(shown[:MOST_NAMED]) + (f"; and {more:,} more" if more > 0 else "")
