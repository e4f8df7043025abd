"""What `calque map` chose for each language, and why, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from calque.tools.map_trials import Trial
    from calque.tools.space_mapper import LanguageReport


def tabulate_choices(reports: Sequence[LanguageReport]) -> Table:
    """Show what each method gave, what was chosen, and P@1 in the space of all."""
    methods = list(dict.fromkeys(trial.method for each in reports for trial in each.trials))
    caption = "P@1 (%): CSLS among the words of the development dictionary, mean of both ways"
    table = Table(title="maps into one space", caption=caption)
    for name in ("language", "words"):
        table.add_column(name, justify="right" if name == "words" else "left")
    for method in methods:
        table.add_column(f"{method}\nP@1", justify="right")
    table.add_column("chosen")
    table.add_column("in all\nP@1", justify="right")
    for report in reports:
        trials = {trial.method: trial for trial in report.trials}
        cells = [_percent(trials[method]) if method in trials else "" for method in methods]
        final = "" if report.precision is None else f"{100 * report.precision:.1f}"
        table.add_row(report.language, f"{report.n_words:,}", *cells, report.chosen, final)
    return table


def explain_choices(reports: Sequence[LanguageReport]) -> list[str]:
    """Say in a line for each language why it was mapped so, and from what."""
    return [
        f"{report.language}: {'; '.join([f'{report.chosen}, {report.reason}', *_notes(report)])}"
        for report in reports
    ]


def _percent(trial: Trial) -> str:
    return "–" if trial.precision is None else f"{100 * trial.precision:.1f}"


def _notes(report: LanguageReport) -> list[str]:
    """Say what was found of the dictionaries, how long learning took, and what was odd."""
    notes = []
    if report.n_train_entries:
        notes.append(f"{report.n_train:,} of {report.n_train_entries:,} entries to learn from")
    if report.n_dev_entries:
        notes.append(f"judged by {report.n_dev:,} of {report.n_dev_entries:,}")
    notes += [
        f"{trial.n_rounds} rounds of {trial.method}" for trial in report.trials if trial.n_rounds
    ]
    if report.n_zero:
        notes.append(f"{report.n_zero:,} vectors of zeros stay")
    if report.n_duplicates:
        notes.append(f"{report.n_duplicates:,} repeated words left out")
    return notes
