"""`calque train`: a recipe in, a model out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from calque.types import InputError


def train(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="A YAML file, or the name of a bundled recipe.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="RUN", help="The run's folder; else runs/NAME."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Change a key: data.alpha=0.5; repeatable."
        ),
    ] = None,
    prepared: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Text from `calque prepare`; else RUN/text is made."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint in RUN.")
    ] = False,
) -> None:
    """Train a model by a recipe.

    The finished model is RUN/model, a plain Hugging Face folder. Ctrl-C saves before it stops.
    Linear maps by procrustes or least_squares are solved in one pass, which cannot be resumed.
    Several processes: torchrun --nproc_per_node 2 -m calque train …
    """
    from calque.cli.prepare import prepare_visibly
    from calque.text.preparation import is_prepared
    from calque.training.loop import Interrupted, check_folder
    from calque.training.loop import train as train_recipe
    from calque.training.map_fitting import fit_maps, is_closed_form
    from calque.training.processes import main_process_first
    from calque.training.recipe import find_recipe, load_recipe
    from calque.training.setup import anchor_paths, check_text

    path = find_recipe(recipe)
    loaded = anchor_paths(load_recipe(path, settings or ()), path.parent)
    run = output or Path("runs") / loaded.name
    in_one_pass = is_closed_form(loaded)
    if in_one_pass and resume:
        raise InputError("--resume: maps are solved in one pass", fix="drop --resume, start again")
    check_folder(run, resume=resume)
    if loaded.probe is not None:
        loaded.probe.find_tests()  # what is missing is better said before text is prepared
    text = prepared or run / "text"
    with main_process_first() as is_main:
        # A run goes on with the text it began with, even if its sources have changed.
        if is_main and prepared is None and not (resume and is_prepared(text)):
            check_text(loaded, path.parent)
            prepare_visibly(loaded, path.parent, text)
    try:
        if in_one_pass:
            model = fit_maps(loaded, text, run)
        else:
            model = train_recipe(loaded, text, run, resume=resume)
    except Interrupted as stop:
        if is_main:
            print(f"{run}: {stop}", file=sys.stderr)
        raise typer.Exit(130) from None
    if is_main:
        print(f"{model}: the finished model", file=sys.stderr)
        print(f"{run}: its recipe, metrics and checkpoints", file=sys.stderr)
