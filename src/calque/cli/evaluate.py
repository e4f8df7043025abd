"""`calque evaluate`: how well models do on tasks."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from calque.types import InputError, Score

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


def evaluate(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL…", help="Model folders, hub names, calque-mini.")
    ],
    data: Annotated[
        Path, typer.Option(envvar="CALQUE_DATA", help="The folder with the test sets.")
    ],
    tasks: Annotated[str, typer.Option(help="Names, separated by commas.")] = "tatoeba",
    languages: Annotated[
        str | None, typer.Option(help="Such as de,fr,ceb; by default all there are.")
    ] = None,
    layers: Annotated[str, typer.Option(help="all, or numbers: 4,5,-1.")] = "all",
    center: Annotated[
        bool, typer.Option("--center", help="Subtract each language's mean vector first.")
    ] = False,
    neutral: Annotated[
        bool, typer.Option("--neutral", help="Score what `embed` gives, in the neutral space.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="RESULTS.jsonl", help="One score a line."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 …")] = "auto",
) -> None:
    """Score models by language and layer."""
    from rich.console import Console

    from calque.cli.tables import tabulate_languages, tabulate_layers
    from calque.tasks.suite import find_tasks
    from calque.text.files import write_atomically

    asked, numbers = find_tasks(tasks), _parse_layers(layers)
    names = None if languages is None else [name.strip() for name in languages.split(",")]
    if neutral and (center or numbers is not None):
        raise InputError("--neutral has its own layer", fix="drop --layers and --center")
    options: dict[str, object] = {"data": data, "languages": names, "layers": numbers}
    options |= {"center": center, "neutral": neutral}
    with nullcontext() if output is None else write_atomically(output) as stream:
        scores: list[Score] = []
        for model in dict.fromkeys(models):
            scores += _score_model(model, device, asked.values(), options)
        if stream is not None:
            stream.writelines(json.dumps(asdict(score)) + "\n" for score in scores)
    for task in asked:
        mine = [score for score in scores if score.task == task]
        Console().print(tabulate_languages(mine), tabulate_layers(mine))
    if numbers is None and not neutral:
        print("The layer shown by language is the best on this test: fix it with --layers N.")
    if output is not None:
        print(f"{output}: {len(scores):,} scores", file=sys.stderr)


def _score_model(
    model: str,
    device: str,
    tasks: Iterable[Callable[..., list[Score]]],
    options: Mapping[str, object],
) -> list[Score]:
    from calque.api import load
    from calque.cli.progress import show_progress

    encoder = load(model, device)
    scores = []
    for task in tasks:
        with show_progress(model, None) as advance:
            scores += task(encoder, model=model, on_language=lambda _: advance(1), **options)
    return scores


def _parse_layers(text: str) -> list[int] | None:
    if text == "all":
        return None
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise InputError(f"--layers {text} is no list of numbers", fix="try all or 4,5") from None
