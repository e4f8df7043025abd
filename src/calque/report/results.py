"""Result files of `calque evaluate`: rows and test items of models, and notes on their quality."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from calque.errors import printable
from calque.io.result_records import CONFIG_PARTS, load_items, read_records, select_items

if TYPE_CHECKING:
    from calque.io.result_records import Floats, Record

FILE = "results.jsonl"
REQUIRED = ("model", "task", "seed", "language", "metric", "value", "higher_is_better")
MAX_CACHED_FILES = 64
MAX_ERROR = 100  # characters of an error in a note
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
    versions: Mapping[str, str] = field(default_factory=dict)
    items: Path | None = None
    # Why the score is an upper bound, if it is one.
    upper_bound: str | None = None


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
        file = path / FILE if path.is_dir() else path
        records, is_truncated = read_records(file, REQUIRED)
        n_truncated += is_truncated
        for _, record in records:
            found = _build_row(record, file.parent)
            if isinstance(found, Failure):
                failures[found.model, found.task, found.seed] = found
            else:
                key = (found.model, found.task, found.language, found.seed)
                n_duplicates += key in rows
                rows[key] = found
    scored = {(row.model, row.task, row.seed) for row in rows.values()}
    left = [failure for key, failure in failures.items() if key not in scored]
    return Results(list(rows.values()), left, n_truncated, n_duplicates)


def read_items(row: Row) -> tuple[Floats, Floats] | None:
    """Return numerator and denominator of every test item of a row, or None if none were stored."""
    if row.items is None:
        return None
    return select_items(_load_arrays(row.items), row.language, row.value, row.items)


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
        CONFIG_PARTS[0]: lambda row: _config_part(row.config, 0),
        CONFIG_PARTS[1]: lambda row: _config_part(row.config, 1),
    }
    notes: list[str] = []
    for name, read in facts.items():
        values = Counter(read(row) for row in rows)
        if len(values) > 1 and not (name == CONFIG_PARTS[0] and notes):
            shown = "" if name in CONFIG_PARTS else f" ({_list_names(map(str, values))})"
            notes.append(f"{task}: the scores were made with different {name}{shown}")
    weights: dict[str, set[str]] = {}
    for row in rows:
        if (part := _config_part(row.config, 2)) is not None:
            weights.setdefault(row.model, set()).add(part)
    if mixed := [model for model, found in weights.items() if len(found) > 1]:
        notes.append(f"{task}: several models have the name {_list_names(mixed)}")
    packages = dict.fromkeys(name for row in rows for name in row.versions)
    if odd := [name for name in packages if len({row.versions.get(name) for row in rows}) > 1]:
        notes.append(f"{task}: the scores were made with different versions of {_list_names(odd)}")
    sizes: dict[str, set[int]] = {}
    for row in rows:
        sizes.setdefault(row.language, set()).add(row.n_items)
    if odd := [language for language, found in sizes.items() if len(found) > 1]:
        notes.append(f"{task}: the number of test items differs in {_list_names(odd)}")
    return notes


def _build_row(record: Record, folder: Path) -> Row | Failure:
    if record.get("error") is not None:
        return Failure(record["model"], record["task"], record["seed"], record["error"])
    return Row(
        model=record["model"],
        task=record["task"],
        language=record["language"],
        seed=record["seed"],
        metric=record["metric"],
        value=float(record["value"]),
        higher_is_better=record["higher_is_better"],
        n_items=record.get("n_items", 0),
        layers={int(layer): float(value) for layer, value in record.get("layers", {}).items()},
        setting=record.get("setting"),
        source=record.get("source"),
        config=record.get("config"),
        versions=record.get("versions", {}),
        items=None if record.get("items") is None else folder / record["items"],
        upper_bound=(record.get("notes") or {}).get("upper_bound"),
    )


@lru_cache(MAX_CACHED_FILES)
def _load_arrays(path: Path) -> dict[str, Floats]:
    return load_items(path)


def _config_part(config: str | None, index: int) -> str | None:
    parts = (config or "").split("-")
    return parts[index] if len(parts) == 3 else None


def _cell_name(model: str, task: str, seed: int | None) -> str:
    return f"{model}, {task}" + ("" if seed is None else f", seed {seed}")


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}" + ("" if n == 1 else "s")


def _first_line(error: str) -> str:
    line = (error.strip().splitlines() or ["unknown error"])[0]
    return printable(line, MAX_ERROR)


def _list_names(names: Iterable[str]) -> str:
    """Return the first few names, and how many more there are."""
    shown = list(names)
    more = len(shown) - MAX_NAMES
    return "; ".join(shown[:MAX_NAMES]) + (f"; and {more:,} more" if more > 0 else "")
