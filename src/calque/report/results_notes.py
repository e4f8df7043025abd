"""What a reader of results must know: lines cut off, cells failed or missing, settings mixed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Hashable, Sequence

from calque.report.results import Results, Row

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
