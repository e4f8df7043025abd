"""`calque attention`: how much a sentence and its translation look at each other in a model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from calque.types import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from calque.types import PairAttention


def attention(
    src: Annotated[str, typer.Argument(metavar="SENTENCE", help="A sentence.")],
    tgt: Annotated[
        str, typer.Argument(metavar="TRANSLATION", help="The same in another language.")
    ],
    model: Annotated[
        list[str] | None,
        typer.Option(help="A model folder or hub name, or several; else the embedded model."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="PICTURE", help="Draw it, too: .png, .svg or .pdf."),
    ] = None,
    layer: Annotated[
        int | None, typer.Option(help="Of the lines drawn: 1 to the last; else the mean of all.")
    ] = None,
    positions: Annotated[
        str | None,
        typer.Option(
            metavar="reset|continue",
            help="How a second sentence's positions count; else as the model says, or continue.",
        ),
    ] = None,
) -> None:
    """Show how much a sentence looks at its translation, by layer.

    Shown is the share of attention that goes to the other sentence. Self-attention reads the two
    side by side; a model trained with cross_attention_lm also has a cross-attention, of which what
    sentence marks get counts as nothing.
    """
    from rich.console import Console

    from calque.cli.progress import show_phases
    from calque.report.attention_plot import find_fonts, plot_attention
    from calque.report.plots import check_plot, save_plot
    from calque.tools.attention_reader import read_pair

    if output is not None:
        check_plot(output)
    if positions not in (None, "reset", "continue"):
        raise InputError(f"--positions {positions}: no such way", fix="give reset or continue")
    readings: list[PairAttention] = []
    with show_phases("reading") as tell:
        names: list[str | None] = [*dict.fromkeys(model or [])] or [None]
        for name in names:
            tell(name or "the embedded model")
            readings += read_pair(name, src, tgt, positions=positions)  # type: ignore[arg-type]
    _check_layer(readings, layer)
    Console().print(_tabulate(readings))
    if output is not None:
        save_plot(plot_attention(readings, layer=layer), output)
        print(f"{output}: shares by layer, and lines from piece to piece", file=sys.stderr)
        _, missing = find_fonts("".join(piece for one in readings for piece in one.src + one.tgt))
        if missing:
            told = f"no font here draws {missing}: such pieces go by their numbers"
            print(f"warning: {told} (install one, such as Noto Sans CJK)", file=sys.stderr)


def _check_layer(readings: Sequence[PairAttention], layer: int | None) -> None:
    n_layers = min(len(one.shares) for one in readings)
    if layer is not None and not 1 <= layer <= n_layers:
        raise InputError(f"--layer {layer}: no such layer", fix=f"give 1 to {n_layers}")


def _tabulate(readings: Sequence[PairAttention]) -> Table:
    from rich.table import Table

    from calque.report.plots import shorten_names

    names = shorten_names(one.model for one in readings)
    table = Table(title="attention to the other sentence (%)")
    table.add_column("layer", justify="right")
    for one in readings:
        table.add_column(f"{names[one.model]}\n{one.kind}", justify="right", overflow="fold")
    for layer in range(max(len(one.shares) for one in readings)):
        cells = [one.shares[layer : layer + 1] for one in readings]
        table.add_row(str(layer + 1), *(f"{100 * cell[0]:.1f}" if cell else "–" for cell in cells))
    table.add_section()
    means = [sum(one.shares) / len(one.shares) for one in readings]
    table.add_row("mean", *(f"{100 * mean:.1f}" for mean in means), style="bold")
    table.add_row("if even", *(f"{100 * one.even:.1f}" for one in readings))
    return table
