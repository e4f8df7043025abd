"""`calque prepare`: from the text a recipe names to tokens on disk."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from calque.text.preparation import PreparedCorpus
    from calque.training.recipe import Recipe


def prepare(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="A YAML file, or the name of a bundled recipe.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Where the tokens go.")
    ],
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Change a key: data.alpha=0.5; repeatable."
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes that tokenise; by default all cores.")
    ] = None,
) -> None:
    """Read, clean and tokenise a recipe's text, once for many runs.

    Give the folder to `calque train --prepared`. What has not changed is not done again.
    """
    from calque.training.recipe import find_recipe, load_recipe
    from calque.training.setup import anchor_paths

    path = find_recipe(recipe)
    loaded = anchor_paths(load_recipe(path, settings or ()), path.parent)
    corpora = prepare_visibly(loaded, path.parent, output, workers)
    n_examples = sum(corpus.n_examples for corpus in corpora)
    n_tokens = sum(sum(corpus.n_tokens) for corpus in corpora)
    print(
        f"{output}: {len(corpora):,} corpora, {n_examples:,} examples, {n_tokens:,} tokens",
        file=sys.stderr,
    )


def prepare_visibly(
    recipe: Recipe, base: Path, folder: Path, n_workers: int | None = None
) -> list[PreparedCorpus]:
    """Prepare a recipe's text, and show on standard error how far it has come."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from calque.training.setup import prepare_text

    console = Console(stderr=True)
    count = TextColumn("{task.completed:,} examples")
    columns = (SpinnerColumn(), TextColumn("{task.description}"), count, TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("reading", total=None)
        return prepare_text(
            recipe,
            base,
            folder,
            say=lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True),
            n_workers=n_workers,
            on_progress=lambda name, n: progress.update(task, description=name, completed=n),
        )
