"""The list of commands; a new command is added to `COMMANDS`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Annotated

import typer

from calque.cli.alignment_commands import align, demo, links
from calque.cli.bitext_commands import clean
from calque.cli.evaluation_commands import data, evaluate
from calque.cli.growth_commands import grow
from calque.cli.report_commands import compare
from calque.cli.sentence_commands import embed, mine, neutralize
from calque.cli.serve_commands import serve
from calque.cli.training_commands import gap, models, prepare, recipes, train
from calque.cli.translation_commands import attention, translate
from calque.cli.vector_commands import extract, lexicon, map_vectors
from calque.errors import InputError

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
    "serve": serve,
    "train": train,
    "translate": translate,
}


def build_app(arguments: Sequence[str] = ()) -> typer.Typer:
    """Build the command line; commands import heavy libraries only when they run.

    If the arguments start with the name of a command, the others are left out: Typer takes 2 ms
    for each.
    """
    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_calque)
    names = arguments[:1] if arguments and arguments[0] in COMMANDS else list(COMMANDS)
    for name in names:
        app.command(name)(_pass_interruption_on(COMMANDS[name]))
    return app


class Stopped(BaseException):
    """A command was interrupted; the notes of the KeyboardInterrupt say what was saved."""


def _pass_interruption_on(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command, because Typer would turn KeyboardInterrupt into an exit code only."""

    @wraps(command)
    def run(*args: object, **kwargs: object) -> None:
        if sys.flags.optimize > 1:
            problem = "python -OO removes docstrings, without which transformers does not work"
            raise InputError(problem, fix="use python or python -O")
        try:
            command(*args, **kwargs)
        except KeyboardInterrupt as interruption:
            raise Stopped(*getattr(interruption, "__notes__", ())) from None

    return run


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
    """Align multilingual Transformer encoders across languages and use them."""
