"""Commands in the README, the docs and recipes: commands, options and recipes that exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import click
import pytest
import typer

import calque
from calque.cli.app import build_app
from calque.evaluation.settings import TaskSettings
from calque.training.recipe_io import load_recipe

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *ROOT.glob("recipes/*.yaml")]
SETTINGS = {field.name for field in fields(TaskSettings)}


def find_commands(text: str) -> Iterator[str]:
    """Yield what follows `calque` in code blocks and between backticks, continued lines joined."""
    joined = re.sub(r" *\\\n#? *", " ", text)
    yield from re.findall(r"^(?:\$ )?calque ([a-z].*)$", "\n".join(joined.split("```")[1::2]), re.M)
    yield from re.findall(r"`calque ([a-z][^`]*)`", joined)
    yield from re.findall(r"^#   calque ([a-z].*)$", joined, re.M)


def take_words(command: str) -> list[str]:
    """Return the words of a command, without comments and what follows a pipe."""
    try:
        words = shlex.split(command.replace("…", " "), comments=True)
    except ValueError:  # a quotation mark that ends in another line
        words = command.split()
    ends = [number for number, word in enumerate(words) if word in ("|", ">", "<", "#", "&&")]
    return words[: ends[0]] if ends else words


@pytest.fixture(scope="module")
def commands() -> dict[str, click.Command]:
    group = typer.main.get_command(build_app())
    assert hasattr(group, "commands")
    found: dict[str, click.Command] = group.commands
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_commands_exist(page: Path, commands: dict[str, click.Command]) -> None:
    for text in find_commands(page.read_text("utf-8")):
        name, *words = take_words(text)
        assert name in commands, text
        known = {flag for option in commands[name].params for flag in option.opts}
        given = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert given <= known | {"--help"}, text
        changes = [after for word, after in pairwise(words) if word == "--set" and "=" in after]
        if name in ("train", "prepare") and words and re.fullmatch(r"[a-z][a-z0-9-]+", words[0]):
            load_recipe(words[0], changes)  # the recipe exists, and so do its keys
        if name == "evaluate":
            assert {change.partition("=")[0] for change in changes} <= SETTINGS, text


def test_commands_are_found() -> None:
    assert sum(1 for page in PAGES for _ in find_commands(page.read_text("utf-8"))) > 100
    text = "```\ncalque map a.vec \\\n  b.vec -o x # one\n$ calque train weak\n```\nor `calque gap`"
    assert [take_words(each) for each in find_commands(text)] == [
        ["map", "a.vec", "b.vec", "-o", "x"],
        ["train", "weak"],
        ["gap"],
    ]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.suffix == ".md"], ids=lambda p: p.stem
)
def test_python_examples_use_public_names_only(page: Path) -> None:
    for code in re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
        assert not re.search(r"^\s*(from calque\.|import calque\.)", code, re.MULTILINE), code
        for name in re.findall(r"\bcalque\.(\w+)", code):
            assert name in calque.__all__, name
