"""`calque data`: which datasets there are, where they come from, and whether a folder is right."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from calque.types import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from calque.tasks.dataset_check import FolderReport
    from calque.tasks.dataset_kinds import Dataset

ACTIONS = ("list", "show", "check")
SHOWN_LANGUAGES, SHOWN_PROBLEMS, SHOWN_UNKNOWN = 12, 50, 3


def data(
    action: Annotated[str, typer.Argument(metavar="[list | show | check]")] = "list",
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME | DIR]", help="A dataset to show, or a folder to check."),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Only datasets of these tasks, separated by commas."),
    ] = None,
) -> None:
    """List the datasets that tasks read, or check a folder of them.

    Nothing is downloaded. A check reads every file as the tasks do: which languages and splits are
    there, how many items, what is missing. A malformed file is named with its line, and the exit
    code is 2.

    \b
    calque data
    calque data show xnli
    calque data check DATA --tasks xnli,pawsx
    """  # noqa: D301 (a backspace keeps the lines of the examples apart)
    from calque.cli.aligner_options import check_choice
    from calque.tasks.dataset_catalog import DATASETS
    from calque.tasks.datasets import datasets_of, find_dataset

    check_choice("calque data", action, ACTIONS)
    known = datasets_of([task.strip() for task in tasks.split(",")]) if tasks else DATASETS
    if action != "list" and name is None:
        what = "a dataset: calque data show xnli" if action == "show" else "a folder"
        raise InputError(f"calque data {action} of what?", fix=f"name {what}")
    if action == "list":
        if name is not None:
            raise InputError(f"{name!r} after list", fix=f"say calque data show {name}")
        _print(_list_sets(known))
    elif action == "show":
        _show(name or "", find_dataset(name or ""))
    else:
        _check(Path(name or ""), known)


def _list_sets(known: dict[str, Dataset]) -> Table:
    from rich.table import Table

    table = Table(title="datasets (calque data show NAME tells more)")
    for column in ("name", "tasks", "languages", "licence"):
        table.add_column(column, overflow="fold")
    for name, dataset in known.items():
        licence = dataset.licence + (" †" if dataset.non_commercial else "")
        table.add_row(name, " ".join(dataset.tasks), dataset.languages, licence)
    table.caption = "† not for commercial use"
    return table


def _show(name: str, dataset: Dataset) -> None:
    use = " (not for commercial use)" if dataset.non_commercial else ""
    print(f"{name}: {dataset.title}\n\n{dataset.about}\n")
    facts = [
        ("languages", dataset.languages),
        ("tasks", ", ".join(dataset.tasks)),
        ("licence", dataset.licence + use),
        ("source", dataset.source),
        ("cite", dataset.citation),
    ]
    for label, value in facts:
        print(f"{label:10} {value}")
    print("\nin your data folder (plain, .gz, .xz or .zst where tasks read text):")
    for line in dataset.layout:
        print(f"  {line}")
    if dataset.cautions:
        print("\nmind:")
        for line in dataset.cautions:
            print(f"  {line}")


def _check(folder: Path, known: dict[str, Dataset]) -> None:
    from calque.cli.progress import show_progress
    from calque.tasks.dataset_check import check_folder, list_files

    with show_progress("reading", len(list_files(folder))) as advance:
        report = check_folder(folder, known, advance)
    if not report.found:
        fix = "see calque data show NAME for the names files must have"
        raise InputError("no file of a known dataset here", file=folder, fix=fix)
    _print(_summarize(report, known))
    absent = [name for name in known if not report.of(name)]
    if absent:
        print(f"not here: {' '.join(absent)}")
    if report.unknown:
        names = ", ".join(str(path.relative_to(folder)) for path in report.unknown[:SHOWN_UNKNOWN])
        more = ", …" if len(report.unknown) > SHOWN_UNKNOWN else ""
        print(f"{len(report.unknown):,} other files: {names}{more}")
    problems = report.problems
    for problem in problems[:SHOWN_PROBLEMS]:
        print(f"malformed: {problem}", file=sys.stderr)
    if len(problems) > SHOWN_PROBLEMS:
        print(f"malformed: {len(problems) - SHOWN_PROBLEMS:,} more files", file=sys.stderr)
    if problems:
        raise typer.Exit(2)


def _summarize(report: FolderReport, known: dict[str, Dataset]) -> Table:
    """Give a row to every split of every dataset that is there."""
    from rich.table import Table

    table = Table(title="what is here")
    for column in ("dataset", "split", "languages", "items", "missing"):
        table.add_column(column, justify="right" if column == "items" else "left", overflow="fold")
    for name in known:
        files = report.of(name)
        first = True
        for split in dict.fromkeys(file.split for file in files):
            mine = [file for file in files if file.split == split]
            languages = dict.fromkeys(file.language for file in mine if file.problem is None)
            n_items = sum(file.n_items for file in mine)
            note = "; ".join(report.missing(name)) if first else ""
            table.add_row(
                name if first else "", split, _shorten(list(languages)), f"{n_items:,}", note
            )
            first = False
    return table


def _shorten(languages: list[str]) -> str:
    shown = " ".join(languages[:SHOWN_LANGUAGES])
    return shown if len(languages) <= SHOWN_LANGUAGES else f"{shown} … ({len(languages)})"


def _print(table: Table) -> None:
    from rich.console import Console

    Console().print(table)
