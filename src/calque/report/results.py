"""Scores as `calque evaluate` wrote them: rows of results.jsonl, and the items behind them."""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from calque.types import InputError

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
