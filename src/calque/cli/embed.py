"""`calque embed`: one vector a line of text."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from calque.types import InputError

if TYPE_CHECKING:
    from calque.text.files import SkippedLines
    from calque.tools.windows import EmbedReport


def embed(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="One sentence a line; plain, .gz, .xz, .zst, or - (standard input).",
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="VECTORS.npy", help="Where the vectors go.")
    ],
    model: Annotated[
        str | None, typer.Option(help="A model folder or hub name; else the embedded model.")
    ] = None,
    layer: Annotated[
        int | None, typer.Option(help="0 is the embedding, -1 the last; else the model's best.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Leave the model's neutral space, if it has one, alone.")
    ] = False,
    map_from: Annotated[
        str | None,
        typer.Option(metavar="LANGUAGE", help="The text's language: apply the model's map of it."),
    ] = None,
    maps: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Where the maps are; else beside the model."),
    ] = None,
    center: Annotated[
        bool, typer.Option("--center", help="Subtract the file's mean: one language a file.")
    ] = False,
    normalize: Annotated[
        bool, typer.Option("--normalize", help="Scale every vector to length one.")
    ] = False,
    skip_bad: Annotated[
        Path | None,
        typer.Option(metavar="LIST", help="Make undecodable lines zero and list them here."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 …")] = "auto",
) -> None:
    """Turn each line of a text into a vector.

    Row k of the NumPy file is line k. Long lines are read in windows: nothing is cut off.
    """
    from calque.api import load
    from calque.cli.progress import show_phases, show_progress
    from calque.text.files import check_list, open_list
    from calque.tools.vector_writer import check_output, write_vectors

    check_output(output, [file])
    check_list(skip_bad, [file], output)
    if maps is not None and map_from is None:
        raise InputError("--maps without --map-from", fix="name the text's language: --map-from de")
    started = time.perf_counter()
    with ExitStack() as stack:
        skipped = open_list(skip_bad, stack)
        with show_phases("reading"):
            n_lines = _count_lines(file, skipped)
        encoder = load(model, device, maps=None if map_from is None else maps or True)
        report = write_vectors(
            encoder,
            _read_lines(file, skipped),
            output,
            layer=layer,
            raw=raw,
            map_from=map_from,
            center=center,
            normalize=normalize,
            on_block=stack.enter_context(show_progress("embedding", n_lines)),
        )
    seconds = time.perf_counter() - started
    notes = _describe(report, 0 if skipped is None else skipped.n_lines)
    print(f"{output}: {', '.join(notes)}; {seconds:.1f} s", file=sys.stderr)


def _count_lines(file: str, skipped: SkippedLines | None) -> int | None:
    """Read a file once before the work, so that a bad line is known at once; not a pipe."""
    from calque.text.files import SkippedLines

    if Path(file).exists() and not Path(file).is_file():
        return None
    if file == "-":
        return None
    return sum(1 for _ in _read_lines(file, None if skipped is None else SkippedLines()))


def _read_lines(file: str, skipped: SkippedLines | None) -> Iterator[str]:
    """Read lines; one that is skipped is empty, so that rows and lines keep in step."""
    from calque.text.files import refuse, scan_lines

    for number, line in enumerate(scan_lines(file), start=1):
        if not isinstance(line, str):
            refuse(line, file, number, skipped)
        yield line if isinstance(line, str) else ""


def _describe(report: EmbedReport, n_skipped: int) -> list[str]:
    """Say what was written, and what was not usual about it."""
    notes = [f"{report.n_sentences:,} vectors"]
    if report.n_long:
        notes.append(f"{report.n_long:,} long lines read in {report.n_windows:,} windows")
    if report.n_empty:
        notes.append(f"{report.n_empty:,} empty lines are zero")
    if n_skipped:
        notes.append(f"{n_skipped:,} of them undecodable")
    return notes
