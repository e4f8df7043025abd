"""The commands `calque evaluate` and `calque data`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from calque.cli.options import DataOption, DeviceOption, OverwriteOption, PlotOption
from calque.errors import InputError, printable

if TYPE_CHECKING:
    from rich.table import Table

    from calque.evaluation.dataset_check import FolderReport
    from calque.evaluation.datasets import Dataset
    from calque.evaluation.evaluate import Evaluation

SHOWN_LANGUAGES, SHOWN_PROBLEMS, SHOWN_UNKNOWN = 12, 50, 3


def evaluate(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="Model folders, hub names or calque-mini; or folders with de.vec, en.vec, ...",
        ),
    ],
    data: DataOption,
    tasks: Annotated[
        str, typer.Option("--tasks", metavar="NAMES", help="Tasks, separated by commas.")
    ] = "tatoeba",
    languages: Annotated[
        str | None,
        typer.Option(
            "--languages",
            metavar="NAMES",
            help="Languages or pairs, such as de,fr or de-en. Default: all that have a test.",
        ),
    ] = None,
    layers: Annotated[
        str,
        typer.Option(
            "--layers", metavar="NUMBERS", help="Layers to measure: all, or numbers: 4,5,-1."
        ),
    ] = "all",
    center: Annotated[
        bool, typer.Option("--center", help="Subtract the mean vector of each language (tatoeba).")
    ] = False,
    neutral: Annotated[
        bool,
        typer.Option(
            "--neutral", help="Use the language-neutral space stored with the model (tatoeba)."
        ),
    ] = False,
    maps: Annotated[
        str | None,
        typer.Option(
            "--maps",
            metavar="DIR",
            help="Linear maps of languages for all models, or none. Default: those in the folder "
            "of each model.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="RESULTS",
            help="A .jsonl file, or a folder that can be continued and keeps scores of items.",
        ),
    ] = None,
    plot: PlotOption = None,
    device: DeviceOption = "auto",
    seeds: Annotated[
        str,
        typer.Option(
            "--seeds", metavar="SEEDS", help="Number of seeds, such as 5, or a list: 1,2,7."
        ),
    ] = "5",
    jobs: Annotated[
        str,
        typer.Option(
            "--jobs", metavar="N", help="Parallel runs; auto: as many as the GPU's memory allows."
        ),
    ] = "auto",
    setting: Annotated[
        str | None,
        typer.Option(
            "--setting",
            metavar="NAME",
            help="zero-shot, translate-train-all, supervised, directions or features. "
            "Default: zero-shot.",
        ),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--source", metavar="LANG", help="Language of the training examples. Default: en."
        ),
    ] = None,
    protocol: Annotated[
        str | None,
        typer.Option(
            "--protocol",
            metavar="NAME",
            help="Settings of a published evaluation: wu-dredze (pos, ner, parsing, xnli).",
        ),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a setting of the tasks, for example epochs=2. Can be repeated.",
        ),
    ] = None,
    overwrite: OverwriteOption = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the runs and their state; measure nothing.")
    ] = False,
) -> None:
    """Measure models on tasks, by language, layer and seed. All scores are in percent.

    Encoders without training: tatoeba (sentence retrieval), word_alignment (alignment error rate),
    bucc (bitext mining), pos_probe and ner_probe (tagging with a linear classifier trained on
    English). Fine-tuned encoders: pos, ner, parsing, xnli, pawsx, reviews (also by domain:
    reviews_books, reviews_dvd, reviews_music), xquad, mlqa, tydiqa. Encoder-decoders: translation,
    multi30k. Word vectors: lexicon_induction, word_similarity.

    With a folder as RESULTS, an interrupted evaluation continues where it stopped. `calque
    compare` reads files and folders. NAME=MODEL gives a model a name, random:MODEL is the same
    architecture with random weights, and a path with {seed}, such as 'mine=runs/mine-{seed}/model',
    means one model per seed.
    """
    from calque.cli.console import progress_bar
    from calque.cli.score_tables import list_curves, tabulate_scores
    from calque.evaluation.evaluate import evaluate as run_evaluation
    from calque.evaluation.registry import find_tasks
    from calque.evaluation.settings import parse_setting

    names = list(find_tasks(tasks.split(",")))
    if plot is not None:
        _check_plot(plot, names)
    settings: dict[str, Any] = {}
    for text in changes or []:
        name, equals, value = text.partition("=")
        if not equals:
            problem = f"--set {text} has no equals sign"
            raise InputError(problem, fix="write it as in --set epochs=2")
        settings[name.strip()] = parse_setting(name.strip(), value.strip())
    with progress_bar() as progress:
        result = run_evaluation(
            models,
            data=data,
            tasks=names,
            languages=None if languages is None else languages.split(","),
            layers=_parse_layers(layers),
            center=center,
            neutral=neutral,
            maps=maps,
            seeds=parse_seeds(seeds),
            setting=setting,
            source=source,
            protocol=protocol,
            settings=settings,
            output=output,
            overwrite=overwrite,
            dry_run=dry_run,
            device=device,
            jobs=jobs,
            progress=progress,
            log=lambda line: print(line, file=sys.stderr, flush=True),
        )
    if dry_run:
        for run in result.planned:
            tests = "" if run.languages is None else f"\t{' '.join(run.languages)}"
            print(f"{run.state}\t{run.name}\t{run.config}{tests}")
        return
    if output is None or ".jsonl" in output.suffixes:
        _print(*(table for name in names for table in tabulate_scores(name, result.records)))
    if plot is not None:
        from calque.report.plots import plot_layers, save_plot

        label = f"{result.records[0]['metric']} (%)"
        save_plot(plot_layers(list_curves(result.records), label=label), plot)
        print(f"{plot}: {label} by layer", file=sys.stderr)
    _finish(result)


def parse_seeds(text: str) -> int | list[int]:
    """Return a number of seeds, or a list of seeds.

    >>> parse_seeds("3"), parse_seeds("7,11"), parse_seeds("7,")
    (3, [7, 11], [7])
    """
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = []
    if not numbers:
        fix = "use a number of seeds such as 5, or a list such as 1,2,7"
        raise InputError(f"the seeds {text} are invalid", fix=fix)
    return numbers if "," in text else numbers[0]


def _parse_layers(text: str) -> list[int] | None:
    if text == "all":
        return None
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        problem = f"--layers {text} is not a list of numbers"
        raise InputError(problem, fix="use all or numbers such as 4,5") from None


def _check_plot(path: Path, tasks: list[str]) -> None:
    from calque.evaluation.registry import TASKS
    from calque.report.plots import check_plot

    if len(tasks) > 1:
        raise InputError("--plot draws a single task", fix="select one task with --tasks")
    if "layers" not in TASKS[tasks[0]].settings:
        problem = f"{tasks[0]} is not measured by layer"
        raise InputError(problem, fix="omit --plot")
    check_plot(path)


def _finish(result: Evaluation) -> None:
    """Print what was written, and exit with code 1 if runs failed."""
    if result.output is not None:
        output = printable(result.output)
        print(f"{output}: {len(result.records):,} records", file=sys.stderr)
    if result.n_failed:
        print(f"{result.n_failed} runs failed: the same command repeats them", file=sys.stderr)
        raise typer.Exit(1)


def data(
    action: Annotated[str, typer.Argument(metavar="[list | show | check]")] = "list",
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME | DIR]", help="A dataset to show, or a folder to check."),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            "--tasks",
            metavar="NAMES",
            help="Only the datasets of these tasks, separated by commas.",
        ),
    ] = None,
) -> None:
    """List, describe or check the datasets of the tasks.

    Nothing is downloaded. The check reads every file as the tasks do and reports languages,
    splits, numbers of items and what is missing. Invalid files are listed with the line, and the
    exit code is 2.

    \b
    calque data
    calque data show xnli
    calque data check DATA --tasks xnli,pawsx
    """  # noqa: D301 (a backspace keeps the lines of the examples apart)
    from calque.evaluation.datasets import find_dataset, load_datasets

    if action not in ("list", "show", "check"):
        problem = f"calque data has no action {action!r}"
        raise InputError(problem, fix="choose from: list, show, check")
    names = None if tasks is None else [task.strip() for task in tasks.split(",")]
    if action == "list":
        if name is not None:
            problem = f"list takes no argument, but {name!r} is given"
            raise InputError(problem, fix=f"use calque data show {name}")
        _print(_tabulate_datasets(load_datasets(names)))
    elif name is None:
        fix = "calque data show xnli" if action == "show" else "calque data check DIR"
        raise InputError(f"calque data {action} needs an argument", fix=f"write {fix}")
    elif action == "show":
        _show_dataset(name, find_dataset(name))
    else:
        _check_folder(Path(name), names)


def _tabulate_datasets(datasets: dict[str, Dataset]) -> Table:
    from rich.table import Table

    table = Table(title="datasets (details: calque data show NAME)")
    for column in ("name", "tasks", "languages", "license"):
        table.add_column(column, overflow="fold")
    for name, dataset in datasets.items():
        license = dataset.license + (" †" if dataset.non_commercial else "")
        table.add_row(name, " ".join(dataset.tasks), dataset.languages, license)
    table.caption = "† not for commercial use"
    return table


def _show_dataset(name: str, dataset: Dataset) -> None:
    use = " (not for commercial use)" if dataset.non_commercial else ""
    print(f"{name}: {dataset.title}\n\n{dataset.about}\n")
    facts = {
        "languages": dataset.languages,
        "tasks": ", ".join(dataset.tasks),
        "license": dataset.license + use,
        "source": dataset.source,
        "citation": dataset.citation,
    }
    for label, value in facts.items():
        print(f"{label:10} {value}")
    print("\nFiles in your data folder (text files may be compressed: .gz, .xz, .zst):")
    for line in dataset.layout:
        print(f"  {line}")
    if dataset.cautions:
        print("\nNote:")
        for line in dataset.cautions:
            print(f"  {line}")


def _check_folder(folder: Path, tasks: list[str] | None) -> None:
    from calque.cli.console import progress_bar
    from calque.evaluation.dataset_check import check_data
    from calque.evaluation.datasets import load_datasets

    with progress_bar() as progress:
        report = check_data(folder, tasks, progress=progress)
    if not report.found:
        fix = "calque data show NAME lists the file names"
        raise InputError("the folder has no file of a known dataset", file=folder, fix=fix)
    datasets = load_datasets(tasks)
    _print(_summarize(report, datasets))
    absent = [name for name in datasets if not report.files_of(name)]
    if absent:
        print(f"not found: {' '.join(absent)}")
    if report.unknown:
        names = ", ".join(str(path.relative_to(folder)) for path in report.unknown[:SHOWN_UNKNOWN])
        more = ", …" if len(report.unknown) > SHOWN_UNKNOWN else ""
        print(f"{len(report.unknown):,} other files: {printable(names)}{more}")
    problems = report.problems
    for problem in problems[:SHOWN_PROBLEMS]:
        print(f"invalid: {problem}", file=sys.stderr)
    if len(problems) > SHOWN_PROBLEMS:
        print(f"invalid: {len(problems) - SHOWN_PROBLEMS:,} more files", file=sys.stderr)
    if problems:
        raise typer.Exit(2)


def _summarize(report: FolderReport, datasets: dict[str, Dataset]) -> Table:
    """Return a table with a row for every split of every dataset that was found."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title="datasets in the folder")
    for column in ("dataset", "split", "languages", "items", "missing"):
        table.add_column(column, justify="right" if column == "items" else "left", overflow="fold")
    for name in datasets:
        files = report.files_of(name)
        first = True
        for split in dict.fromkeys(file.split for file in files):
            mine = [file for file in files if file.split == split]
            languages = list(dict.fromkeys(f.language for f in mine if f.problem is None))
            shown = " ".join(languages[:SHOWN_LANGUAGES])
            if len(languages) > SHOWN_LANGUAGES:
                shown += f" … ({len(languages)})"
            n_items = sum(file.n_items for file in mine)
            missing = "; ".join(report.missing(name)) if first else ""
            cells = (name if first else "", split, printable(shown), f"{n_items:,}", missing)
            table.add_row(*map(Text, cells))
            first = False
    return table


def _print(*tables: Table) -> None:
    from rich.console import Console

    Console().print(*tables)
