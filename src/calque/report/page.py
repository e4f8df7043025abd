"""A comparison as one self-contained HTML page: no script, no font, no network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from importlib import resources

from calque.report.comparison import Comparison, TaskComparison
from calque.report.difference import Difference
from calque.report.plots import (
    COLORS,
    IntervalMark,
    check_matplotlib,
    page_style,
    plot_differences,
    plot_layers,
    plot_seeds,
    to_svg,
)
from calque.report.tables import (
    ResultTable,
    describe_method,
    language_difference,
    short_model_names,
    task_table,
    verdict_table,
)
from calque.report.verdict import summarize_verdicts, verdict_name, verdict_sentence

STYLES = ("base.css", "page.css")
METHOD = (
    "A verdict requires three things at once: the difference is significant over seeds (t-test,"
    " paired by seed where seeds are shared), over test items (contribution of each item to the"
    " difference; for accuracies McNemar's test), and over both together (min F′, Clark 1973). The"
    " largest of the three p-values counts, corrected for the number of comparisons; marks by"
    " language are corrected over all languages and tasks. Intervals combine both errors. If seeds"
    " do not matter, only items are tested; if items are unknown, only seeds.",
    "The rule of one standard deviation (Wu and Dredze, 2020) asks whether a mean is farther from"
    " the baseline's mean than the standard deviation of the baseline over seeds. It ignores how"
    " many comparisons are made and is shown for reference only.",
    "The transfer gap is the score in the source language minus the mean of the other languages."
    " A gap may also narrow because the source language got worse.",
    "Seeds needed: the number of seeds with which a true difference of the observed size would be"
    " detected in four of five studies. The observed difference is uncertain, so this is an order"
    " of magnitude.",
)


def build_page(comparison: Comparison) -> str:
    """Return the page as HTML text."""
    check_matplotlib()
    title = f"Comparison with {short_model_names(comparison)[comparison.baseline]}"
    folder = resources.files("calque.report")
    style = "".join(folder.joinpath(name).read_text("utf-8") for name in STYLES)
    links = "".join(
        f'<li><a href="#task-{number}">{escape(task.task)}</a></li>'
        for number, task in enumerate(comparison.tasks)
    )
    with page_style():
        tasks = [_show_task(comparison, task, k) for k, task in enumerate(comparison.tasks)]
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>",
        f"<style>\n{style}</style></head><body>",
        f"<header><h1>{escape(title)}</h1>",
        f'<p class="soft">{escape(describe_method(comparison))}</p>',
        f'<nav aria-label="tasks"><ul>{links}</ul></nav></header><main>',
        _list_verdicts(comparison),
        _list_notes(comparison.notes),
        _html_table(verdict_table(comparison)),
        *tasks,
        "<section><h2>How verdicts are reached</h2>",
        *(f"<p>{escape(text)}</p>" for text in METHOD),
        "</section></main></body></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _list_verdicts(comparison: Comparison) -> str:
    """Return all verdicts, one sentence per model and task."""
    names, settings, parts = short_model_names(comparison), comparison.settings, []
    for model in comparison.models:
        cells = [task.models[model] for task in comparison.tasks if model in task.models]
        if not cells:
            continue
        summary = summarize_verdicts([cell.overall for cell in cells], names[model])
        parts.append(f"<h3>{escape(summary)}</h3>")
        lines = []
        for each in [cell.overall for cell in cells] + [cell.gap for cell in cells if cell.gap]:
            text = verdict_sentence(
                each, names[model], alpha=settings.alpha, correction=settings.correction
            )
            start, _, rest = text.rpartition(f": {verdict_name(each)}")
            word = f": <b>{escape(verdict_name(each))}</b>" if start else ""
            shown = f"{escape(start)}{word}{escape(rest)}"
            lines.append(f'<li class="{each.category.replace(" ", "-")}">{shown}</li>')
        parts.append(f'<ul class="verdicts">{"".join(lines)}</ul>')
    return "<section><h2>Verdicts</h2>" + "".join(parts) + "</section>"


def _list_notes(notes: Sequence[str]) -> str:
    if not notes:
        return ""
    lines = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<section class="notes"><h3>Notes</h3><ul>{lines}</ul></section>'


@dataclass(frozen=True, slots=True)
class TaskPlot:
    """A plot of a task as SVG, with its heading and caption; `kind` is a short name."""

    kind: str
    title: str
    caption: str
    svg: str


def _show_task(comparison: Comparison, task: TaskComparison, number: int) -> str:
    """Return the section of a task: table, differences by language, seeds and layers."""
    names = short_model_names(comparison)
    numbers = _number_models(comparison)
    compared = {names[model]: numbers[names[model]] for model in task.models}
    parts = [f'<section id="task-{number}"><h2>{escape(task.task)}</h2>']
    parts.append(_html_table(task_table(comparison, task)))
    for plot in plot_task(comparison, task):
        legend = _legend(compared) if plot.kind == "differences" else ""
        parts += [f"<h3>{plot.title}</h3>", legend, _figure(plot.svg, plot.caption)]
    return "\n".join([*filter(None, parts), "</section>"])


def plot_task(comparison: Comparison, task: TaskComparison) -> list[TaskPlot]:
    """Draw a task: differences by language, and scores by seed and by layer if there are any.

    Colors are those of `page_style`, which the caller sets.
    """
    names, numbers = short_model_names(comparison), _number_models(comparison)
    compared = {names[model]: numbers[names[model]] for model in task.models}
    label = f"{task.metric}: points compared with {names[comparison.baseline]}"
    better = "right" if task.higher_is_better else "left"
    caption = (
        f"Differences with their intervals; better is to the {better}. Filled marks are significant"
        " after correction, empty marks are within noise."
    )
    figure = plot_differences(_intervals(comparison, task), compared, label=label)
    plots = [TaskPlot("differences", "By language", caption, to_svg(figure, label))]
    seeds = _mean_by_seed(comparison, task)
    label = f"{task.metric} (%)"
    if any(len(by_seed) > 1 for by_seed in seeds.values()):
        caption = "Mean over the languages of each run; lines join runs with the same seed."
        svg = to_svg(plot_seeds(seeds, numbers, label=label), f"{label} by seed")
        plots.append(TaskPlot("seeds", "By seed", caption, svg))
    if task.layers:
        lines = {names[model]: line for model, line in task.layers.items()}
        svg = to_svg(plot_layers({"": lines}, label=label), f"{label} by layer")
        plots.append(TaskPlot("layers", "By layer", "Mean over languages and seeds.", svg))
    return plots


def _number_models(comparison: Comparison) -> dict[str, int]:
    """Return the number of every model by its short name, which decides its color."""
    names = short_model_names(comparison)
    return {names[model]: k for k, model in enumerate([comparison.baseline, *comparison.models])}


def _intervals(comparison: Comparison, task: TaskComparison) -> dict[str, dict[str, IntervalMark]]:
    """Return the intervals of all models by language, and of their mean."""
    names = short_model_names(comparison)

    def collect(find: Callable[[str], Difference | None]) -> dict[str, IntervalMark]:
        found = {names[model]: find(model) for model in task.models}
        return {
            name: IntervalMark(c.difference, c.low, c.high, c.category in ("helps", "hurts"))
            for name, c in found.items()
            if c is not None
        }

    rows = {name: collect(partial(language_difference, task, name)) for name in task.languages}
    rows = {language: row for language, row in rows.items() if row}
    return {**rows, "mean": collect(lambda model: task.models[model].overall)}


def _mean_by_seed(comparison: Comparison, task: TaskComparison) -> dict[str, dict[str, float]]:
    """Return the mean over the languages that all runs have, by model and seed."""
    names, runs = short_model_names(comparison), []
    for by_language in task.scores.values():
        seeds = {seed for by_seed in by_language.values() for seed in by_seed}
        runs += [{name for name, by in by_language.items() if seed in by} for seed in seeds]
    shared = sorted(set.intersection(*runs))
    averages: dict[str, dict[str, float]] = {}
    for model, by_language in task.scores.items():
        for seed in by_language[shared[0]] if shared else ():
            total = sum(by_language[name][seed] for name in shared)
            label = "no seed" if seed is None else f"seed {seed}"
            averages.setdefault(names[model], {})[label] = total / len(shared)
    return averages


def _legend(numbers: Mapping[str, int]) -> str:
    entries = [
        f'<li><span style="color: {COLORS[number % len(COLORS)]}">●</span> {escape(name)}</li>'
        for name, number in numbers.items()
    ]
    return f'<ul class="legend">{"".join(entries)}</ul>'


def _figure(svg: str, caption: str) -> str:
    caption = f"<figcaption>{escape(caption)}</figcaption>"
    return f'<figure><div class="wide">{svg}</div>{caption}</figure>'


def _html_table(table: ResultTable) -> str:
    """Return a table in HTML; verdicts are colored and written out."""

    def line(row: Sequence[str], kind: str = "") -> str:
        cells = [
            f'<th scope="row" class="word">{escape(cell)}</th>'
            if column == 0
            else f'<td class="word">{escape(cell)}</td>'
            if column < table.n_words
            else f"<td{_verdict_class(cell)}>{escape(cell)}</td>"
            for column, cell in enumerate(row)
        ]
        return f"<tr{kind}>{''.join(cells)}</tr>"

    headers = [
        f'<th scope="col"{" class=word" if column < table.n_words else ""}>{escape(header)}</th>'
        for column, header in enumerate(table.headers)
    ]
    below = [
        line(row, f' class="below{"" if number else " first"}"')
        for number, row in enumerate(table.below)
    ]
    body = "".join([*map(line, table.rows), *below])
    return (
        f'<div class="wide"><table><caption>{escape(table.caption)}</caption>'
        f"<thead><tr>{''.join(headers)}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _verdict_class(cell: str) -> str:
    for kind, signs in {"helps": ("helps", "▲"), "hurts": ("hurts", "▼")}.items():
        if cell.endswith(signs):
            return f' class="{kind}"'
    return ""
