"""Pages that mkdocs builds from the code: commands, recipes and tasks."""

from __future__ import annotations

import re
from typing import Any

PROGRAM = re.compile(r"^\s*(calque|zcat|torchrun) ")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the placeholders of a page by text that is generated from the program."""
    pages = {"commands": list_commands, "recipes": list_recipes, "tasks": list_tasks}
    for name, build in pages.items():
        placeholder = f"<!-- {name} -->"
        if placeholder in markdown:
            markdown = markdown.replace(placeholder, build())
    return markdown


def list_commands() -> str:
    """Return the help of every command, with the example lines in code blocks."""
    import typer
    from typer.cli import get_docs_for_click

    from calque.cli.app import build_app

    command = typer.main.get_command(build_app())
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="calque")
    lines: list[str] = []
    is_example = is_fenced = False
    for line in text.replace("\b\n", "").splitlines():
        is_fenced ^= line.startswith("```")
        continues = is_example and line.startswith(" ") and line.strip() != ""
        if not is_fenced and (bool(PROGRAM.match(line)) or continues) != is_example:
            is_example = not is_example
            lines.append("```")
        lines.append(line)
    return "\n".join(lines).partition("\n")[2]


def list_recipes() -> str:
    """Return a table of the bundled recipes: name and first comment line."""
    from pathlib import Path

    rows = ["| recipe | purpose |", "|---|---|"]
    for path in sorted((Path(__file__).parents[1] / "recipes").glob("*.yaml")):
        first = path.read_text("utf-8").splitlines()[0]
        rows.append(f"| `{path.stem}` | {first.lstrip('# ').rstrip()} |")
    return "\n".join(rows)


def list_tasks() -> str:
    """Return a table of the tasks: name, what is measured, main metric, whether it is trained."""
    from calque.evaluation.registry import TASKS

    rows = ["| task | what is measured | metric | fine-tuned |", "|---|---|---|---|"]
    rows += [
        f"| `{name}` | {task.title} | {task.metric} | {'yes' if task.trained else 'no'} |"
        for name, task in TASKS.items()
    ]
    return "\n".join(rows)
