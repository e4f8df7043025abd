"""Word alignment scores as tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from calque.report.plots import shorten_names
from calque.tasks.retrieval import MEAN

if TYPE_CHECKING:
    from calque.tasks.metrics import LinkCounts
    from calque.types import Score

COLUMNS = {"precision": "precision", "recall": "recall", "f1": "F1", "aer": "AER"}


def tabulate_counts(counts: LinkCounts, name: str, n_pairs: int) -> Table:
    """Show how links compare with the gold."""
    table = Table(title=f"{n_pairs:,} pairs (%)")
    table.add_column("aligner")
    for title in COLUMNS.values():
        table.add_column(title, justify="right")
    table.add_row(name, *(f"{100 * getattr(counts, metric):.2f}" for metric in COLUMNS))
    return table


def tabulate_sweep(sweep: Mapping[str, Mapping[int, LinkCounts]], n_pairs: int) -> Table:
    """Show the error rate of every method at every layer, the lowest in bold."""
    table = Table(title=f"alignment error rate of {n_pairs:,} pairs (%)")
    table.add_column("layer", justify="right")
    for method in sweep:
        table.add_column(method, justify="right")
    lowest = min(counts.aer for by_layer in sweep.values() for counts in by_layer.values())
    for layer in next(iter(sweep.values())):
        rates = [by_layer[layer].aer for by_layer in sweep.values()]
        cells = [_emphasize(f"{100 * rate:.2f}", rate == lowest) for rate in rates]
        table.add_row(str(layer), *cells)
    return table


def tabulate_pairs(scores: Sequence[Score]) -> Table:
    """Show every pair of languages at each model's best layer."""
    best = {model: find_best_layer(scores, model) for model in _models_of(scores)}
    table = Table(title=f"{scores[0].task} (%)")
    table.add_column("pair")
    for model, name in shorten_names(best).items():
        for title in COLUMNS.values():
            table.add_column(f"{name}\nlayer {best[model]}\n{title}", justify="right")
    values = {(s.model, s.language, s.metric): s.value for s in scores if s.layer == best[s.model]}
    for name in dict.fromkeys(score.language for score in scores):
        cells = [f"{100 * values[model, name, m]:.2f}" for model in best for m in COLUMNS]
        if name == MEAN:
            table.add_section()
        table.add_row(name, *cells, style="bold" if name == MEAN else None)
    return table


def tabulate_pair_layers(scores: Sequence[Score]) -> Table:
    """Show the mean error rate of each model at every layer, its lowest in bold."""
    models = _models_of(scores)
    best = {model: find_best_layer(scores, model) for model in models}
    means = {
        (s.model, s.layer): s.value for s in scores if s.language == MEAN and s.metric == "aer"
    }
    table = Table(title=f"{scores[0].task}: mean AER (%)")
    table.add_column("layer", justify="right")
    for name in shorten_names(models).values():
        table.add_column(name, justify="right")
    for layer in sorted({layer or 0 for _, layer in means}):
        found = [(means.get((model, layer)), layer == best[model]) for model in models]
        cells = ["–" if v is None else _emphasize(f"{100 * v:.2f}", b) for v, b in found]
        table.add_row(str(layer), *cells)
    return table


def find_best_layer(scores: Sequence[Score], model: str) -> int:
    """Find the layer with the lowest mean error rate; of equals, the lowest layer."""
    rates = {
        score.layer or 0: score.value
        for score in scores
        if (score.model, score.language, score.metric) == (model, MEAN, "aer")
    }
    return min(sorted(rates), key=lambda layer: rates[layer])


def _emphasize(text: str, is_best: bool) -> str:
    return f"[bold]{text}[/]" if is_best else text


def _models_of(scores: Sequence[Score]) -> list[str]:
    return list(dict.fromkeys(score.model for score in scores))
