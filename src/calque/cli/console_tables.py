"""What `calque map` chose for each language, and why, for a terminal.

What a grown model started from, for a terminal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from calque.growth.grow import weigh_others
from calque.growth.match import RULES, UNMATCHED
from calque.vectors.lexicon import AT

if TYPE_CHECKING:
    from calque.growth.grow import Example, GrowReport, MatchReport, TextShare
    from calque.vectors.lexicon import DictionaryScores
    from calque.vectors.mapping import LanguageReport
    from calque.vectors.method_selection import Trial


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


N_EXAMPLES, N_SCRIPTS = 4, 20
MATCHED = RULES[2:]
SHORT = {"normalized": "norm.", "dictionary": "dict.", "composed": "comp."}
WITHOUT = "without: if there were no dictionaries"


def tabulate_rules(match: MatchReport) -> Table:
    """Show the rows of each rule, and what they would be without dictionaries."""
    table = Table(title="rows by rule", caption=WITHOUT)
    for name in ("rule", "rows", "%", "without", "for example"):
        table.add_column(name, justify="left" if name in ("rule", "for example") else "right")
    n_rows = sum(match.rules.values()) or 1
    for rule in (*RULES[1:], RULES[UNMATCHED]):
        n, without = match.rules[rule], match.rules_without[rule]
        examples = ", ".join(map(_show_example, match.examples[rule][:N_EXAMPLES]))
        table.add_row(rule, f"{n:,}", f"{100 * n / n_rows:.1f}", f"{without:,}", escape(examples))
    return table


def tabulate_scripts(match: MatchReport) -> Table:
    """Show how much of each script's rows was matched, and by which rule."""
    table = Table(title="rows by script (%)")
    table.add_column("script")
    for name in ("rows", "matched", *map(_shorten, MATCHED)):
        table.add_column(name, justify="right")
    for script, rules in list(match.scripts.items())[:N_SCRIPTS]:
        n_rows = sum(rules.values())
        shares = [100 * rules[rule] / n_rows for rule in MATCHED]
        cells = [f"{share:.1f}" for share in (sum(shares), *shares)]
        table.add_row(script, f"{n_rows:,}", *cells)
    if len(match.scripts) > N_SCRIPTS:
        table.caption = f"and {len(match.scripts) - N_SCRIPTS} scripts with fewer rows"
    return table


def tabulate_texts(match: MatchReport, language: str) -> Table:
    """Show how much of each text starts matched, by token."""
    # Nine columns: with the usual padding, 80 characters would not hold the numbers.
    title = "tokens of texts whose row starts matched (%)"
    table = Table(title=title, caption=WITHOUT, padding=(0, 1, 0, 0))
    table.add_column("text")
    for name in ("tokens", "matched", "without", *map(_shorten, MATCHED)):
        table.add_column(name, justify="right")
    for text in match.texts:
        table.add_row(*_text_cells(text))
    if len(match.texts) > 1 and (others := weigh_others(match.texts, language)) is not None:
        table.add_section()
        table.add_row(*_text_cells(others), style="bold")
    return table


def describe_growth(report: GrowReport) -> list[str]:
    """Say in a few words what was made of what."""
    notes = [f"{report.n_rows:,} rows for {report.n_mono_rows:,}"]
    if report.match is None:
        notes.append("embeddings new")
    else:
        notes.append(f"{100 * report.match.matched:.1f} % matched")
        n_entries = sum(use.n_entries for use in report.match.dictionaries)
        n_used = sum(use.n_used for use in report.match.dictionaries)
        if n_entries:
            notes.append(f"{n_used:,} of {n_entries:,} dictionary entries have a piece")
        idle = [Path(use.path).name for use in report.match.dictionaries if not use.n_used]
        if idle:
            notes.append(f"none of {', '.join(idle)}")
        if report.match.n_unspelled:
            notes.append(f"{report.match.n_unspelled:,} translations unknown to the model")
    notes.append("body copied" if report.initialize in ("both", "body") else "body new")
    if not report.has_head:
        notes.append("no language-modelling head in the checkpoint: it is new")
    lost = [new for new, old in report.special.values() if old is None]
    if lost:
        notes.append(f"special tokens without a counterpart: {' '.join(dict.fromkeys(lost))}")
    return notes


def _shorten(rule: str) -> str:
    return SHORT.get(rule, rule)


def _show_example(example: Example) -> str:
    origin = "/".join(example.meanings[:3]) or " ".join(example.sources[:3])
    return f"{example.piece} → {origin}" if origin else example.piece


def _text_cells(text: TextShare) -> list[str]:
    shares = [text.matched, text.matched_without, *(text.rules[rule] for rule in MATCHED)]
    return [text.name, f"{text.n_tokens:,}", *(f"{100 * share:.1f}" for share in shares)]
