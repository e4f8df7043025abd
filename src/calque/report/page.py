"""A comparison as one HTML page that needs nothing else: no script, no font, no network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from html import escape
from importlib import resources

from calque.report.comparison import Comparison
from calque.report.study import Study, TaskStudy
from calque.report.svg import Interval, draw_intervals, draw_layers, draw_mark, draw_seeds
from calque.report.tables import (
    ResultTable,
    explain_judging,
    find_language,
    name_models,
    show_spread,
    tabulate_task,
    tabulate_verdicts,
)
from calque.report.verdict import count_verdicts, name_category, say, show_difference, show_p, sign

# What readers must know to believe a verdict or not; the documentation says it at length.
HOW = (
    "A verdict needs three things at once: the difference stands out from how much seeds differ"
    " (t-test, paired by seed where seeds are shared), from how much test items differ (each"
    " item's share of the difference; for accuracies McNemar's test), and from both together"
    " (min F′, Clark 1973). The largest of the three p counts, corrected for the number of"
    " comparisons; by-language marks are corrected over all languages and tasks. Intervals take"
    " both errors together. Where no seed matters, items alone decide, and where items are"
    " unknown, seeds alone.",
    "The rule of one standard deviation is Wu and Dredze's (2020): a mean farther from the"
    " baseline's than one standard deviation of the baseline over seeds. It knows nothing of how"
    " many comparisons are made and is shown for reference.",
    "The transfer gap is the score in the source language minus the mean of the others. A gap may"
    " also narrow because the source got worse.",
    "Seeds needed: with so many, a true difference as large as the one seen would be found in"
    " four of five studies. The difference seen is itself uncertain: take it as a plan's order"
    " of magnitude.",
)


def make_page(study: Study) -> str:
    """Write the page."""
    names = name_models(study)
    title = f"Comparison with {names[study.baseline]}"
    style = resources.files("calque.report").joinpath("page.css").read_text("utf-8")
    links = "".join(
        f'<li><a href="#task-{place}">{escape(task.task)}</a></li>'
        for place, task in enumerate(study.tasks)
    )
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>",
        f"<style>\n{style}</style></head><body>",
        f"<header><h1>{escape(title)}</h1>",
        f'<p class="soft">{escape(explain_judging(study))}</p>',
        f'<nav aria-label="tasks"><ul>{links}</ul></nav></header><main>',
        _list_verdicts(study),
        _list_notes(study.notes),
        _lay_out(tabulate_verdicts(study)),
        *(_show_task(study, task, place) for place, task in enumerate(study.tasks)),
        "<section><h2>How it was judged</h2>",
        *(f"<p>{escape(text)}</p>" for text in HOW),
        "</section></main></body></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _list_verdicts(study: Study) -> str:
    """List what is to be made of it, a sentence a task."""
    names, judging, parts = name_models(study), study.judging, []
    for model in study.models:
        cells = [task.models[model] for task in study.tasks if model in task.models]
        if not cells:
            continue
        summary = count_verdicts([cell.overall for cell in cells], names[model])
        parts.append(f"<h3>{escape(summary)}</h3>")
        found = [cell.overall for cell in cells] + [cell.gap for cell in cells if cell.gap]
        lines = []
        for each in found:
            text = say(each, names[model], alpha=judging.alpha, correction=judging.correction)
            start, _, rest = text.rpartition(f": {name_category(each)}")
            word = f": <b>{escape(name_category(each))}</b>" if start else ""
            shown = f"{escape(start)}{word}{escape(rest)}"
            lines.append(f'<li class="{each.category.replace(" ", "-")}">{shown}</li>')
        parts.append(f'<ul class="verdicts">{"".join(lines)}</ul>')
    return "<section><h2>Verdicts</h2>" + "".join(parts) + "</section>"


def _list_notes(notes: Sequence[str]) -> str:
    if not notes:
        return ""
    lines = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<section class="mind"><h3>Mind</h3><ul>{lines}</ul></section>'


def _show_task(study: Study, task: TaskStudy, place: int) -> str:
    """Show a task: by language, by seed, by layer."""
    names = name_models(study)
    places = {names[model]: place for place, model in enumerate([study.baseline, *study.models])}
    compared = {names[model]: places[names[model]] for model in task.models}
    parts = [f'<section id="task-{place}"><h2>{escape(task.task)}</h2>']
    parts.append(_lay_out(tabulate_task(study, task)))
    parts.append("<h3>By language</h3>")
    parts.append(_make_legend(compared))
    unit = f"{task.metric}: points against {names[study.baseline]}"
    better = "right" if task.higher_is_better else "left"
    caption = (
        f"Differences with their intervals; better is to the {better}. A filled mark is a verdict"
        " after correction, an empty one is within noise."
    )
    parts.append(_frame(draw_intervals(_collect(study, task), compared, label=unit), caption))
    seeds = _average_seeds(study, task)
    if any(len(by_seed) > 1 for by_seed in seeds.values()):
        parts.append("<h3>By seed</h3>")
        caption = "Mean of the languages of each run; lines join runs with the same seed."
        parts.append(_frame(draw_seeds(seeds, places, label=f"{task.metric} (%)"), caption))
    if task.layers:
        parts.append("<h3>By layer</h3>")
        lines = {names[model]: line for model, line in task.layers.items()}
        parts.append(_make_legend({name: places[name] for name in lines}))
        caption = "Mean of languages and seeds."
        parts.append(_frame(draw_layers(lines, places, label=f"{task.metric} (%)"), caption))
    return "\n".join([*parts, "</section>"])


def _collect(study: Study, task: TaskStudy) -> dict[str, dict[str, Interval]]:
    """Gather the differences of all models by language, then their mean."""
    names = name_models(study)

    def gather(find: Callable[[str], Comparison | None]) -> dict[str, Interval]:
        found = {names[model]: find(model) for model in task.models}
        return {name: _describe(c, name) for name, c in found.items() if c is not None}

    rows = {name: gather(partial(find_language, task, name)) for name in task.languages}
    rows = {language: row for language, row in rows.items() if row}
    return {**rows, "mean": gather(lambda model: task.models[model].overall)}


def _describe(c: Comparison, model: str) -> Interval:
    p = "" if c.p_adjusted is None else f", p {show_p(c.p_adjusted)}"
    spreads = f"{show_spread(c.model)} against {show_spread(c.baseline)}"
    title = f"{model}, {c.name}: {show_difference(c)} ({spreads}{p}): {name_category(c)}"
    if c.hedges_g is not None:
        title += f", Hedges' g {sign(c.hedges_g)}"
    return Interval(c.difference, c.low, c.high, title, sure=c.category in ("helps", "hurts"))


def _average_seeds(study: Study, task: TaskStudy) -> dict[str, dict[str, float]]:
    """Average the languages that every run of every model has, by model and seed."""
    names, runs = name_models(study), []
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


def _make_legend(places: Mapping[str, int]) -> str:
    marks = [
        f'<li><svg viewBox="0 0 14 14" aria-hidden="true">{draw_mark(7, 7, place)}</svg>'
        f"{escape(name)}</li>"
        for name, place in places.items()
    ]
    return f'<ul class="legend">{"".join(marks)}</ul>'


def _frame(picture: str, caption: str) -> str:
    caption = f"<figcaption>{escape(caption)}</figcaption>"
    return f'<figure><div class="wide">{picture}</div>{caption}</figure>'


def _lay_out(table: ResultTable) -> str:
    """Write a table in HTML; a verdict is colored, and said in words too."""

    def line(row: Sequence[str], kind: str = "") -> str:
        cells = [
            f'<th scope="row" class="word">{escape(cell)}</th>'
            if place == 0
            else f'<td class="word">{escape(cell)}</td>'
            if place < table.n_words
            else f"<td{_color(cell)}>{escape(cell)}</td>"
            for place, cell in enumerate(row)
        ]
        return f"<tr{kind}>{''.join(cells)}</tr>"

    heads = [
        f'<th scope="col"{" class=word" if place < table.n_words else ""}>{escape(head)}</th>'
        for place, head in enumerate(table.heads)
    ]
    below = [
        line(row, f' class="below{"" if place else " first"}"')
        for place, row in enumerate(table.below)
    ]
    body = "".join([*map(line, table.rows), *below])
    return (
        f'<div class="wide"><table><caption>{escape(table.caption)}</caption>'
        f"<thead><tr>{''.join(heads)}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _color(cell: str) -> str:
    for kind, signs in {"helps": ("helps", "▲"), "hurts": ("hurts", "▼")}.items():
        if cell.endswith(signs):
            return f' class="{kind}"'
    return ""
