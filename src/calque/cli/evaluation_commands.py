"""`calque evaluate`: how well models do on tasks.

`calque compare`: did it help, where, and is it more than noise?

`calque data`: which datasets there are, where they come from, and whether a folder is right.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from calque.errors import InputError
from calque.types import Score

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.table import Table

    from calque.evaluation.dataset_check import FolderReport
    from calque.evaluation.datasets import Dataset
    from calque.report.results import Results
    from calque.report.study import Judging, Study


def evaluate(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL…", help="Model folders, hub names, calque-mini; or folders of xx.vec."
        ),
    ],
    data: Annotated[
        Path, typer.Option(envvar="CALQUE_DATA", help="The folder with the test sets.")
    ],
    tasks: Annotated[str, typer.Option(help="Names, separated by commas.")] = "tatoeba",
    languages: Annotated[
        str | None, typer.Option(help="Such as de,fr,ceb or de-en; by default all there are.")
    ] = None,
    layers: Annotated[str, typer.Option(help="all, or numbers: 4,5,-1.")] = "all",
    center: Annotated[
        bool, typer.Option("--center", help="Subtract each language's mean vector first.")
    ] = False,
    neutral: Annotated[
        bool, typer.Option("--neutral", help="Score what `embed` gives, in the neutral space.")
    ] = False,
    maps: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Map states by language first: a folder, or `beside`."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="RESULTS", help="A folder for a grid, or scores in a .jsonl."
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="PICTURE", help="Draw models layer by layer: .png, .svg or .pdf."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 …")] = "auto",
    seeds: Annotated[
        str | None, typer.Option(help="Of a grid: how many, 5, or which, 1,2,7.")
    ] = None,
    jobs: Annotated[
        str, typer.Option(help="Of a grid: cells at a time on the device, or auto, by memory.")
    ] = "auto",
    setting: Annotated[
        str | None,
        typer.Option(help="Of a grid: zero-shot, translate-train-all, supervised, features."),
    ] = None,
    source: Annotated[
        str | None, typer.Option(help="Of a grid: the language that is learnt from.")
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Of a grid: a task's setting; repeatable."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Of a grid: do cells again that were done otherwise.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Of a grid: list the cells and do nothing.")
    ] = False,
) -> None:
    """Score models on tasks, by language, layer and seed.

    Tasks of encoders: tatoeba (finding translations), word_alignment (error rate of word links),
    pos_probe and ner_probe (parts of speech and names, by a linear classifier of states that
    learns from English).
    Tasks of folders with static vectors in one space, a file a language, such as `calque map`
    writes: lexicon_induction (finding words' translations), word_similarity (against people's).

    With --seeds, or a folder as RESULTS, these and tasks that are learnt (pos, ner, parsing, xnli,
    pawsx, reviews, xquad, mlqa, tydiqa), bucc (mining), translation and multi30k (of
    encoder–decoders) make a grid of models, tasks and seeds, which goes on where it was stopped and
    which `calque compare` reads. There, `random:NAME` is a model with random weights, and a folder
    with {seed} in it, such as 'weak=runs/weak-{seed}/model', one model a seed: training runs of one
    recipe. NAME=FOLDER gives a model a name.
    """
    names = None if languages is None else [name.strip() for name in languages.split(",")]
    if seeds is not None or (output is not None and ".jsonl" not in output.suffixes):
        from calque.cli.grid_progress import GridOptions, evaluate_grid

        _refuse_in_grid(output, layers, plot, maps, center=center, neutral=neutral)
        assert output is not None
        return evaluate_grid(
            models,
            GridOptions(
                data=data,
                tasks=tasks,
                languages=names,
                seeds=seeds,
                output=output,
                jobs=jobs,
                device=device,
                setting=setting,
                source=source,
                changes=changes or [],
                force=force,
                dry_run=dry_run,
            ),
        )
    _refuse_outside_grid(setting, source, changes, force=force, dry_run=dry_run)
    return _evaluate_layers(
        models, data, tasks, names, layers, center, neutral, maps, output, plot, device
    )


def _refuse_in_grid(
    output: Path | None,
    layers: str,
    plot: Path | None,
    maps: str | None,
    **switches: bool,
) -> None:
    """Refuse what belongs to scores layer by layer."""
    if output is None or ".jsonl" in output.suffixes:
        raise InputError("a grid needs a folder", fix="add -o FOLDER")
    given = {"layers": layers != "all", "plot": plot is not None, "maps": maps is not None}
    for name, is_given in (given | switches).items():
        if is_given:
            fix = "choose a layer with --set layer=N" if name == "layers" else "drop it"
            raise InputError(f"a grid knows no --{name}", fix=fix)


def _refuse_outside_grid(
    setting: str | None, source: str | None, changes: list[str] | None, **switches: bool
) -> None:
    """Refuse what would be passed over in silence."""
    given = {"setting": setting is not None, "source": source is not None, "set": bool(changes)}
    for name, is_given in (given | switches).items():
        if is_given:
            shown = name.replace("_", "-")
            raise InputError(f"--{shown} is of a grid", fix="add -o FOLDER")


def _evaluate_layers(
    models: list[str],
    data: Path,
    tasks: str,
    names: list[str] | None,
    layers: str,
    center: bool,
    neutral: bool,
    maps: str | None,
    output: Path | None,
    plot: Path | None,
    device: str,
) -> None:
    """Score models as they are, layer by layer, into tables and one file."""
    from rich.console import Console

    from calque.evaluation.grid.model_specs import RANDOM, SEED, name_models
    from calque.evaluation.registry import find_tasks, take_vectors
    from calque.io.files import write_atomically

    asked, numbers = find_tasks(tasks), _parse_layers(layers)
    if neutral and (center or numbers is not None):
        raise InputError("--neutral has its own layer", fix="drop --layers and --center")
    places = name_models(models)
    for place in places.values():
        if place.startswith(RANDOM) or SEED in place:
            raise InputError("models of seeds are of a grid", file=place, fix="add -o FOLDER")
    of_vectors = take_vectors(asked)
    options: dict[str, object] = {"data": data, "languages": names}
    if not of_vectors:
        options["layers"] = numbers
    elif numbers is not None or plot is not None:
        raise InputError("word vectors have no layers", fix="drop --layers and --plot")
    options |= _accept(asked, {"center": center, "neutral": neutral, "maps": bool(maps)})
    if plot is not None:
        _check_plot(plot, asked)
    with nullcontext() if output is None else write_atomically(output) as stream:
        scores: list[Score] = []
        for name, place in places.items():
            scores += _score_model(name, place, device, asked, options, maps)
        if stream is not None:
            stream.writelines(json.dumps(asdict(score)) + "\n" for score in scores)
    for task in asked:
        Console().print(*_tabulate(task, [score for score in scores if score.task == task]))
    if numbers is None and not neutral and not of_vectors:
        print("The layer shown by language is the best on this test: fix it with --layers N.")
    if output is not None:
        print(f"{output}: {len(scores):,} scores", file=sys.stderr)
    if plot is not None:
        _draw(scores, plot)


def _accept(
    tasks: Mapping[str, Callable[..., list[Score]]], switches: Mapping[str, bool]
) -> dict[str, bool]:
    """Take the switches that are on, if every task knows them."""
    chosen: dict[str, bool] = {name: value for name, value in switches.items() if value}
    for task, score in tasks.items():
        for name in chosen.keys() - signature(score).parameters.keys():
            raise InputError(f"{task} knows no --{name}", fix="drop it, or ask for that task alone")
    return chosen


def _tabulate(task: str, scores: list[Score]) -> tuple[Table, ...]:
    from calque.cli.console_tables import (
        tabulate_correlations,
        tabulate_languages,
        tabulate_layers,
        tabulate_pair_layers,
        tabulate_pairs,
        tabulate_precisions,
        tabulate_probe,
        tabulate_probe_layers,
    )
    from calque.evaluation.tasks import alignment_error as word_alignment
    from calque.evaluation.tasks import lexicon_induction, tagging_probe, word_similarity

    if task == lexicon_induction.TASK:
        return (tabulate_precisions(scores),)
    if task == word_similarity.TASK:
        return (tabulate_correlations(scores),)
    if task == word_alignment.TASK:
        return tabulate_pairs(scores), tabulate_pair_layers(scores)
    if task in tagging_probe.MAIN_METRICS:
        return tabulate_probe(scores), tabulate_probe_layers(scores)
    return tabulate_languages(scores), tabulate_layers(scores)


def _check_plot(path: Path, tasks: Mapping[str, object]) -> None:
    from calque.report.plots import check_plot

    if len(tasks) > 1:
        raise InputError("--plot draws one task", fix="ask for one with --tasks")
    check_plot(path)


def _draw(scores: list[Score], path: Path) -> None:
    from calque.evaluation.tasks import alignment_error as word_alignment
    from calque.evaluation.tasks import tagging_probe
    from calque.evaluation.tasks import tatoeba as retrieval
    from calque.report.plots import plot_layers, save_plot

    main = {word_alignment.TASK: ("aer", "AER (%)")}
    main |= {task: (m, f"{m} (%)") for task, m in tagging_probe.MAIN_METRICS.items()}
    metric, label = main.get(scores[0].task, (retrieval.METRICS[0], "accuracy to English (%)"))
    save_plot(plot_layers(scores, metric, label=label), path)
    print(f"{path}: {label} by layer", file=sys.stderr)


def _score_model(
    model: str,
    place: str,
    device: str,
    tasks: Mapping[str, Callable[..., list[Score]]],
    options: Mapping[str, object],
    maps: str | None,
) -> list[Score]:
    from calque.api import choose_device, load
    from calque.cli.console import show_progress
    from calque.evaluation.registry import take_vectors
    from calque.vectors.static import VectorFolder

    of_vectors = take_vectors(tasks)
    scored = (
        VectorFolder(Path(place), choose_device(device))
        if of_vectors
        else load(place, device, maps=maps)
    )
    scores = []
    for task in tasks.values():
        with show_progress(model, None) as advance:
            scores += task(scored, model=model, on_language=lambda _: advance(1), **options)
    return scores


def _parse_layers(text: str) -> list[int] | None:
    if text == "all":
        return None
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise InputError(f"--layers {text} is no list of numbers", fix="try all or 4,5") from None


SUFFIXES = (".html", ".md", ".tex", ".csv")
FEWEST_RESAMPLES = 100
FILE_WIDTH, WIDEST = 160, 10_000


def compare(
    results: Annotated[
        list[Path],
        typer.Argument(metavar="RESULTS…", help="Folders that `calque evaluate -o` wrote."),
    ],
    baseline: Annotated[str, typer.Option(metavar="NAME", help="The model to compare with.")],
    models: Annotated[
        str | None, typer.Option(help="Names, separated by commas; by default all others.")
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(help="Names, separated by commas; by default all there are.")
    ] = None,
    correction: Annotated[
        str, typer.Option(help="For many comparisons: holm, bh (Benjamini-Hochberg) or none.")
    ] = "holm",
    output: Annotated[
        list[Path] | None,
        typer.Option("--output", "-o", metavar="FILE", help=".html, .md, .tex or .csv; repeat it."),
    ] = None,
    alpha: Annotated[float, typer.Option(help="The level of tests; intervals have 1 - alpha.")] = (
        0.05
    ),
    bootstrap: Annotated[int, typer.Option(help="How often test items are resampled.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Where resampling starts.")] = 0,
    brief: Annotated[
        bool, typer.Option("--brief", help="Show the verdicts, no tables by language.")
    ] = False,
) -> None:
    """Say whether models do better than a baseline, or it is noise.

    A model helps or hurts only where the difference stands out from seeds, from test items, and
    from both together, after correction for the number of comparisons. All else is noise, or
    cannot be told.
    """
    from calque.report.results import read_results
    from calque.report.statistics import CORRECTIONS, check_scipy
    from calque.report.study import Judging

    if correction not in CORRECTIONS:
        fix = f"choose from: {', '.join(CORRECTIONS)}"
        raise InputError(f"no correction is called {correction!r}", fix=fix)
    if not 0 < alpha < 0.5:
        raise InputError(f"--alpha {alpha:g} is no level", fix="give one between 0 and 0.5")
    if bootstrap < FEWEST_RESAMPLES:
        fix = f"give {FEWEST_RESAMPLES} or more"
        raise InputError(f"--bootstrap {bootstrap} is too few to tell anything", fix=fix)
    if seed < 0:
        raise InputError(f"--seed {seed} is below 0", fix="give 0 or more")
    check_scipy()
    outputs = list(dict.fromkeys(output or []))
    _check_outputs(outputs)
    judging = Judging(alpha, correction, bootstrap, seed)
    found = read_results(results)
    study = _make_study(found, baseline, _split(models), _split(tasks), judging)
    _show(study, by_language=not brief)
    _write(study, outputs)


def _make_study(
    results: Results,
    baseline: str,
    models: Sequence[str] | None,
    tasks: Sequence[str] | None,
    judging: Judging,
) -> Study:
    from calque.cli.console import show_progress
    from calque.report.study import make_study

    with show_progress("comparing", len(tasks or results.tasks)) as advance:
        return make_study(
            results,
            baseline,
            models=models,
            tasks=tasks,
            judging=judging,
            on_progress=lambda done, total: advance(1),
        )


def _show(study: Study, *, by_language: bool) -> None:
    from rich.console import Console

    from calque.report.tables import (
        ResultTable,
        drop_column,
        list_sentences,
        tabulate_task,
        tabulate_verdicts,
        to_rich,
    )

    console = Console()
    if not console.is_terminal:
        console.width = FILE_WIDTH

    def is_wide(table: ResultTable) -> bool:
        free = console.options.update(width=WIDEST)
        return console.measure(to_rich(table), options=free).maximum > console.width

    for note in study.notes:
        print(f"calque: mind: {note}", file=sys.stderr)
    for task in study.tasks if by_language else ():
        tables = [tabulate_task(study, task)]
        if is_wide(tables[0]):
            tables = [tabulate_task(study, task, [model]) for model in task.models]
        console.print(*map(to_rich, tables))
    verdicts = tabulate_verdicts(study)
    while is_wide(verdicts) and verdicts.spare:
        verdicts = drop_column(verdicts, verdicts.spare[0])
    console.print(to_rich(verdicts))
    for line in list_sentences(study):
        print(line)


def _write(study: Study, outputs: Sequence[Path]) -> None:
    """Make all files before the first is written."""
    from calque.io.files import write_atomically
    from calque.report.page import make_page
    from calque.report.tables import to_csv, to_latex, to_markdown

    makers: dict[str, Callable[[Study], str]] = dict(
        zip(SUFFIXES, (make_page, to_markdown, to_latex, to_csv), strict=True)
    )
    texts = {path: makers[path.suffix](study) for path in outputs}
    for path, text in texts.items():
        with write_atomically(path) as stream:
            stream.write(text)
    if texts:
        n = sum(len(task.models) for task in study.tasks)
        print(f"{', '.join(map(str, texts))}: {n} verdicts", file=sys.stderr)


def _check_outputs(paths: Sequence[Path]) -> None:
    for path in paths:
        if path.suffix not in SUFFIXES:
            fix = f"name it {path.stem or 'report'}.html, .md, .tex or .csv"
            raise InputError(f"no comparison is written as {path.suffix!r}", file=path, fix=fix)
        if not path.parent.is_dir():
            raise InputError("its folder does not exist", file=path, fix=f"mkdir -p {path.parent}")


def _split(names: str | None) -> list[str] | None:
    if names is None:
        return None
    found = [name.strip() for name in names.split(",") if name.strip()]
    if not found:
        raise InputError("no name was given", fix="separate names by commas, or leave it out")
    return found


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
    from calque.evaluation.datasets import DATASETS, datasets_of, find_dataset

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
        _show_data(name or "", find_dataset(name or ""))
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


def _show_data(name: str, dataset: Dataset) -> None:
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
    from calque.cli.console import show_progress
    from calque.evaluation.dataset_check import check_folder, list_files

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
