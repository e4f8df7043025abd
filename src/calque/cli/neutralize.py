"""`calque neutralize`: sentence vectors without their language, from plain text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from calque.types import InputError


def neutralize(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A model folder, a hub name or calque-mini.")
    ],
    texts: Annotated[
        list[Path],
        typer.Argument(metavar="TEXT…", help="One file a language: en.txt, de.txt.xz and so on."),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where the new model goes.")
    ],
    layer: Annotated[int | None, typer.Option(help="By default the model's best.")] = None,
    sentences: Annotated[int, typer.Option(min=50, help="How many to draw from each file.")] = 2000,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 …")] = "auto",
) -> None:
    """Store what tells languages apart, so that `embed` drops it.

    No bitext, no training: each language's mean vector is enough. The files' names, up to the
    first dot, name the languages.
    """
    from calque.api import load
    from calque.cli.progress import show_progress
    from calque.text.corpora import read_sentences
    from calque.tools.neutralizer import find_neutral_space, save_neutral_model

    names = [path.name.split(".")[0] for path in texts]
    for name, path in zip(names, texts, strict=True):
        if names.count(name) > 1:
            fix = "give one file a language, named after it: en.txt, de.txt"
            raise InputError(f"two files are of a language {name!r}", file=path, fix=fix)
    if output.exists():
        raise InputError("this folder exists", file=output, fix="give a new one")
    encoder = load(model, device)
    with show_progress("embedding", len(names)) as advance:
        space = find_neutral_space(
            encoder,
            {name: read_sentences(path) for name, path in zip(names, texts, strict=True)},
            layer=layer,
            n_sentences=sentences,
            on_language=lambda _: advance(1),
        )
    save_neutral_model(encoder, space, output)
    n_removed, n_kept = len(space.directions), encoder.hidden_size - len(space.directions)
    print(f"{output}: layer {space.layer}, {n_removed} directions removed, {n_kept} kept")
