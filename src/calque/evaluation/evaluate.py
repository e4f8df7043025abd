"""The public function `evaluate`: scores of models on tasks, in a file, a folder or memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from calque.errors import InputError, printable
from calque.evaluation.grid.model_specs import find_models
from calque.evaluation.grid.results_folder import (
    ResultsFolder,
    check_results_folder,
    open_results_folder,
    read_results_folder,
)
from calque.evaluation.grid.run_grid import execute_runs, find_state, plan_grid, select_runs
from calque.evaluation.grid.run_progress import RunProgress
from calque.evaluation.grid.task_run import RunKey, RunResult, TaskRun, build_records
from calque.evaluation.registry import find_tasks
from calque.io.files import check_output_file, check_writable_folder, write_atomically
from calque.io.locks import lock_output
from calque.io.result_records import Record, format_record

if TYPE_CHECKING:
    from calque.types import Progress

# Options that a task must support. Tasks without training may ignore others, and say so.
STRICT = ("layers", "center", "neutral", "similarity")
MAX_SEEDS, SEED_LIMIT = 10_000, 2**63  # torch accepts no larger seeds


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One model on one task with one seed: to do, done, failed, or outdated (other settings)."""

    state: str
    name: str
    config: str
    languages: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Result of `evaluate`.

    Attributes:
        records: One dictionary per model, task, language and seed with the fields of
            results.jsonl. `value` is the main metric in percent, `metrics` has all of them, and
            `layers` has the main metric by layer.
        n_failed: Number of runs that failed.
        n_remaining: Number of runs left when the time limit was reached.
        output: The folder or file that was written.
        planned: All runs and their state, with `dry_run` only.
    """

    records: tuple[Record, ...] = ()
    n_failed: int = 0
    n_remaining: int = 0
    output: Path | None = None
    planned: tuple[PlannedRun, ...] = ()


def evaluate(
    models: str | Path | Sequence[str | Path],
    *,
    data: str | Path,
    tasks: str | Sequence[str] = "tatoeba",
    languages: str | Sequence[str] | None = None,
    layers: Sequence[int] | Literal["all"] | None = None,
    center: bool = False,
    neutral: bool = False,
    maps: str | Path | None = None,
    seeds: int | Sequence[int] = 5,
    setting: str | None = None,
    source: str | None = None,
    protocol: str | None = None,
    settings: Mapping[str, Any] | None = None,
    output: str | Path | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    device: str = "auto",
    jobs: int | str = "auto",
    time_limit: float | None = None,
    progress: Progress | None = None,
    log: Callable[[str], None] | None = None,
) -> Evaluation:
    """Measure models on tasks, by language and seed; all scores are in percent.

    Args:
        models: Model folders, hub names or `calque-mini`; folders with files de.vec, en.vec, ...
            for tasks of word vectors. `NAME=MODEL` gives a model a name, `random:MODEL` means
            random weights, and a path with `{seed}` means one model per seed.
        data: Folder with the datasets (see `check_data`).
        tasks: Names of tasks, separated by commas if it is one string.
        languages: Languages such as `de` or pairs such as `de-en`, separated by commas if it is one
            string. Default: all with a test.
        layers: Layers to measure in tasks without training. Default: `all`. The score is that of
            the model's best layer (or the one nearest to it), the others are in `layers`.
        center: Subtract the mean vector of each language (tatoeba).
        neutral: Use the language-neutral space stored with the model (tatoeba).
        maps: Folder with linear maps of languages for all models, or `none`. Default: the maps in
            the folder of each model, if there are any. Fine-tuned tasks apply them with
            `setting="features"`.
        seeds: Number of seeds, or the seeds, for fine-tuned tasks and random weights.
        setting: zero-shot (default), translate-train-all, supervised, directions or features.
        source: Language of the training examples. Default: en.
        protocol: Settings of a published evaluation for fine-tuned tasks: `wu-dredze` (pos, ner,
            parsing, xnli), with frozen features for models that have linear maps.
        settings: Other fields of `TaskSettings`, such as `{"epochs": 2}`.
        output: A new .jsonl file for the records, or a folder that also keeps the scores of test
            items. Only a folder can be continued: finished runs are not repeated.
        overwrite: Repeat runs of the folder that were made with other settings, languages, data or
            weights, or replace the file.
        dry_run: Only list the runs and their state.
        device: `auto`, `cpu`, `cuda`, `cuda:1`, ...
        jobs: Parallel processes. `auto` is as many as the GPU's memory allows for a folder, and
            this process otherwise; 0 is this process.
        time_limit: Stop after this many seconds; unfinished runs are abandoned.
        progress: Called with the percentage of all runs that is done.
        log: Called with one line for every finished run, note or warning.

    Returns:
        The records of all requested runs. Without an output folder, the first error is raised;
        with one, it is part of the records.

    Examples:
        >>> result = calque.evaluate("calque-mini", data="data", tasks="tatoeba")  # doctest: +SKIP
        >>> [(record["language"], record["value"]) for record in result.records]  # doctest: +SKIP
        [('de', 95.1), ('fr', 93.8)]
    """
    log = log or (lambda line: None)
    chosen = dict(settings or {})
    if layers is not None and layers != "all":
        chosen["layers"] = tuple(layers)
    if isinstance(languages, str):
        languages = languages.split(",")
    switches = {"center": center, "neutral": neutral, "setting": setting, "source": source}
    for name, value in switches.items():
        if value:
            chosen[name] = value
    found = find_tasks(tasks.split(",") if isinstance(tasks, str) else tasks)
    for task_name, task in found.items():
        strict = [name for name in STRICT if chosen.get(name)]
        if chosen.get("plug") == "in" and not task.trained:  # trained tasks check it themselves
            strict.append("plug")
        for name in strict:
            if name not in task.settings:
                problem = f"{task_name} does not support {name}"
                raise InputError(problem, fix=f"omit {name}, or evaluate that task separately")
        ignored = [] if task.trained else [name for name in chosen if name not in task.settings]
        if ignored:
            log(f"{task_name} ignores {', '.join(ignored)}")
    n_jobs = _check_jobs(jobs)
    _check_device(device)
    target = None if output is None else Path(output)
    is_folder = target is not None and ".jsonl" not in target.suffixes
    if target is not None:
        _check_output(target, is_folder=is_folder, dry_run=dry_run, overwrite=overwrite)
    seed_list = _list_seeds(seeds)
    names = [models] if isinstance(models, str | Path) else models
    runs, notes = plan_grid(
        find_models(
            [str(name) for name in names],
            vectors=any(task.model == "vectors" for task in found.values()),
            seeds=seed_list,
            maps=None if maps is None else str(maps),
        ),
        found,
        seed_list,
        Path(data),
        languages=languages,
        settings=chosen,
        protocol=protocol,
    )
    for line in notes:
        log(line)
    if dry_run:
        known = read_results_folder(target) if target is not None and is_folder else {}
        return Evaluation(
            planned=tuple(
                PlannedRun(find_state(run, known.get(run.key)), str(run), run.config, run.languages)
                for run in runs
            )
        )
    deadline = None if time_limit is None else time.monotonic() + time_limit
    with ExitStack() as stack:
        # The output is opened first, so that an invalid path is an error before the work.
        results: ResultsFolder | _Records = _Records()
        pending, stream = runs, None
        if target is not None and is_folder:
            results = folder = stack.enter_context(open_results_folder(target))
            pending = select_runs(runs, folder, overwrite=overwrite)
            for line in (*folder.repairs, _describe_plan(runs, pending, folder)):
                log(line)
        if target is not None and not is_folder:
            stack.enter_context(lock_output(target))
            stream = stack.enter_context(write_atomically(target, binary=True))
        report = RunProgress(pending, results.records, log, progress)
        try:
            execute_runs(
                pending,
                results.add,
                report,
                device=device,
                n_jobs=n_jobs if is_folder else n_jobs or 0,
                deadline=deadline,
                raise_errors=not is_folder,
            )
        except KeyboardInterrupt as interruption:
            if is_folder:
                n_saved = len(runs) - len(pending) + report.n_done
                interruption.add_note(
                    f"{n_saved} of {len(runs)} runs are saved in {printable(target)}: "
                    "the same command continues"
                )
            raise
        records = [record for run in runs for record in results.runs.get(run.key, ())]
        if stream is not None:
            stream.writelines(map(format_record, records))
    return Evaluation(tuple(records), report.n_failed, report.n_runs - report.n_done, target)


class _Records:
    """Keeps the records of runs in memory, as `ResultsFolder` does in a folder."""

    def __init__(self) -> None:
        self.runs: dict[RunKey, list[Record]] = {}

    @property
    def records(self) -> list[Record]:
        return [record for records in self.runs.values() for record in records]

    def add(self, run: TaskRun, result: RunResult) -> list[Record]:
        self.runs[run.key] = build_records(run, result, with_items=False)
        return self.runs[run.key]


def _describe_plan(
    runs: Sequence[TaskRun], pending: Sequence[TaskRun], results: ResultsFolder
) -> str:
    line = f"{len(pending)} runs to do"
    if n_repeated := sum(run.key in results.runs for run in pending):
        line += f", {n_repeated} of them again"
    return line + (f"; {len(runs) - len(pending)} are done" if len(pending) < len(runs) else "")


def _check_output(path: Path, *, is_folder: bool, dry_run: bool, overwrite: bool) -> None:
    """Raise an InputError if results cannot be written to a path."""
    if is_folder:
        check_results_folder(path)
        if not dry_run:
            check_writable_folder(path)
        return
    check_output_file(path, ())
    if path.is_file() and path.stat().st_size and not (overwrite or dry_run):
        problem = "the file exists already"
        raise InputError(problem, file=path, fix="choose another name, or replace it: --overwrite")


def _list_seeds(seeds: int | Sequence[int]) -> list[int]:
    if isinstance(seeds, int) and seeds > MAX_SEEDS:
        raise InputError(f"{seeds} seeds are too many", fix=f"use at most {MAX_SEEDS:,}")
    found = list(range(1, seeds + 1)) if isinstance(seeds, int) else list(seeds)
    is_valid = bool(found) and min(found) >= 0 and max(found) < SEED_LIMIT
    if not is_valid or len(set(found)) < len(found):
        problem = f"the seeds {seeds} are invalid"
        raise InputError(problem, fix="use a number of seeds such as 5, or a list such as 1,2,7")
    return found


def _check_jobs(jobs: int | str) -> int | None:
    """Return the number of processes; None means chosen by memory."""
    if jobs == "auto":
        return None
    if not str(jobs).isdecimal() or len(str(jobs)) > 4:
        raise InputError(f"jobs {jobs!r} is not a number", fix="use auto or a number such as 4")
    return int(jobs)


def _check_device(name: str) -> None:
    """Raise an InputError for a device that does not exist, without using its memory."""
    if name in ("auto", "cpu"):
        return
    import torch

    kind, _, number = name.partition(":")
    n_devices = torch.cuda.device_count() if kind == "cuda" else 0
    known = ["", *map(str, range(n_devices))] if n_devices else []
    if number not in known:
        problem = f"the device {name!r} does not exist: there are {n_devices} GPUs"
        raise InputError(problem, fix="use auto, cpu or cuda")
