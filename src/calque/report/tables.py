"""Comparisons as tables: for the terminal, in Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from calque.report.comparison import Comparison, TaskComparison
from calque.report.difference import Difference
from calque.report.plots import shorten_names
from calque.report.statistics import Spread
from calque.report.verdict import (
    CORRECTION_NAMES,
    format_difference,
    format_p,
    format_signed,
    summarize_verdicts,
    verdict_name,
    verdict_sentence,
)

if TYPE_CHECKING:
    from rich.table import Table as RichTable


# Limits of a LaTeX page: characters per line (360 points in small type), rows per table, and
# floats that may wait for a later page.
LATEX_CHARACTERS, LATEX_ROWS, LATEX_FLOATS = 100, 45, 10
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
MARKS = {"helps": "▲", "hurts": "▼"}
RULES = {"above": "above", "below": "below", "within": "within", None: "–"}
LATEX = {
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": "$<$",
    ">": "$>$",
    "±": r"$\pm$",
    "−": "$-$",
    "–": "--",
    "…": r"\dots{}",
    "▲": r"$\uparrow$",
    "▼": r"$\downarrow$",
    "↓": r"$\downarrow$",
}


@dataclass(frozen=True, slots=True)
class ResultTable:
    """A table of text cells; the first `n_words` columns are words, the others numbers.

    The rows of `below` (means and gaps) follow after a line. If space is short, the columns of
    `droppable` are dropped first.
    """

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    below: Sequence[Sequence[str]] = ()
    n_words: int = 1
    caption: str = ""
    droppable: Sequence[str] = ()


def verdict_table(comparison: Comparison) -> ResultTable:
    """Return one row per task and model: scores, difference, p-value and verdict."""
    names = short_model_names(comparison)
    percent = f"{100 * (1 - comparison.settings.alpha):g} %"
    headers = ["task", "model", names[comparison.baseline], "score", f"difference [{percent}]"]
    rows = []
    for task in comparison.tasks:
        for model, each in task.models.items():
            c = each.overall
            p = "–" if c.p_adjusted is None else format_p(c.p_adjusted).removeprefix("= ")
            cells = [format_spread(c.baseline), format_spread(c.model), format_difference(c), p]
            rule = [RULES[c.rule], verdict_name(c)]
            name = task.task + ("" if task.higher_is_better else " ↓")
            rows.append([name, _mark_upper_bound(names[model], task, model), *cells, *rule])
    return ResultTable(
        f"against {names[comparison.baseline]}",
        [*headers, "p", "1 sd rule", "verdict"],
        rows,
        n_words=2,
        caption=describe_method(comparison),
        droppable=("1 sd rule", names[comparison.baseline], "score"),
    )


def task_table(
    comparison: Comparison, task: TaskComparison, models: Sequence[str] | None = None
) -> ResultTable:
    """Return a task by language: the scores of the models and their differences."""
    names, others = short_model_names(comparison), list(task.models if models is None else models)
    names = {model: _mark_upper_bound(name, task, model) for model, name in names.items()}
    headers = ["language", names[comparison.baseline]]
    for model in others:
        headers += [names[model], "difference"]

    def line(name: str, find: Callable[[str], Difference | None]) -> list[str]:
        found = {model: find(model) for model in others}
        first = next((each.baseline for each in found.values() if each is not None), None)
        cells = [name, "–" if first is None else format_spread(first)]
        for c in found.values():
            if c is None:
                cells += ["–", "–"]
            else:
                mark = MARKS.get(c.category, "")
                cells += [format_spread(c.model), f"{format_difference(c)} {mark}".rstrip()]
        return cells

    languages = [
        name for name in task.languages if any(name in task.models[m].languages for m in others)
    ]
    rows = [line(name, partial(language_difference, task, name)) for name in languages]
    below = [line("mean", lambda model: task.models[model].overall)]
    if any(task.models[model].gap is not None for model in others):
        below.append(line(f"gap to {task.source}", lambda model: task.models[model].gap))
    caption = f"{task.metric} (%), {'higher' if task.higher_is_better else 'lower'} is better"
    return ResultTable(task.task, headers, rows, below, caption=caption)


def _mark_upper_bound(name: str, task: TaskComparison, model: str) -> str:
    return f"{name} (upper bound)" if model in task.upper_bounds else name


def language_difference(task: TaskComparison, language: str, model: str) -> Difference | None:
    """Return the difference of a model in a language, if it has one."""
    return task.models[model].languages.get(language)


def verdict_sentences(comparison: Comparison) -> list[str]:
    """Return every verdict as a sentence: for each model its tasks, its gaps and a summary."""
    names, settings = short_model_names(comparison), comparison.settings
    lines = []
    for model in comparison.models:
        cells = [task.models[model] for task in comparison.tasks if model in task.models]
        found = [cell.overall for cell in cells] + [cell.gap for cell in cells if cell.gap]
        lines += [
            verdict_sentence(
                each, names[model], alpha=settings.alpha, correction=settings.correction
            )
            for each in found
        ]
        if cells:
            lines.append(summarize_verdicts([cell.overall for cell in cells], names[model]))
    return lines


def describe_method(comparison: Comparison) -> str:
    """Return one line about how the verdicts were reached."""
    settings = comparison.settings
    worse = any(not task.higher_is_better for task in comparison.tasks)
    return (
        "mean ± sample standard deviation over seeds; p over seeds and test items,"
        f" {CORRECTION_NAMES[settings.correction]} over {comparison_count(comparison)};"
        f" level {settings.alpha:g}; {settings.n_resamples:,} resamples"
        + ("; ↓ lower is better" if worse else "")
    )


def comparison_count(comparison: Comparison) -> str:
    """Return the number of comparisons of means as text."""
    n = sum(len(task.models) for task in comparison.tasks)
    return f"{n} comparison" + ("" if n == 1 else "s")


def short_model_names(comparison: Comparison) -> Mapping[str, str]:
    """Return short names of the models."""
    return shorten_names([comparison.baseline, *comparison.models])


def format_spread(spread: Spread) -> str:
    """Return a mean with its standard deviation, if there is one, as text.

    >>> format_spread(Spread(70.12, 0.81, 5)), format_spread(Spread(70.12, None, 1))
    ('70.1 ± 0.8', '70.1')
    """
    mean = format_signed(spread.mean, plus=False)
    return mean if spread.fixed or spread.deviation is None else f"{mean} ± {spread.deviation:.1f}"


def to_rich(table: ResultTable) -> RichTable:
    """Return a table for the terminal; names are not interpreted as markup."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    made = RichTable(
        title=Text(table.title), caption=Text(table.caption), box=box.SIMPLE_HEAD, pad_edge=False
    )
    for place, head in enumerate(table.headers):
        is_word = place < table.n_words
        justify: Literal["left", "right"] = "left" if is_word else "right"
        made.add_column(Text(head), justify=justify, no_wrap=not is_word, overflow="fold")
    for row in table.rows:
        made.add_row(*map(Text, row))
    if table.below:
        made.add_section()
    for row in table.below:
        made.add_row(*map(Text, row), style="bold")
    return made


def without_column(table: ResultTable, head: str) -> ResultTable:
    """Return the table without a column."""
    place = list(table.headers).index(head, table.n_words)

    def cut(row: Sequence[str]) -> list[str]:
        return [cell for number, cell in enumerate(row) if number != place]

    rows, below = [cut(row) for row in table.rows], [cut(row) for row in table.below]
    droppable = [name for name in table.droppable if name != head]
    return replace(table, headers=cut(table.headers), rows=rows, below=below, droppable=droppable)


def to_markdown(comparison: Comparison) -> str:
    """Return the whole comparison in Markdown."""
    names = short_model_names(comparison)
    parts = [f"# Comparison with {_escape_markdown(names[comparison.baseline])}"]
    parts.append("\n".join(f"- {_escape_markdown(line)}" for line in verdict_sentences(comparison)))
    if comparison.notes:
        parts.append("Notes:\n\n" + "\n".join(f"- {_escape_markdown(n)}" for n in comparison.notes))
    for table in (
        verdict_table(comparison),
        *(task_table(comparison, t) for t in comparison.tasks),
    ):
        parts.append(f"## {_escape_markdown(table.title)}\n\n{_markdown_table(table)}")
        parts.append(_escape_markdown(table.caption))
    return "\n\n".join(parts) + "\n"


def to_latex(comparison: Comparison) -> str:
    """Return the tables in LaTeX (package booktabs); tables larger than a page are split."""
    tables = [verdict_table(comparison)]
    for task in comparison.tasks:
        groups = _group_models(comparison, task)
        parts = [task_table(comparison, task, group) for group in groups]
        tables += [_number_part(part, k, len(parts)) for k, part in enumerate(parts, start=1)]
    shown = [_latex_table(part) for table in tables for part in _split_rows(table)]
    # LaTeX fails if too many floats wait for later pages.
    runs = ["\n".join(shown[k : k + LATEX_FLOATS]) for k in range(0, len(shown), LATEX_FLOATS)]
    return "% \\usepackage{booktabs}\n" + "\\clearpage\n".join(runs)


def _group_models(comparison: Comparison, task: TaskComparison) -> list[list[str]]:
    """Return groups of models that fit side by side on a page."""
    groups: list[list[str]] = [[]]
    for model in task.models:
        group = [*groups[-1], model]
        if groups[-1] and _width(task_table(comparison, task, group)) > LATEX_CHARACTERS:
            groups.append([model])
        else:
            groups[-1] = group
    return groups


def _width(table: ResultTable) -> int:
    """Return the width of a table in characters, two for the space after each column."""
    columns = zip(table.headers, *table.rows, *table.below, strict=True)
    return sum(max(map(len, column)) + 2 for column in columns)


def _split_rows(table: ResultTable) -> list[ResultTable]:
    """Split a table that is longer than a page; the rows of `below` end the last part."""
    starts = range(0, max(1, len(table.rows)), LATEX_ROWS)
    parts = [
        replace(
            table, rows=table.rows[k : k + LATEX_ROWS], below=() if k < starts[-1] else table.below
        )
        for k in starts
    ]
    return [_number_part(part, k, len(parts), "page") for k, part in enumerate(parts, start=1)]


def _number_part(table: ResultTable, number: int, n_parts: int, word: str = "part") -> ResultTable:
    if n_parts == 1:
        return table
    return replace(table, title=f"{table.title}, {word} {number} of {n_parts}")


def to_csv(comparison: Comparison) -> str:
    """Return every difference with all its numbers as CSV, one line each."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["task", "metric", "higher_is_better", "model", "baseline", *_FIELDS])
    for task in comparison.tasks:
        for model, each in task.models.items():
            found = [each.overall, *each.languages.values(), *filter(None, [each.gap])]
            for c in found:
                start = [task.task, task.metric, task.higher_is_better, model, comparison.baseline]
                cells = [*start, *(read(c) for read in _FIELDS.values())]
                writer.writerow(map(_format_cell, cells))
    return stream.getvalue()


_FIELDS: dict[str, Callable[[Difference], object]] = {
    "scope": lambda c: c.scope,
    "name": lambda c: c.name,
    "baseline_mean": lambda c: c.baseline.mean,
    "baseline_sd": lambda c: c.baseline.deviation,
    "model_mean": lambda c: c.model.mean,
    "model_sd": lambda c: c.model.deviation,
    "difference": lambda c: c.difference,
    "low": lambda c: c.low,
    "high": lambda c: c.high,
    "item_low": lambda c: c.item_low,
    "item_high": lambda c: c.item_high,
    "p": lambda c: c.p,
    "p_adjusted": lambda c: c.p_adjusted,
    "p_seeds": lambda c: c.p_seeds,
    "p_sign_flips": lambda c: c.p_flips,
    "p_items": lambda c: c.p_items,
    "hedges_g": lambda c: c.hedges_g,
    "one_sd_rule": lambda c: c.rule,
    "n_seeds": lambda c: c.n_seeds,
    "paired": lambda c: c.paired,
    "n_items": lambda c: c.n_items,
    "n_tests": lambda c: c.n_tests,
    "seeds_needed": lambda c: c.seeds_needed,
    "verdict": verdict_name,
}


def _format_cell(value: object) -> str:
    """Return a value for CSV; spreadsheet programs must not execute a name as a formula."""
    if isinstance(value, str):
        return f"'{value}" if value.startswith(FORMULA_STARTS) else value
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None else str(value).lower()


def _markdown_table(table: ResultTable) -> str:
    rule = ["---" if place < table.n_words else "---:" for place in range(len(table.headers))]
    below = [[f"**{_escape_markdown(cell)}**" for cell in row] for row in table.below]
    plain = [[_escape_markdown(cell) for cell in row] for row in (table.headers, *table.rows)]
    lines = [plain[0], rule, *plain[1:], *below]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _latex_table(table: ResultTable) -> str:
    def line(row: Sequence[str]) -> str:
        return " & ".join(_escape_latex(cell) for cell in row) + r" \\"

    columns = "l" * table.n_words + "r" * (len(table.headers) - table.n_words)
    middle = [r"\midrule", *map(line, table.below)] if table.below else []
    return "\n".join(
        [
            r"\begin{table}",
            r"\footnotesize\setlength{\tabcolsep}{3pt}",
            rf"\caption{{{_escape_latex(f'{table.title}: {table.caption}')}}}",
            # A box of the text width lets a wider table extend evenly on both sides.
            rf"\makebox[\linewidth][c]{{\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            line(table.headers),
            r"\midrule",
            *map(line, table.rows),
            *middle,
            r"\bottomrule",
            r"\end{tabular}}",
            r"\end{table}",
            "",
        ]
    )


def _escape_markdown(text: str) -> str:
    return re.sub(r"([\\`*_\[\]<>|#&~$])", r"\\\1", " ".join(text.split()))


def _escape_latex(text: str) -> str:
    return "".join(LATEX.get(letter, letter) for letter in " ".join(text.split()))
