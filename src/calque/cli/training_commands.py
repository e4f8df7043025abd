"""`calque prepare`: from the text a recipe names to tokens on disk.

`calque train`: a recipe in, a model out.

`calque recipes`: what can be trained by name, and the file of one to begin your own with.

`calque gap`: how far other languages stay behind the source, along training.

`calque grow`: the start of a cross-lingual model, out of a monolingual one.

`calque models`: what comes with the package.
"""

from __future__ import annotations

import glob
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from calque.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from calque.tokens.prepare import PreparedCorpus
    from calque.training.gap_probe import TransferPoint
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
    from calque.training.start import anchor_paths

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

    from calque.training.start import prepare_text

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
    from calque.tokens.prepare import is_prepared
    from calque.training.closed_form import fit_maps, is_closed_form
    from calque.training.distributed import main_process_first
    from calque.training.loop import Interrupted, check_folder
    from calque.training.loop import train as train_recipe
    from calque.training.recipe import find_recipe, load_recipe
    from calque.training.start import anchor_paths, check_text

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


def gap(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN…", help="Folders of runs whose recipes had a probe."),
    ],
    steps: Annotated[
        bool, typer.Option("--steps", help="Every step probed, not the first and the last alone.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="PICTURE", help="Draw runs along training: .png, .svg or .pdf."),
    ] = None,
) -> None:
    """Show how far other languages stay behind the source in runs.

    The transfer gap is the source language's score minus the mean of the others. The scores are
    those of the recipe's `probe`, a small tagging task learnt from frozen states in the source
    language.
    """
    from rich.console import Console

    from calque.report.plots import check_plot, plot_transfer, save_plot
    from calque.training.gap_probe import read_curve

    if plot is not None:
        check_plot(plot)
    curves = {str(run): read_curve(run) for run in dict.fromkeys(runs)}
    Console().print(_tabulate(curves, every_step=steps))
    if plot is not None:
        save_plot(plot_transfer(curves), plot)
        print(f"{plot}: source, others and gap by step", file=sys.stderr)


def _tabulate(curves: Mapping[str, Sequence[TransferPoint]], *, every_step: bool) -> Table:
    from rich.table import Table

    table = Table()
    table.add_column("run", overflow="fold")
    for name in ("step", "source", "others", "gap"):
        table.add_column(name, justify="right")
    for run, points in curves.items():
        shown = list(points) if every_step else list(dict.fromkeys((points[0], points[-1])))
        for number, point in enumerate(shown):
            figures = (point.source, point.others, point.gap)
            cells = [f"{100 * figure:.1f}" for figure in figures]
            last = number + 1 == len(shown)
            table.add_row("" if number else run, f"{point.step:,}", *cells, end_section=last)
    return table


def grow(
    mono: Annotated[
        str,
        typer.Argument(metavar="MONO", help="A monolingual model: a folder or a hub name."),
    ],
    tokenizer: Annotated[
        str,
        typer.Option(
            metavar="NEW",
            help="The new vocabulary: a folder, a tokenizer.json, a hub name or calque-mini.",
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="START", help="Where the new model goes.")
    ],
    dictionary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="In MUSE's format; give it several times, or a quoted pattern: 'muse/en-*.txt'.",
        ),
    ] = None,
    language: Annotated[
        str, typer.Option(metavar="CODE", help="MONO's, as in the dictionaries' names.")
    ] = "en",
    text: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE", help="To tell how much of it starts matched; several, or a pattern."
        ),
    ] = None,
    initialize: Annotated[
        str, typer.Option(metavar="WHAT", help="both, body, embeddings or none.")
    ] = "both",
    unmatched: Annotated[
        str,
        typer.Option(
            metavar="HOW", help="moments: drawn like the matched rows; normal: N(0, 0.02)."
        ),
    ] = "moments",
    prefer: Annotated[
        str,
        typer.Option(
            metavar="WHAT", help="surface: what a piece spells goes first; or dictionary."
        ),
    ] = "surface",
    no_compose: Annotated[
        bool,
        typer.Option("--no-compose", help="Leave out translations that MONO cuts in pieces."),
    ] = False,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="For all that is drawn.")] = 0,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a model grown before.")
    ] = False,
) -> None:
    """Start a cross-lingual model from a monolingual one (MetaXLM).

    The architecture stays the same, and the body is copied; a row of the new vocabulary takes the
    row of the same text, or of its translation. START is a plain Hugging Face folder for a
    recipe's `model.start`, with the report in growth.json. A dictionary named en-de.txt or
    de-en.txt tells its columns.

    \b
    calque grow roberta-base --tokenizer xlm-roberta-base -o start
    calque grow MINILM --tokenizer calque-mini -o start \\
        --dictionary 'muse/en-*.txt' --dictionary 'muse/*-en.*.txt' --text 'wiki/*.txt'
    """  # noqa: D301 (a backspace keeps the lines of the examples apart)
    from rich.console import Console

    from calque.cli.console import show_phases
    from calque.cli.console_tables import (
        describe_growth,
        tabulate_rules,
        tabulate_scripts,
        tabulate_texts,
    )
    from calque.growth import grow as grower

    started = time.perf_counter()
    dictionaries, texts = expand(dictionary or []), expand(text or [])
    with show_phases("growing") as tell:
        report = grower.grow(
            mono,
            tokenizer,
            output,
            dictionaries=dictionaries,
            language=language,
            texts=texts,
            initialize=cast(Any, initialize),
            unmatched=cast(Any, unmatched),
            prefer=cast(Any, prefer),
            composes=not no_compose,
            seed=seed,
            overwrite=overwrite,
            on_phase=tell,
        )
    if report.match is not None:
        console = Console()
        console.print(tabulate_rules(report.match))
        console.print(tabulate_scripts(report.match))
        if texts:
            console.print(tabulate_texts(report.match, language))
    notes = [*describe_growth(report), f"{time.perf_counter() - started:.1f} s"]
    print(f"{output}: {', '.join(notes)}", file=sys.stderr)


def expand(patterns: Sequence[str]) -> list[str]:
    """List the files that patterns name, each once; one that names none is an error."""
    found: dict[str, None] = {}
    for pattern in patterns:
        files = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern))
        if not files:
            raise InputError("no such file", file=pattern, fix="check the path")
        found |= dict.fromkeys(files)
    return list(found)


def models() -> None:
    """List the models inside the package."""
    from rich.console import Console
    from rich.table import Table

    from calque.models.loading import embedded_models

    found = embedded_models()
    if not found:
        print("No model is embedded in this installation; commands take --model FOLDER.")
        return
    table = Table("model", "MiB", "layers", "hidden", "vocabulary", "languages", "scores")
    for name, folder in found.items():
        table.add_row(name, *describe_model(folder))
    console = Console()
    console.print(table)
    for name, folder in found.items():
        console.print(f"{name}: {folder}", soft_wrap=True, highlight=False)


def describe_model(folder: Path) -> list[str]:
    """Read a model's size, shape, languages and scores off its folder; nothing is loaded."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
    settings: dict[str, Any] = config.get("calque") or {}
    n_bytes = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    scores = [f"{name} {value:.3g}" for name, value in settings.get("scores", {}).items()]
    card = "see README.md" if (folder / "README.md").exists() else "–"
    return [
        f"{n_bytes / 2**20:.1f}",
        str(config["num_hidden_layers"]),
        str(config["hidden_size"]),
        f"{config['vocab_size']:,}",
        " ".join(settings.get("languages", [])) or card,
        "\n".join(scores) or card,
    ]
