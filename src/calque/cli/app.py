"""The list of commands. To add one: its file, and one line here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from calque.cli.align import align
from calque.cli.attention import attention
from calque.cli.clean import clean
from calque.cli.compare import compare
from calque.cli.data import data
from calque.cli.demo import demo
from calque.cli.embed import embed
from calque.cli.evaluate import evaluate
from calque.cli.extract import extract
from calque.cli.gap import gap
from calque.cli.grow import grow
from calque.cli.lexicon import lexicon
from calque.cli.links import links
from calque.cli.map import map_vectors
from calque.cli.mine import mine
from calque.cli.models import models
from calque.cli.neutralize import neutralize
from calque.cli.prepare import prepare
from calque.cli.recipes import recipes
from calque.cli.train import train
from calque.cli.translate import translate

COMMANDS: dict[str, Callable[..., None]] = {
    "align": align,
    "attention": attention,
    "clean": clean,
    "compare": compare,
    "data": data,
    "demo": demo,
    "embed": embed,
    "evaluate": evaluate,
    "extract": extract,
    "gap": gap,
    "grow": grow,
    "lexicon": lexicon,
    "links": links,
    "map": map_vectors,
    "mine": mine,
    "models": models,
    "neutralize": neutralize,
    "prepare": prepare,
    "recipes": recipes,
    "train": train,
    "translate": translate,
}


def build_app() -> typer.Typer:
    """Make the command line; the commands import what is heavy when they run."""
    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_calque)
    for name, command in COMMANDS.items():
        app.command(name)(command)
    return app


def _show_version(asked: bool) -> None:
    if asked:
        from calque import __version__

        print(f"calque {__version__}")
        raise typer.Exit


def _calque(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version."),
    ] = False,
) -> None:
    """Align multilingual Transformer encoders across languages, and use what comes of it."""
