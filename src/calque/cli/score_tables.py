"""Scores of `calque evaluate` as tables for a terminal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from calque.errors import printable
from calque.evaluation.registry import TASKS
from calque.report.plots import shorten_names

if TYPE_CHECKING:
    from calque.io.result_records import Record

MEAN, OTHERS, GAP = "mean", "mean of others", "gap"


def tabulate_scores(task: str, records: Sequence[Record]) -> list[Table]:
    """Return a table by language and, if several layers were measured, one by layer."""
    records = [record for record in records if record["task"] == task and record["error"] is None]
    if not records:
        return []
    tables = [_tabulate_languages(task, records)]
    if any(len(record["layers"]) > 1 for record in records):
        tables.append(_tabulate_layers(task, records))
    return tables


def list_curves(records: Sequence[Record]) -> dict[str, dict[str, dict[int, float]]]:
    """Return scores by layer for a plot: language → model → layer → score, and their mean."""
    curves: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for language in [*dict.fromkeys(record["language"] for record in records), MEAN]:
        for model in dict.fromkeys(record["model"] for record in records):
            found = [r for r in records if r["model"] == model]
            if language != MEAN:
                found = [r for r in found if r["language"] == language]
            curves[language][model] = _mean_by_layer(found)
    if len(curves) == 2:  # the mean of one language is that language
        del curves[MEAN]
    return {language: dict(models) for language, models in curves.items()}


def _tabulate_languages(task: str, records: Sequence[Record]) -> Table:
    columns = TASKS[task].columns or {TASKS[task].metric: TASKS[task].metric}
    models = shorten_names(dict.fromkeys(record["model"] for record in records))
    seeds = {record["seed"] for record in records}
    by_seeds = "" if len(seeds) == 1 else f", mean of {len(seeds)} seeds"
    table = Table(title=f"{task} (%){by_seeds}")
    has_collections = any(record.get("notes", {}).get("collection") for record in records)
    if has_collections:
        table.add_column("collection")
    table.add_column("language")
    for model, name in models.items():
        layers = {r["counts"].get("layer") for r in records if r["model"] == model} - {None}
        head = f"{name}\nlayer {layers.pop()}" if len(layers) == 1 else name
        if any(r.get("notes", {}).get("upper_bound") for r in records if r["model"] == model):
            head += "\nupper bound"
        for column in columns:
            title = f"{head}\n{column}" if len(columns) > 1 else head
            table.add_column(Text(title), justify="right")
    groups: dict[tuple[str, ...], list[Record]] = defaultdict(list)
    for record in records:
        language = record["language"]
        if has_collections:
            collection = record["notes"]["collection"]
            groups[collection, language.removesuffix(f":{collection}")].append(record)
        else:
            groups[(language,)].append(record)

    def add_row(names: Sequence[str], found: Iterable[Record], style: str | None = None) -> None:
        found = list(found)
        cells = [
            _show(_mean(r["metrics"].get(key) for r in found if r["model"] == model))
            for model in models
            for key in columns.values()
        ]
        table.add_row(*(Text(printable(name)) for name in names), *cells, style=style)

    last = None
    for names, found in groups.items():
        if has_collections and last not in (None, names[0]):
            table.add_section()
        last = names[0]
        add_row(names, found)
    source = TASKS[task].source or records[0]["source"]
    others = [record for record in records if record["language"] != source]
    if len(groups) > 1 and not has_collections:
        table.add_section()
        is_transfer = source is not None and 0 < len(others) < len(records)
        add_row([OTHERS if is_transfer else MEAN], others, "bold")
        if is_transfer:
            cells = [_show(_find_gap(records, model, source)) for model in models]
            table.add_row(GAP, *cells, style="bold")
    return table


def _tabulate_layers(task: str, records: Sequence[Record]) -> Table:
    """Show the mean of the main metric at every layer, the best layer of each model in bold."""
    from calque.word_alignment.scoring import find_best_layer

    source = TASKS[task].source
    models = shorten_names(dict.fromkeys(record["model"] for record in records))
    columns: list[tuple[str, dict[int, float]]] = []
    for model, name in models.items():
        own = [record for record in records if record["model"] == model]
        if source is None:
            columns.append((name, _mean_by_layer(own)))
            continue
        first = _mean_by_layer(record for record in own if record["language"] == source)
        rest = _mean_by_layer(record for record in own if record["language"] != source)
        gap = {layer: first[layer] - rest[layer] for layer in rest if layer in first}
        columns += [(f"{name}\n{source}", first), (f"{name}\n{OTHERS}", rest)]
        columns.append((f"{name}\n{GAP}", gap))
    table = Table(title=f"{task}: {records[0]['metric']} by layer (%)")
    table.add_column("layer", justify="right")
    best = {}
    for title, values in columns:
        table.add_column(Text(title), justify="right")
        if values and not title.endswith(GAP):
            higher = TASKS[task].higher_is_better
            best[title] = find_best_layer(values, higher_is_better=higher)
    for layer in sorted({layer for _, values in columns for layer in values}):
        cells = []
        for title, values in columns:
            text = _show(values.get(layer))
            cells.append(Text(text, "bold" if best.get(title) == layer else ""))
        table.add_row(str(layer), *cells)
    return table


def _mean_by_layer(records: Iterable[Record]) -> dict[int, float]:
    values: dict[int, list[float]] = defaultdict(list)
    for record in records:
        for layer, value in record["layers"].items():
            values[int(layer)].append(value)
    return {layer: sum(found) / len(found) for layer, found in values.items()}


def _find_gap(records: Sequence[Record], model: str, source: str) -> float | None:
    own = [record for record in records if record["model"] == model]
    first = _mean(record["value"] for record in own if record["language"] == source)
    rest = _mean(record["value"] for record in own if record["language"] != source)
    return None if first is None or rest is None else first - rest


def _mean(values: Iterable[Any]) -> float | None:
    found = [value for value in values if value is not None]
    return sum(found) / len(found) if found else None


def _show(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"
