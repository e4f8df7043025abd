"""`calque recipes`: what can be trained by name, and the file of one to begin your own with."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from calque.types import InputError


def recipes(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="A recipe to print; else all are listed.")
    ] = None,
) -> None:
    """List the recipes that come with Calque, or print one.

    \b
    calque recipes
    calque recipes weak > mine.yaml      change it, then: calque train mine.yaml
    """  # noqa: D301 (a backspace keeps the lines of the examples apart)
    from calque.training.recipe import bundled_recipes, find_recipe

    if name is not None:
        path = find_recipe(name)
        try:
            sys.stdout.write(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise InputError("not UTF-8", file=path, fix="save it as UTF-8") from error
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "what", title="recipes (calque recipes NAME prints one)")
    for each, path in bundled_recipes().items():
        table.add_row(each, describe(path.read_text(encoding="utf-8")))
    Console().print(table)


def describe(text: str) -> str:
    r"""Take the first sentence of the comment that a recipe begins with.

    >>> describe("# A title: and what\n# it does. More.\nname: x")
    'A title: and what it does.'
    >>> describe("# From a start:\n#   calque grow …\n# More.\nname: x")
    'From a start.'
    """
    lines = []
    for line in text.splitlines():
        if not line.startswith("# ") or line.startswith("#  "):
            break
        lines.append(line.removeprefix("# "))
    sentence = " ".join(lines).partition(". ")[0]
    return sentence.rstrip(".:") + "."
