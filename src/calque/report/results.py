"""Result files of `calque evaluate`: reading rows and test items, and notes about their quality."""

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
# The score of a row and that of its items must agree within this many points.
TOLERANCE = 1e-3
MAX_OPEN_FILES = 64
MAX_NAMES = 5  # names listed in a note; the others are counted


@dataclass(frozen=True, slots=True)
class Row:
    """The score of one model in one language of a task with one seed (None: no seed matters)."""

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
    """A model, task and seed whose evaluation failed."""

    model: str
    task: str
    seed: int | None
    error: str


@dataclass(frozen=True, slots=True)
class Results:
    """The rows and failures of one or several result files."""

    rows: Sequence[Row]
    failures: Sequence[Failure]
    n_truncated: int = 0
    n_duplicates: int = 0

    @property
    def models(self) -> list[str]:
        """All models in the order of the files, including those that only failed."""
        names = [row.model for row in self.rows] + [each.model for each in self.failures]
        return list(dict.fromkeys(names))

    @property
    def tasks(self) -> list[str]:
        """All tasks in the order of the files."""
        names = [row.task for row in self.rows] + [each.task for each in self.failures]
        return list(dict.fromkeys(names))


def read_results(paths: Iterable[Path]) -> Results:
    """Read result folders and .jsonl files; of several rows for one cell the last one counts.

    A truncated last line, as a killed run leaves it, is counted and skipped. A failure is dropped
    if its cell has scores, because a resumed run tries failed cells again.
    """
    rows: dict[tuple[str, str, str, int | None], Row] = {}
    failures: dict[tuple[str, str, int | None], Failure] = {}
    n_truncated = n_duplicates = 0
    for path in dict.fromkeys(paths):
        for found in _read_file(path if path.is_file() else path / FILE):
            if found is None:
                n_truncated += 1
            elif isinstance(found, Failure):
                failures[found.model, found.task, found.seed] = found
            else:
                key = (found.model, found.task, found.language, found.seed)
                n_duplicates += key in rows
                rows[key] = found
    scored = {(row.model, row.task, row.seed) for row in rows.values()}
    left = [failure for key, failure in failures.items() if key not in scored]
    return Results(list(rows.values()), left, n_truncated, n_duplicates)


def read_items(row: Row) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]] | None:
    """Return numerator and denominator of every test item of a row, or None if none were stored."""
    if row.items is None:
        return None
    arrays = _load_arrays(row.items)
    try:
        above, below = arrays[f"{row.language}.num"], arrays[f"{row.language}.den"]
    except KeyError as error:
        problem = f"the array {error.args[0]} is missing"
        raise InputError(problem, file=row.items, fix="evaluate the model again") from None
    if above.ndim != 1 or above.shape != below.shape or not len(above):
        problem = f"the item arrays of {row.language} are empty or differ in length"
        raise InputError(problem, file=row.items, fix="evaluate the model again")
    total = float(below.sum())
    score = 100 * float(above.sum()) / total if total else 0.0
    if not abs(score - row.value) <= TOLERANCE:  # also true for NaN
        problem = f"{row.language}: the items give {score:.4f}, but the row has {row.value:.4f}"
        raise InputError(problem, file=row.items, fix="evaluate the model again")
    return above, below


def clear_item_cache() -> None:
    """Free the memory of the item files that were read."""
    _load_arrays.cache_clear()


def file_notes(results: Results) -> list[str]:
    """Return notes about truncated lines and repeated rows."""
    notes = []
    if results.n_truncated:
        lines = _count(results.n_truncated, "truncated last line")
        notes.append(f"{lines} skipped; was a run killed?")
    if results.n_duplicates:
        rows = _count(results.n_duplicates, "row")
        notes.append(f"{rows} repeated for the same cell; the last one counts")
    return notes


def failure_notes(results: Results, models: Sequence[str], tasks: Sequence[str]) -> list[str]:
    """Return notes that count and name failed and missing cells."""
    failed = [each for each in results.failures if each.model in models and each.task in tasks]
    notes = []
    if failed:
        shown = [f"{_cell_name(e.model, e.task, e.seed)}: {_first_line(e.error)}" for e in failed]
        notes.append(f"{_count(len(failed), 'cell')} failed: {_list_names(shown)}")
    tried = {(row.model, row.task, row.seed) for row in results.rows}
    tried |= {(each.model, each.task, each.seed) for each in failed}
    missing = []
    for task in tasks:
        seeds = {seed for _, name, seed in tried if name == task and seed is not None}
        for model in models:
            own = {seed for name, other, seed in tried if name == model and other == task}
            if not own:
                missing.append(f"{model}, {task}")
            elif None not in own:
                missing += [_cell_name(model, task, seed) for seed in sorted(seeds - own)]
    if missing:
        notes.append(f"{_count(len(missing), 'cell')} missing: {_list_names(missing)}")
    return notes


def mixture_notes(task: str, rows: Sequence[Row]) -> list[str]:
    """Return warnings if the scores of a task differ in settings, data, versions or test items.

    A configuration is written as settings-data-model. The first two parts must agree for all
    rows, the third within a model: two folders may use one name for two models.
    """
    facts: dict[str, Callable[[Row], Hashable]] = {
        "transfer settings": lambda row: row.setting,
        "source languages": lambda row: row.source,
        "settings": lambda row: _config_part(row.config, 0),
        "data": lambda row: _config_part(row.config, 1),
    }
    notes: list[str] = []
    for name, read in facts.items():
        values = Counter(read(row) for row in rows)
        if len(values) > 1 and not (name == "settings" and notes):
            shown = "" if name in ("settings", "data") else f" ({_list_names(map(str, values))})"
            notes.append(f"{task}: the scores were made with different {name}{shown}")
    weights: dict[str, set[str]] = {}
    for row in rows:
        if (part := _config_part(row.config, 2)) is not None:
            weights.setdefault(row.model, set()).add(part)
    if mixed := [model for model, found in weights.items() if len(found) > 1]:
        notes.append(f"{task}: several models have the name {_list_names(mixed)}")
    if len({row.versions for row in rows}) > 1:
        kinds = [json.loads(text) for text in dict.fromkeys(row.versions for row in rows)]
        names = dict.fromkeys(name for kind in kinds for name in kind)
        odd = [name for name in names if len({str(kind.get(name)) for kind in kinds}) > 1]
        notes.append(f"{task}: the scores were made with different versions of {_list_names(odd)}")
    sizes: dict[str, set[int]] = {}
    for row in rows:
        sizes.setdefault(row.language, set()).add(row.n_items)
    if odd := [language for language, found in sizes.items() if len(found) > 1]:
        notes.append(f"{task}: the number of test items differs in {_list_names(odd)}")
    return notes


def _read_file(path: Path) -> Iterator[Row | Failure | None]:
    """Yield the rows of a file, and None for a truncated last line."""
    try:
        data = path.read_bytes()
    except OSError as error:
        problem = f"the file cannot be read: {error.strerror or error}"
        fix = "pass folders or .jsonl files written by `calque evaluate -o`"
        raise InputError(problem, file=path, fix=fix) from None
    lines = data.split(b"\n")
    last = lines.pop()
    for number, line in enumerate(lines, start=1):
        yield _parse_row(line, path, number)
    if last:
        try:
            yield _parse_row(last, path, len(lines) + 1)
        except InputError:
            yield None


def _parse_row(line: bytes, path: Path, number: int) -> Row | Failure:
    try:
        row = json.loads(line)
    except ValueError:  # includes UnicodeDecodeError
        problem = "the line is not valid JSON"
        raise InputError(problem, file=path, line=number, fix="remove the line") from None
    problem = "the line is not a JSON object" if not isinstance(row, dict) else _find_problem(row)
    if problem:
        raise InputError(problem, file=path, line=number, fix="evaluate the model again")
    if row.get("error") is not None:
        return Failure(row["model"], row["task"], row["seed"], str(row["error"]))
    return Row(
        model=row["model"],
        task=row["task"],
        language=row["language"],
        seed=row["seed"],
        metric=row["metric"],
        value=float(row["value"]),
        higher_is_better=row["higher_is_better"],
        n_items=row.get("n_items") or 0,
        layers={int(layer): float(value) for layer, value in (row.get("layers") or {}).items()},
        setting=row.get("setting"),
        source=row.get("source"),
        config=row.get("config"),
        versions=json.dumps(row.get("versions") or {}, sort_keys=True),
        items=None if row.get("items") is None else path.parent / row["items"],
    )


def _find_problem(row: Mapping[str, Any]) -> str:
    """Return what is wrong with a row, or an empty string."""
    failed = row.get("error") is not None
    if "seed" not in row or not _is_whole(row["seed"]):
        return f"seed {row.get('seed', 'missing')!r} is neither an integer nor null"
    for name in ("model", "task") if failed else ("model", "task", "language", "metric"):
        if not isinstance(row.get(name), str) or not row[name]:
            return f"{name} {row.get(name, 'missing')!r} is not a name"
    if failed:
        return ""
    if not _is_number(row.get("value")):
        return f"value {row.get('value', 'missing')!r} is not a number"
    if not isinstance(row.get("higher_is_better"), bool):
        return "higher_is_better is neither true nor false"
    if not _is_whole(row.get("n_items")):
        return f"n_items {row['n_items']!r} is not an integer"
    layers = row.get("layers") or {}
    if not isinstance(layers, dict) or not all(
        name.lstrip("-").isdecimal() and _is_number(value) for name, value in layers.items()
    ):
        return "layers does not map layer numbers to scores"
    for name in ("setting", "source", "config", "items"):
        if row.get(name) is not None and not isinstance(row[name], str):
            return f"{name} {row[name]!r} is not a string"
    items = PurePosixPath(row.get("items") or "items")
    outside = items.is_absolute() or ".." in items.parts
    return f"items {items} is outside the result folder" if outside else ""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: object) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool))


@lru_cache(MAX_OPEN_FILES)
def _load_arrays(path: Path) -> dict[str, npt.NDArray[np.float64]]:
    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: np.asarray(archive[name], np.float64) for name in archive.files}
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        problem = f"the file of test items cannot be read: {type(error).__name__}"
        raise InputError(problem, file=path, fix="evaluate the model again") from None


def _config_part(config: str | None, index: int) -> str | None:
    parts = (config or "").split("-")
    return parts[index] if len(parts) == 3 else None


def _cell_name(model: str, task: str, seed: int | None) -> str:
    return f"{model}, {task}" + ("" if seed is None else f", seed {seed}")


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}" + ("" if n == 1 else "s")


def _first_line(error: str) -> str:
    line = (error.strip().splitlines() or ["unknown error"])[0]
    return line if len(line) <= 100 else line[:99] + "…"


def _list_names(names: Iterable[str]) -> str:
    """Return the first few names, and how many more there are."""
    shown = list(names)
    more = len(shown) - MAX_NAMES
    return "; ".join(shown[:MAX_NAMES]) + (f"; and {more:,} more" if more > 0 else "")
