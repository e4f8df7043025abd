"""Scores of word vectors as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from calque.report.plots import shorten_names
from calque.tasks.lexicon_induction import AT
from calque.tasks.retrieval import MEAN

if TYPE_CHECKING:
    from calque.tasks.lexicon_induction import DictionaryScores
    from calque.types import Score

# Column titles, and the variant and metric below them.
PRECISIONS = {
    "nn\nP@1": ("nn", "precision_at_1"),
    "csls\nP@1": ("csls", "precision_at_1"),
    "csls\nP@5": ("csls", "precision_at_5"),
    "csls\nP@10": ("csls", "precision_at_10"),
    "known\nP@1": ("csls", "precision_at_1_known"),
    "coverage": ("csls", "coverage"),
}
CORRELATIONS = {
    "known\nPearson": "pearson_known",
    "known\nSpearman": "spearman_known",
    "known\nharmonic": "harmonic_mean_known",
    "all\nharmonic": "harmonic_mean",
    "coverage": "coverage",
}


def tabulate_dictionary(results: Mapping[str, DictionaryScores]) -> Table:
    """Show precision by direction and method, with unknown words as wrong and without them."""
    caption = "all: unknown words count as wrong; known: they are left out"
    table = Table(title="precision (%)", caption=caption)
    table.add_column("way")
    table.add_column("method")
    for words in ("all", "known"):
        for k in AT:
            table.add_column(f"{words}\nP@{k}", justify="right")
    for way, result in results.items():
        for method in result.ranks:
            values = [
                result.precision(method, k, known=known) for known in (False, True) for k in AT
            ]
            table.add_row(way, method, *(f"{100 * value:.2f}" for value in values))
        table.add_section()
    return table


def tabulate_precisions(scores: Sequence[Score]) -> Table:
    """Show every pair of languages: P@k, P@1 of known words alone, and how many are known."""
    models = shorten_names(dict.fromkeys(score.model for score in scores))
    table = Table(title=f"{scores[0].task} (%)", caption="P@k: unknown words count as wrong")
    table.add_column("pair")
    for name in models.values():
        for title in PRECISIONS:
            table.add_column(f"{name}\n{title}", justify="right")
    values = {(s.model, s.language, s.variant, s.metric): s.value for s in scores}
    for pair in _mean_last(score.language for score in scores):
        keys = [(model, pair, *key) for model in models for key in PRECISIONS.values()]
        _add_row(table, [pair], [values.get(key) for key in keys], is_mean=pair == MEAN)
    return table


def tabulate_correlations(scores: Sequence[Score]) -> Table:
    """Show every test of every set: correlations of known pairs, of all, and how many are known."""
    models = shorten_names(dict.fromkeys(score.model for score in scores))
    caption = "all: pairs with an unknown word count as of mean similarity"
    table = Table(title=f"{scores[0].task} (× 100)", caption=caption)
    table.add_column("set")
    table.add_column("test")
    for name in models.values():
        for title in CORRELATIONS:
            table.add_column(f"{name}\n{title}", justify="right")
    values = {(s.model, s.variant, s.language, s.metric): s.value for s in scores}
    for collection in dict.fromkeys(score.variant for score in scores):
        for test in _mean_last(s.language for s in scores if s.variant == collection):
            keys = [(m, collection, test, key) for m in models for key in CORRELATIONS.values()]
            cells = [values.get(key) for key in keys]
            _add_row(table, [collection or "", test], cells, is_mean=test == MEAN)
        table.add_section()
    return table


def _mean_last(languages: Iterable[str]) -> list[str]:
    """List languages once each, the mean at the end, and no mean of a single one."""
    names = [name for name in dict.fromkeys(languages) if name != MEAN]
    return [*names, MEAN] if len(names) > 1 else names


def _add_row(
    table: Table, names: Sequence[str], values: Sequence[float | None], is_mean: bool
) -> None:
    if is_mean and len(names) == 1:
        table.add_section()
    cells = ["–" if value is None else f"{100 * value:.1f}" for value in values]
    table.add_row(*names, *cells, style="bold" if is_mean else None)
