"""The command `calque serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from calque.cli.options import DeviceOption


def serve(
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="Model folder, hub name or calque-mini. Can be repeated. Default: calque-mini.",
        ),
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(
            "--results", metavar="DIR", help="Folder with results of calque evaluate, to compare."
        ),
    ] = None,
    runs: Annotated[
        Path | None,
        typer.Option("--runs", metavar="DIR", help="Folder with training runs, to follow."),
    ] = None,
    vectors: Annotated[
        Path | None,
        typer.Option(
            "--vectors",
            metavar="DIR",
            help="Folder with mapped word vectors by language, for the dictionary.",
        ),
    ] = None,
    sentences: Annotated[
        list[str] | None,
        typer.Option(
            "--sentences",
            metavar="LANGUAGE=FILE",
            help="Sentences to search, one per line, or a file with lines of a language, a tab and "
            "a sentence. Can be repeated. Default: 400 sentences of the package.",
        ),
    ] = None,
    translator: Annotated[
        str | None,
        typer.Option(
            "--translator",
            metavar="MODEL",
            help="Folder or hub name of an encoder-decoder model, to translate.",
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            "--host",
            metavar="ADDRESS",
            help="Address to listen at. One that other computers can reach needs a token.",
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, metavar="N", help="Port; 0 for a free one.")
    ] = 8000,
    token: Annotated[
        str | None,
        typer.Option(
            "--token",
            metavar="TEXT",
            envvar="CALQUE_TOKEN",
            help="Bearer token that clients must send. Better set CALQUE_TOKEN: other users can "
            "see arguments.",
        ),
    ] = None,
    device: DeviceOption = "auto",
) -> None:
    """Open a page and a JSON API to look at what Calque computes.

    \b
    calque serve
    calque serve --model runs/mlm/model --model calque-mini --runs runs --results results
    curl -H 'Content-Type: application/json' \\
      -d '{"pairs": [{"src": "das Haus", "tgt": "the house"}]}' http://127.0.0.1:8000/align

    It runs until it is interrupted with Ctrl-C, and sends nothing to other computers.
    """  # noqa: D301 (a backspace keeps the lines of the examples apart)
    from calque.cli.console import show_log
    from calque.server.serve import serve as run_server

    with show_log():
        run_server(
            model,
            results=results,
            runs=runs,
            vectors=vectors,
            sentences=sentences,
            translator=translator,
            host=host,
            port=port,
            token=token,
            device=device,
        )
