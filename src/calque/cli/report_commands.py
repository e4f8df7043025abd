"""The command `calque compare`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from calque.cli.options import SeedOption, TasksOption
from calque.errors import InputError, printable

if TYPE_CHECKING:
    from calque.report.comparison import Comparison

FILE_WIDTH, MAX_WIDTH = 160, 10_000  # columns of a table in a file, and without a limit


def compare(
    results: Annotated[
        list[Path],
        typer.Argument(
            metavar="RESULTS...", help="Folders or .jsonl files written by calque evaluate -o."
        ),
    ],
    baseline: Annotated[
        str,
        typer.Option("--baseline", metavar="NAME", help="Model that the others are compared with."),
    ],
    models: Annotated[
        str | None,
        typer.Option(
            "--models", metavar="NAMES", help="Models, separated by commas. Default: all."
        ),
    ] = None,
    tasks: TasksOption = None,
    correction: Annotated[
        str,
        typer.Option(
            "--correction",
            metavar="NAME",
            help="Correction for many comparisons: holm, bh (Benjamini-Hochberg) or none.",
        ),
    ] = "holm",
    output: Annotated[
        list[Path] | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write the report: .html, .md, .tex or .csv. Can be repeated.",
        ),
    ] = None,
    alpha: Annotated[
        float,
        typer.Option("--alpha", metavar="X", help="Significance level of tests and intervals."),
    ] = 0.05,
    bootstrap: Annotated[
        int,
        typer.Option(
            "--bootstrap", metavar="N", help="Number of bootstrap resamples of the test items."
        ),
    ] = 10_000,
    seed: SeedOption = 0,
    brief: Annotated[
        bool, typer.Option("--brief", help="Show only the verdicts, no tables by language.")
    ] = False,
) -> None:
    """Decide whether differences from a baseline exceed noise.

    A model helps or hurts only if the difference is significant over seeds, over test items and
    over both together, after correction for the number of comparisons.

    \b
    calque evaluate calque-mini random:calque-mini --tasks pos,ner --seeds 5 --data DATA -o results
    calque compare results --baseline random:calque-mini -o report.html
    """  # noqa: D301
    from calque.cli.console import progress_bar
    from calque.report.compare import compare as compare_models

    with progress_bar() as progress:
        comparison = compare_models(
            results,
            baseline=baseline,
            models=_split(models),
            tasks=_split(tasks),
            correction=correction,  # type: ignore[arg-type]
            output=output or (),
            alpha=alpha,
            bootstrap=bootstrap,
            seed=seed,
            progress=progress,
        )
    _show(comparison, by_language=not brief)
    if output:
        n_verdicts = sum(len(task.models) for task in comparison.tasks)
        names = printable(", ".join(map(str, output)))
        print(f"{names}: {n_verdicts} verdicts", file=sys.stderr)


def _show(comparison: Comparison, *, by_language: bool) -> None:
    """Print notes, tables and verdicts; tables that are too wide lose columns or are split."""
    from rich.console import Console

    from calque.report.tables import (
        ResultTable,
        task_table,
        to_rich,
        verdict_sentences,
        verdict_table,
        without_column,
    )

    console = Console()
    if not console.is_terminal:
        console.width = FILE_WIDTH

    def is_too_wide(table: ResultTable) -> bool:
        free = console.options.update(width=MAX_WIDTH)
        return console.measure(to_rich(table), options=free).maximum > console.width

    for note in comparison.notes:
        print(f"calque: note: {note}", file=sys.stderr)
    for task in comparison.tasks if by_language else ():
        tables = [task_table(comparison, task)]
        if is_too_wide(tables[0]):
            tables = [task_table(comparison, task, [model]) for model in task.models]
        console.print(*map(to_rich, tables))
    verdicts = verdict_table(comparison)
    while is_too_wide(verdicts) and verdicts.droppable:
        verdicts = without_column(verdicts, verdicts.droppable[0])
    console.print(to_rich(verdicts))
    for line in verdict_sentences(comparison):
        print(line)


def _split(names: str | None) -> list[str] | None:
    if names is None:
        return None
    found = [name.strip() for name in names.split(",") if name.strip()]
    if not found:
        raise InputError("the list of names is empty", fix="separate names by commas")
    return found
