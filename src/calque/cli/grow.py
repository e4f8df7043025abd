"""`calque grow`: the start of a cross-lingual model, out of a monolingual one."""

from __future__ import annotations

import glob
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from calque.types import InputError


def grow(
    mono: Annotated[
        str,
        typer.Argument(metavar="MONO", help="A monolingual model: a folder or a hub name."),
    ],
    tokenizer: Annotated[
        str,
        typer.Option(
            metavar="NEW",
            help="The new vocabulary: a folder, a tokenizer.json, a hub name or calque-mini.",
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="START", help="Where the new model goes.")
    ],
    dictionary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="In MUSE's format; give it several times, or a quoted pattern: 'muse/en-*.txt'.",
        ),
    ] = None,
    language: Annotated[
        str, typer.Option(metavar="CODE", help="MONO's, as in the dictionaries' names.")
    ] = "en",
    text: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE", help="To tell how much of it starts matched; several, or a pattern."
        ),
    ] = None,
    initialize: Annotated[
        str, typer.Option(metavar="WHAT", help="both, body, embeddings or none.")
    ] = "both",
    unmatched: Annotated[
        str,
        typer.Option(
            metavar="HOW", help="moments: drawn like the matched rows; normal: N(0, 0.02)."
        ),
    ] = "moments",
    prefer: Annotated[
        str,
        typer.Option(
            metavar="WHAT", help="surface: what a piece spells goes first; or dictionary."
        ),
    ] = "surface",
    no_compose: Annotated[
        bool,
        typer.Option("--no-compose", help="Leave out translations that MONO cuts in pieces."),
    ] = False,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="For all that is drawn.")] = 0,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a model grown before.")
    ] = False,
) -> None:
    """Start a cross-lingual model from a monolingual one (MetaXLM).

    The architecture stays the same, and the body is copied; a row of the new vocabulary takes the
    row of the same text, or of its translation. START is a plain Hugging Face folder for a
    recipe's `model.start`, with the report in growth.json. A dictionary named en-de.txt or
    de-en.txt tells its columns.

    \b
    calque grow roberta-base --tokenizer xlm-roberta-base -o start
    calque grow MINILM --tokenizer calque-mini -o start \\
        --dictionary 'muse/en-*.txt' --dictionary 'muse/*-en.*.txt' --text 'wiki/*.txt'
    """  # noqa: D301 (a backspace keeps the lines of the examples apart)
    from rich.console import Console

    from calque.cli.growth_tables import (
        describe_growth,
        tabulate_rules,
        tabulate_scripts,
        tabulate_texts,
    )
    from calque.cli.progress import show_phases
    from calque.tools import grower

    started = time.perf_counter()
    dictionaries, texts = expand(dictionary or []), expand(text or [])
    with show_phases("growing") as tell:
        report = grower.grow(
            mono,
            tokenizer,
            output,
            dictionaries=dictionaries,
            language=language,
            texts=texts,
            initialize=cast(Any, initialize),
            unmatched=cast(Any, unmatched),
            prefer=cast(Any, prefer),
            composes=not no_compose,
            seed=seed,
            overwrite=overwrite,
            on_phase=tell,
        )
    if report.match is not None:
        console = Console()
        console.print(tabulate_rules(report.match))
        console.print(tabulate_scripts(report.match))
        if texts:
            console.print(tabulate_texts(report.match, language))
    notes = [*describe_growth(report), f"{time.perf_counter() - started:.1f} s"]
    print(f"{output}: {', '.join(notes)}", file=sys.stderr)


def expand(patterns: Sequence[str]) -> list[str]:
    """List the files that patterns name, each once; one that names none is an error."""
    found: dict[str, None] = {}
    for pattern in patterns:
        files = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern))
        if not files:
            raise InputError("no such file", file=pattern, fix="check the path")
        found |= dict.fromkeys(files)
    return list(found)
