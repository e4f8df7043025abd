"""Comparisons as tables: for a terminal, in Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from calque.report.comparison import Comparison
from calque.report.plots import shorten_names
from calque.report.statistics import Spread
from calque.report.study import Study, TaskStudy
from calque.report.verdict import (
    CORRECTION_NAMES,
    count_verdicts,
    name_category,
    say,
    show_difference,
    show_p,
    sign,
)

if TYPE_CHECKING:
    from rich.table import Table as RichTable


# What a page of LaTeX has room for: letters beside each other (360 points in small type), lines
# below each other, and tables that wait for a later page.
LATEX_LETTERS, LATEX_ROWS, LATEX_FLOATS = 100, 45, 10
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
    """Cells of text under headings; the first columns are words, the rest numbers.

    Lines in `below` come after a rule: means and gaps. Where there is no room, `spare` columns
    go first.
    """

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    below: Sequence[Sequence[str]] = ()
    n_words: int = 1
    caption: str = ""
    spare: Sequence[str] = ()


def tabulate_verdicts(study: Study) -> ResultTable:
    """Tell in a line for each task and model how it did, and what is to be made of it."""
    names = name_models(study)
    percent = f"{100 * (1 - study.judging.alpha):g} %"
    heads = ["task", "model", names[study.baseline], "score", f"difference [{percent}]"]
    rows = []
    for task in study.tasks:
        for model, each in task.models.items():
            c = each.overall
            p = "–" if c.p_adjusted is None else show_p(c.p_adjusted).removeprefix("= ")
            cells = [show_spread(c.baseline), show_spread(c.model), show_difference(c), p]
            rule = [RULES[c.rule], name_category(c)]
            name = task.task + ("" if task.higher_is_better else " ↓")
            rows.append([name, names[model], *cells, *rule])
    return ResultTable(
        f"against {names[study.baseline]}",
        [*heads, "p", "1 sd rule", "verdict"],
        rows,
        n_words=2,
        caption=explain_judging(study),
        spare=("1 sd rule", names[study.baseline], "score"),
    )


def tabulate_task(
    study: Study, task: TaskStudy, models: Sequence[str] | None = None
) -> ResultTable:
    """Show a task by language: every model, or some, and its difference to the baseline."""
    names, others = name_models(study), list(task.models if models is None else models)
    heads = ["language", names[study.baseline]]
    for model in others:
        heads += [names[model], "difference"]

    def line(name: str, find: Callable[[str], Comparison | None]) -> list[str]:
        found = {model: find(model) for model in others}
        first = next((each.baseline for each in found.values() if each is not None), None)
        cells = [name, "–" if first is None else show_spread(first)]
        for c in found.values():
            if c is None:
                cells += ["–", "–"]
            else:
                mark = MARKS.get(c.category, "")
                cells += [show_spread(c.model), f"{show_difference(c)} {mark}".rstrip()]
        return cells

    languages = [
        name for name in task.languages if any(name in task.models[m].languages for m in others)
    ]
    rows = [line(name, partial(find_language, task, name)) for name in languages]
    below = [line("mean", lambda model: task.models[model].overall)]
    if any(task.models[model].gap is not None for model in others):
        below.append(line(f"gap to {task.source}", lambda model: task.models[model].gap))
    caption = f"{task.metric} (%), {'higher' if task.higher_is_better else 'lower'} is better"
    return ResultTable(task.task, heads, rows, below, caption=caption)


def find_language(task: TaskStudy, language: str, model: str) -> Comparison | None:
    """Look up a model's comparison in a language, if it has one."""
    return task.models[model].languages.get(language)


def list_sentences(study: Study) -> list[str]:
    """Say every verdict in a sentence: a model's tasks, its gaps, then how often it helped."""
    names, judging = name_models(study), study.judging
    lines = []
    for model in study.models:
        cells = [task.models[model] for task in study.tasks if model in task.models]
        found = [cell.overall for cell in cells] + [cell.gap for cell in cells if cell.gap]
        lines += [
            say(each, names[model], alpha=judging.alpha, correction=judging.correction)
            for each in found
        ]
        if cells:
            lines.append(count_verdicts([cell.overall for cell in cells], names[model]))
    return lines


def explain_judging(study: Study) -> str:
    """Say how verdicts were reached."""
    judging = study.judging
    worse = any(not task.higher_is_better for task in study.tasks)
    return (
        "mean ± sample standard deviation over seeds; p over seeds and test items,"
        f" {CORRECTION_NAMES[judging.correction]} over {study_size(study)};"
        f" level {judging.alpha:g}; {judging.n_resamples:,} resamples"
        + ("; ↓ lower is better" if worse else "")
    )


def study_size(study: Study) -> str:
    """Count the comparisons of the headline family."""
    n = sum(len(task.models) for task in study.tasks)
    return f"{n} comparison" + ("" if n == 1 else "s")


def name_models(study: Study) -> Mapping[str, str]:
    """Name the models shortly."""
    return shorten_names([study.baseline, *study.models])


def show_spread(spread: Spread) -> str:
    """Show a mean with its deviation, where seeds have one.

    >>> show_spread(Spread(70.12, 0.81, 5)), show_spread(Spread(70.12, None, 1))
    ('70.1 ± 0.8', '70.1')
    """
    mean = sign(spread.mean, plus=False)
    return mean if spread.fixed or spread.deviation is None else f"{mean} ± {spread.deviation:.1f}"


def to_rich(table: ResultTable) -> RichTable:
    """Make a table for a terminal; no name is taken for markup."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    made = RichTable(
        title=Text(table.title), caption=Text(table.caption), box=box.SIMPLE_HEAD, pad_edge=False
    )
    for place, head in enumerate(table.heads):
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


def drop_column(table: ResultTable, head: str) -> ResultTable:
    """Give the table without a column."""
    place = list(table.heads).index(head, table.n_words)

    def cut(row: Sequence[str]) -> list[str]:
        return [cell for number, cell in enumerate(row) if number != place]

    rows, below = [cut(row) for row in table.rows], [cut(row) for row in table.below]
    spare = [name for name in table.spare if name != head]
    return replace(table, heads=cut(table.heads), rows=rows, below=below, spare=spare)


def to_markdown(study: Study) -> str:
    """Write the whole comparison in Markdown."""
    names = name_models(study)
    parts = [f"# Comparison with {_escape_markdown(names[study.baseline])}"]
    parts.append("\n".join(f"- {_escape_markdown(line)}" for line in list_sentences(study)))
    if study.notes:
        parts.append("Mind:\n\n" + "\n".join(f"- {_escape_markdown(n)}" for n in study.notes))
    for table in (tabulate_verdicts(study), *(tabulate_task(study, t) for t in study.tasks)):
        parts.append(f"## {_escape_markdown(table.title)}\n\n{_lay_out_markdown(table)}")
        parts.append(_escape_markdown(table.caption))
    return "\n\n".join(parts) + "\n"


def to_latex(study: Study) -> str:
    """Write the tables in LaTeX, for the package booktabs; what is too much for a page in parts."""
    tables = [tabulate_verdicts(study)]
    for task in study.tasks:
        groups = _group_models(study, task)
        parts = [tabulate_task(study, task, group) for group in groups]
        tables += [_name_part(part, k, len(parts)) for k, part in enumerate(parts, start=1)]
    shown = [_lay_out_latex(part) for table in tables for part in _cut_rows(table)]
    # LaTeX gives up where it has to keep too many floats for later pages.
    runs = ["\n".join(shown[k : k + LATEX_FLOATS]) for k in range(0, len(shown), LATEX_FLOATS)]
    return "% \\usepackage{booktabs}\n" + "\\clearpage\n".join(runs)


def _group_models(study: Study, task: TaskStudy) -> list[list[str]]:
    """Put as many models beside each other as a page has room for."""
    groups: list[list[str]] = [[]]
    for model in task.models:
        group = [*groups[-1], model]
        if groups[-1] and _measure(tabulate_task(study, task, group)) > LATEX_LETTERS:
            groups.append([model])
        else:
            groups[-1] = group
    return groups


def _measure(table: ResultTable) -> int:
    """Count the letters of a table's widest lines, two for the space after a column."""
    columns = zip(table.heads, *table.rows, *table.below, strict=True)
    return sum(max(map(len, column)) + 2 for column in columns)


def _cut_rows(table: ResultTable) -> list[ResultTable]:
    """Cut a table that is longer than a page; what stands below the rows ends the last part."""
    starts = range(0, max(1, len(table.rows)), LATEX_ROWS)
    parts = [
        replace(
            table, rows=table.rows[k : k + LATEX_ROWS], below=() if k < starts[-1] else table.below
        )
        for k in starts
    ]
    return [_name_part(part, k, len(parts), "page") for k, part in enumerate(parts, start=1)]


def _name_part(table: ResultTable, number: int, n_parts: int, word: str = "part") -> ResultTable:
    if n_parts == 1:
        return table
    return replace(table, title=f"{table.title}, {word} {number} of {n_parts}")


def to_csv(study: Study) -> str:
    """Write every comparison with all its numbers, a line each."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["task", "metric", "higher_is_better", "model", "baseline", *_FIELDS])
    for task in study.tasks:
        for model, each in task.models.items():
            found = [each.overall, *each.languages.values(), *filter(None, [each.gap])]
            for c in found:
                start = [task.task, task.metric, str(task.higher_is_better).lower()]
                cells = [_show_raw(read(c)) for read in _FIELDS.values()]
                writer.writerow([*start, model, study.baseline, *cells])
    return stream.getvalue()


_FIELDS: dict[str, Callable[[Comparison], object]] = {
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
    "paired": lambda c: str(c.paired).lower(),
    "n_items": lambda c: c.n_items,
    "n_tests": lambda c: c.n_tests,
    "seeds_needed": lambda c: c.seeds_needed,
    "verdict": name_category,
}


def _show_raw(value: object) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _lay_out_markdown(table: ResultTable) -> str:
    rule = ["---" if place < table.n_words else "---:" for place in range(len(table.heads))]
    below = [[f"**{_escape_markdown(cell)}**" for cell in row] for row in table.below]
    plain = [[_escape_markdown(cell) for cell in row] for row in (table.heads, *table.rows)]
    lines = [plain[0], rule, *plain[1:], *below]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _lay_out_latex(table: ResultTable) -> str:
    def line(row: Sequence[str]) -> str:
        return " & ".join(_escape_latex(cell) for cell in row) + r" \\"

    columns = "l" * table.n_words + "r" * (len(table.heads) - table.n_words)
    middle = [r"\midrule", *map(line, table.below)] if table.below else []
    return "\n".join(
        [
            r"\begin{table}",
            r"\footnotesize\setlength{\tabcolsep}{3pt}",
            rf"\caption{{{_escape_latex(f'{table.title}: {table.caption}')}}}",
            # In a box of the text's width, what is a little wider sticks out on both sides alike.
            rf"\makebox[\linewidth][c]{{\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            line(table.heads),
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
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", " ".join(text.split()))


def _escape_latex(text: str) -> str:
    return "".join(LATEX.get(letter, letter) for letter in " ".join(text.split()))
