"""`calque evaluate`: how well models do on tasks."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import asdict
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from calque.types import InputError, Score

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rich.table import Table


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
        from calque.cli.grid import GridOptions, evaluate_grid

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

    from calque.tasks.entrants import RANDOM, SEED, name_models
    from calque.tasks.suite import find_tasks, take_vectors
    from calque.text.files import write_atomically

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
    from calque.cli.alignment_tables import tabulate_pair_layers, tabulate_pairs
    from calque.cli.probe_tables import tabulate_probe, tabulate_probe_layers
    from calque.cli.tables import tabulate_languages, tabulate_layers
    from calque.cli.vector_tables import tabulate_correlations, tabulate_precisions
    from calque.tasks import lexicon_induction, tagging_probe, word_alignment, word_similarity

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
    from calque.report.plots import plot_layers, save_plot
    from calque.tasks import retrieval, tagging_probe, word_alignment

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
    from calque.cli.progress import show_progress
    from calque.tasks.suite import take_vectors
    from calque.tools.vector_space import VectorFolder

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
