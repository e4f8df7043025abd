"""`calque compare`: did it help, where, and is it more than noise?"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from calque.types import InputError

if TYPE_CHECKING:
    from calque.report.results import Results
    from calque.report.study import Judging, Study
    from calque.report.tables import Table

SUFFIXES = (".html", ".md", ".tex", ".csv")
FEWEST_RESAMPLES = 100
FILE_WIDTH, WIDEST = 160, 10_000


def compare(
    results: Annotated[
        list[Path],
        typer.Argument(metavar="RESULTS…", help="Folders that `calque evaluate -o` wrote."),
    ],
    baseline: Annotated[str, typer.Option(metavar="NAME", help="The model to compare with.")],
    models: Annotated[
        str | None, typer.Option(help="Names, separated by commas; by default all others.")
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(help="Names, separated by commas; by default all there are.")
    ] = None,
    correction: Annotated[
        str, typer.Option(help="For many comparisons: holm, bh (Benjamini-Hochberg) or none.")
    ] = "holm",
    output: Annotated[
        list[Path] | None,
        typer.Option("--output", "-o", metavar="FILE", help=".html, .md, .tex or .csv; repeat it."),
    ] = None,
    alpha: Annotated[float, typer.Option(help="The level of tests; intervals have 1 - alpha.")] = (
        0.05
    ),
    bootstrap: Annotated[int, typer.Option(help="How often test items are resampled.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Where resampling starts.")] = 0,
    brief: Annotated[
        bool, typer.Option("--brief", help="Show the verdicts, no tables by language.")
    ] = False,
) -> None:
    """Say whether models do better than a baseline, or it is noise.

    A model helps or hurts only where the difference stands out from seeds, from test items, and
    from both together, after correction for the number of comparisons. All else is noise, or
    cannot be told.
    """
    from calque.report.results import read_results
    from calque.report.statistics import CORRECTIONS, check_scipy
    from calque.report.study import Judging

    if correction not in CORRECTIONS:
        fix = f"choose from: {', '.join(CORRECTIONS)}"
        raise InputError(f"no correction is called {correction!r}", fix=fix)
    if not 0 < alpha < 0.5:
        raise InputError(f"--alpha {alpha:g} is no level", fix="give one between 0 and 0.5")
    if bootstrap < FEWEST_RESAMPLES:
        fix = f"give {FEWEST_RESAMPLES} or more"
        raise InputError(f"--bootstrap {bootstrap} is too few to tell anything", fix=fix)
    if seed < 0:
        raise InputError(f"--seed {seed} is below 0", fix="give 0 or more")
    check_scipy()
    outputs = list(dict.fromkeys(output or []))
    _check_outputs(outputs)
    judging = Judging(alpha, correction, bootstrap, seed)
    found = read_results(results)
    study = _make_study(found, baseline, _split(models), _split(tasks), judging)
    _show(study, by_language=not brief)
    _write(study, outputs)


def _make_study(
    results: Results,
    baseline: str,
    models: Sequence[str] | None,
    tasks: Sequence[str] | None,
    judging: Judging,
) -> Study:
    from calque.cli.progress import show_progress
    from calque.report.study import make_study

    with show_progress("comparing", len(tasks or results.tasks)) as advance:
        return make_study(
            results,
            baseline,
            models=models,
            tasks=tasks,
            judging=judging,
            on_progress=lambda done, total: advance(1),
        )


def _show(study: Study, *, by_language: bool) -> None:
    from rich.console import Console

    from calque.report.tables import (
        drop_column,
        list_sentences,
        tabulate_task,
        tabulate_verdicts,
        to_rich,
    )

    console = Console()
    if not console.is_terminal:
        console.width = FILE_WIDTH

    def is_wide(table: Table) -> bool:
        free = console.options.update(width=WIDEST)
        return console.measure(to_rich(table), options=free).maximum > console.width

    for note in study.notes:
        print(f"calque: mind: {note}", file=sys.stderr)
    for task in study.tasks if by_language else ():
        tables = [tabulate_task(study, task)]
        if is_wide(tables[0]):
            tables = [tabulate_task(study, task, [model]) for model in task.models]
        console.print(*map(to_rich, tables))
    verdicts = tabulate_verdicts(study)
    while is_wide(verdicts) and verdicts.spare:
        verdicts = drop_column(verdicts, verdicts.spare[0])
    console.print(to_rich(verdicts))
    for line in list_sentences(study):
        print(line)


def _write(study: Study, outputs: Sequence[Path]) -> None:
    """Make all files before the first is written."""
    from calque.report.page import make_page
    from calque.report.tables import to_csv, to_latex, to_markdown
    from calque.text.files import write_atomically

    makers: dict[str, Callable[[Study], str]] = dict(
        zip(SUFFIXES, (make_page, to_markdown, to_latex, to_csv), strict=True)
    )
    texts = {path: makers[path.suffix](study) for path in outputs}
    for path, text in texts.items():
        with write_atomically(path) as stream:
            stream.write(text)
    if texts:
        n = sum(len(task.models) for task in study.tasks)
        print(f"{', '.join(map(str, texts))}: {n} verdicts", file=sys.stderr)


def _check_outputs(paths: Sequence[Path]) -> None:
    for path in paths:
        if path.suffix not in SUFFIXES:
            fix = f"name it {path.stem or 'report'}.html, .md, .tex or .csv"
            raise InputError(f"no comparison is written as {path.suffix!r}", file=path, fix=fix)
        if not path.parent.is_dir():
            raise InputError("its folder does not exist", file=path, fix=f"mkdir -p {path.parent}")


def _split(names: str | None) -> list[str] | None:
    if names is None:
        return None
    found = [name.strip() for name in names.split(",") if name.strip()]
    if not found:
        raise InputError("no name was given", fix="separate names by commas, or leave it out")
    return found
