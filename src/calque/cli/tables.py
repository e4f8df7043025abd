"""Scores as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from calque.report.plots import shorten_names
from calque.tasks.retrieval import MEAN

if TYPE_CHECKING:
    from calque.types import Score

ARROWS = {"accuracy_to_english": "→ en", "accuracy_from_english": "en →"}


def tabulate_languages(scores: Sequence[Score]) -> Table:
    """Show every language at each model's best layer, both ways."""
    best = {model: choose_layer(scores, model) for model in _models_of(scores)}
    table = Table(title=f"{scores[0].task}: accuracy (%)")
    table.add_column("language")
    for model, name in shorten_names(best).items():
        for arrow in ARROWS.values():
            table.add_column(f"{name}\nlayer {best[model]}\n{arrow}", justify="right")
    values = {(s.model, s.language, s.metric): s.value for s in scores if s.layer == best[s.model]}
    languages = dict.fromkeys(score.language for score in scores)
    for language in [name for name in languages if name != MEAN]:
        table.add_row(language, *_cells(values, best, language))
    table.add_section()
    table.add_row(MEAN, *_cells(values, best, MEAN), style="bold")
    return table


def tabulate_layers(scores: Sequence[Score]) -> Table:
    """Show the mean over languages at every layer, both ways."""
    models = _models_of(scores)
    means = [score for score in scores if score.language == MEAN]
    table = Table(title=f"{scores[0].task}: mean (%)")
    table.add_column("layer", justify="right")
    for name in shorten_names(models).values():
        for arrow in ARROWS.values():
            table.add_column(f"{name}\n{arrow}", justify="right")
    for layer in sorted({score.layer or 0 for score in means}):
        values = {(s.model, MEAN, s.metric): s.value for s in means if s.layer == layer}
        table.add_row(str(layer), *_cells(values, models, MEAN))
    return table


def choose_layer(scores: Sequence[Score], model: str) -> int:
    """Find the layer with the best mean over languages and directions; of equals, the lowest."""
    totals: dict[int, float] = {}
    for score in scores:
        if score.model == model and score.language == MEAN:
            totals[score.layer or 0] = totals.get(score.layer or 0, 0.0) + score.value
    return max(sorted(totals), key=lambda layer: totals[layer])


def _cells(
    values: dict[tuple[str, str, str], float], models: Sequence[str] | dict[str, int], language: str
) -> list[str]:
    found = [values.get((model, language, metric)) for model in models for metric in ARROWS]
    return ["–" if value is None else f"{100 * value:.1f}" for value in found]


def _models_of(scores: Sequence[Score]) -> list[str]:
    return list(dict.fromkeys(score.model for score in scores))
