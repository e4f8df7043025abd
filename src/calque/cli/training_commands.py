"""Commands for training: prepare, train, recipes, gap, grow, models."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from calque.cli.options import PlotOption, ResumeOption, SettingsOption
from calque.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from calque.training.gap_probe import TransferPoint

RecipeArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help="Name of a bundled recipe, or a YAML file.")
]
MODEL_CARD = "README.md"


def prepare(
    recipe: RecipeArgument,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Folder for the tokenized text.")
    ],
    settings: SettingsOption = None,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            min=1,
            metavar="N",
            help="Number of processes that tokenize. Default: one per core.",
        ),
    ] = None,
) -> None:
    """Tokenize the text of a recipe once for many training runs.

    The text is read, cleaned and tokenized into a folder for `calque train --prepared`. Corpora
    that are already there are kept.
    """
    from calque.cli.console import print_summary, progress_bar, show_log
    from calque.training import sources

    started = time.perf_counter()
    with progress_bar() as progress, show_log():
        text = sources.prepare(
            recipe, output=output, settings=settings or (), workers=workers, progress=progress
        )
    notes = [f"{text.n_corpora:,} corpora", f"{text.n_examples:,} examples"]
    print_summary(output, [*notes, f"{text.n_tokens:,} tokens"], started)


def train(
    recipe: RecipeArgument,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="RUN", help="Folder of the run. Default: runs/NAME."
        ),
    ] = None,
    settings: SettingsOption = None,
    prepared: Annotated[
        Path | None,
        typer.Option(
            "--prepared",
            metavar="DIR",
            help="Text from `calque prepare`. Default: the text is prepared in RUN/text.",
        ),
    ] = None,
    resume: ResumeOption = False,
) -> None:
    """Train a model by a recipe.

    The finished model is RUN/model, a plain Hugging Face folder. Ctrl-C saves before it stops.
    Linear maps with the solver procrustes or least_squares are computed in one pass, which cannot
    be resumed. Several processes: torchrun --nproc_per_node 2 -m calque train ...
    """
    from calque.cli.console import print_summary, progress_bar, show_log
    from calque.io.shards import process_state
    from calque.training import loop

    started = time.perf_counter()
    with progress_bar() as progress, show_log():
        result = loop.train(
            recipe,
            output=output,
            settings=settings or (),
            prepared=prepared,
            resume=resume,
            progress=progress,
        )
    if process_state().is_main_process:
        notes = [f"model after {result.step:,} steps"]
        notes.append(f"recipe, metrics and checkpoints in {result.folder}")
        print_summary(result.model, notes, started)


def recipes(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Recipe to print. Default: list all recipes."),
    ] = None,
) -> None:
    """List the recipes that come with Calque, or print one.

    \b
    calque recipes
    calque recipes weak > mine.yaml      change it, then: calque train mine.yaml
    """  # noqa: D301 (a backspace keeps the lines of the examples apart)
    from calque.training.recipe_io import bundled_recipes, find_recipe

    if name is not None:
        path = find_recipe(name)
        try:
            sys.stdout.write(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise InputError("the file is not UTF-8", file=path, fix="save it as UTF-8") from error
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "what it does", title="recipes (`calque recipes NAME` prints one)")
    for recipe, path in bundled_recipes().items():
        table.add_row(recipe, first_sentence(path.read_text(encoding="utf-8")))
    Console().print(table)


def first_sentence(text: str) -> str:
    r"""Return the first sentence of the comment at the top of a recipe.

    >>> first_sentence("# A title: and what\n# it does. More.\nname: x")
    'A title: and what it does.'
    >>> first_sentence("# From a start:\n#   calque grow …\n# More.\nname: x")
    'From a start.'
    """
    lines = []
    for line in text.splitlines():
        if not line.startswith("# ") or line.startswith("#  "):
            break
        lines.append(line.removeprefix("# "))
    sentence = " ".join(lines).partition(". ")[0]
    return sentence.rstrip(".:") + "."


def gap(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Folders of runs whose recipes have a probe."),
    ],
    steps: Annotated[
        bool, typer.Option("--steps", help="Show every measured step, not only first and last.")
    ] = False,
    plot: PlotOption = None,
) -> None:
    """Show how far other languages are behind the source language.

    The transfer gap is the source language's score minus the mean of the others. The scores are
    those of the recipe's `probe`, a small tagging task trained on frozen states of the source
    language.
    """
    from rich.console import Console

    from calque.report.plots import check_plot, plot_transfer, save_plot
    from calque.training.gap_probe import transfer_gap

    if plot is not None:
        check_plot(plot)
    curves = transfer_gap(runs)
    Console().print(_tabulate_gap(curves, every_step=steps))
    if plot is not None:
        save_plot(plot_transfer(curves), plot)
        print(f"{plot}: plot of source, others and gap by step", file=sys.stderr)


def _tabulate_gap(curves: Mapping[str, Sequence[TransferPoint]], *, every_step: bool) -> Table:
    from rich.table import Table

    table = Table()
    table.add_column("run", overflow="fold")
    for name in ("step", "source", "others", "gap"):
        table.add_column(name, justify="right")
    for run, points in curves.items():
        shown = list(points) if every_step else list(dict.fromkeys((points[0], points[-1])))
        for number, point in enumerate(shown):
            scores = [f"{score:.1f}" for score in (point.source, point.others, point.gap)]
            is_last = number + 1 == len(shown)
            table.add_row("" if number else run, f"{point.step:,}", *scores, end_section=is_last)
    return table


def models(
    card: Annotated[
        bool,
        typer.Option("--card", help="Print the model cards: text, training, scores and limits."),
    ] = False,
) -> None:
    """List the models that come with the package."""
    from rich.console import Console
    from rich.table import Table

    from calque.models.loading import embedded_models

    found = embedded_models()
    if not found:
        print("This installation contains no model; pass --model FOLDER to commands.")
        return
    if card:
        for folder in found.values():
            text = (folder / MODEL_CARD).read_text(encoding="utf-8")
            print(text.rpartition("\n---\n")[2].strip())  # without the lines for model hubs
        return
    table = Table("model", "MiB", "layers", "hidden", "vocabulary", "languages", "scores")
    for name, folder in found.items():
        table.add_row(name, *describe_model(folder))
    console = Console()
    console.print(table)
    for name, folder in found.items():
        console.print(f"{name}: {folder}", soft_wrap=True, highlight=False)


def describe_model(folder: Path) -> list[str]:
    """Return the size, shape, languages and scores of a model folder without loading the model."""
    from calque.models.configuration import read_config

    config = read_config(folder)
    settings = config.get("calque") or {}
    n_bytes = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    scores = [f"{name} {value:.3g}" for name, value in settings.get("scores", {}).items()]
    unknown = "see --card" if (folder / MODEL_CARD).exists() else "–"
    return [
        f"{n_bytes / 2**20:.1f}",
        str(config["num_hidden_layers"]),
        str(config["hidden_size"]),
        f"{config['vocab_size']:,}",
        " ".join(settings.get("languages", [])) or unknown,
        "\n".join(scores) or unknown,
    ]
