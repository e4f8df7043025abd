"""Scores of tagging probes as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from calque.report.plots import shorten_names
from calque.tasks.tagging_probe import GAP, MAIN_METRICS, MEAN, SOURCE

if TYPE_CHECKING:
    from calque.types import Score

OTHERS = "mean of others"


def tabulate_probe(scores: Sequence[Score]) -> Table:
    """Show every language at each model's best layer, English and the gap included."""
    metric = MAIN_METRICS[scores[0].task]
    models = list(dict.fromkeys(score.model for score in scores))
    best = {model: find_probe_layer(scores, model) for model in models}
    table = Table(title=f"{scores[0].task}: {metric} (%)")
    table.add_column("language")
    for model, name in shorten_names(models).items():
        table.add_column(f"{name}\nlayer {best[model]}", justify="right")
    values = {(s.model, s.language, s.metric): s.value for s in scores if s.layer == best[s.model]}
    for name in dict.fromkeys(score.language for score in scores if score.language != MEAN):
        table.add_row(name, *(_show(values.get((model, name, metric))) for model in models))
    table.add_section()
    for title, key in ((OTHERS, metric), (GAP, GAP)):
        cells = [_show(values[model, MEAN, key]) for model in models]
        table.add_row(title, *cells, style="bold")
    return table


def tabulate_probe_layers(scores: Sequence[Score]) -> Table:
    """Show English, the mean of the others and the gap of each model at every layer."""
    metric = MAIN_METRICS[scores[0].task]
    models = list(dict.fromkeys(score.model for score in scores))
    columns = {SOURCE: (SOURCE, metric), OTHERS: (MEAN, metric), GAP: (MEAN, GAP)}
    table = Table(title=f"{scores[0].task}: by layer (%)")
    table.add_column("layer", justify="right")
    for name in shorten_names(models).values():
        for title in columns:
            table.add_column(f"{name}\n{title}", justify="right")
    values = {(s.layer, s.model, s.language, s.metric): s.value for s in scores}
    for layer in sorted({score.layer or 0 for score in scores}):
        keys = [(layer, model, *column) for model in models for column in columns.values()]
        table.add_row(str(layer), *(_show(values.get(key)) for key in keys))
    return table


def find_probe_layer(scores: Sequence[Score], model: str) -> int:
    """Find the layer with the best mean of the other languages; of equals, the lowest."""
    metric = MAIN_METRICS[scores[0].task]
    means = {
        score.layer or 0: score.value
        for score in scores
        if (score.model, score.language, score.metric) == (model, MEAN, metric)
    }
    return max(sorted(means), key=lambda layer: means[layer])


def _show(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"
