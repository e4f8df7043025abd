"""`calque gap`: how far other languages stay behind the source, along training."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from calque.training.probe_curves import TransferPoint


def gap(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN…", help="Folders of runs whose recipes had a probe."),
    ],
    steps: Annotated[
        bool, typer.Option("--steps", help="Every step probed, not the first and the last alone.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="PICTURE", help="Draw runs along training: .png, .svg or .pdf."),
    ] = None,
) -> None:
    """Show how far other languages stay behind the source in runs.

    The transfer gap is the source language's score minus the mean of the others. The scores are
    those of the recipe's `probe`, a small tagging task learnt from frozen states in the source
    language.
    """
    from rich.console import Console

    from calque.report.plots import check_plot, plot_transfer, save_plot
    from calque.training.probe_curves import read_curve

    if plot is not None:
        check_plot(plot)
    curves = {str(run): read_curve(run) for run in dict.fromkeys(runs)}
    Console().print(_tabulate(curves, every_step=steps))
    if plot is not None:
        save_plot(plot_transfer(curves), plot)
        print(f"{plot}: source, others and gap by step", file=sys.stderr)


def _tabulate(curves: Mapping[str, Sequence[TransferPoint]], *, every_step: bool) -> Table:
    from rich.table import Table

    table = Table()
    table.add_column("run", overflow="fold")
    for name in ("step", "source", "others", "gap"):
        table.add_column(name, justify="right")
    for run, points in curves.items():
        shown = list(points) if every_step else list(dict.fromkeys((points[0], points[-1])))
        for number, point in enumerate(shown):
            figures = (point.source, point.others, point.gap)
            cells = [f"{100 * figure:.1f}" for figure in figures]
            last = number + 1 == len(shown)
            table.add_row("" if number else run, f"{point.step:,}", *cells, end_section=last)
    return table
