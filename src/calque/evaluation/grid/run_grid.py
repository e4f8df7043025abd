"""The grid of an evaluation: models × tasks × seeds, planned and executed in parts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from calque.errors import InputError
from calque.evaluation.grid.model_specs import find_data, hash_files
from calque.evaluation.grid.runner import RunAdvanced, Runner, Worker, receive_from
from calque.evaluation.grid.task_run import TaskRun, describe_changes, hash_settings
from calque.evaluation.registry import load_function
from calque.evaluation.settings import build_settings, find_protocol
from calque.io.xtreme import two_letter_code

if TYPE_CHECKING:
    from calque.evaluation.grid.model_specs import ModelSpec
    from calque.evaluation.grid.results_folder import ResultsFolder
    from calque.evaluation.grid.task_run import RunResult
    from calque.evaluation.registry import Task
    from calque.evaluation.settings import TaskSettings
    from calque.io.result_records import Record

CONTEXT_MB = 700  # memory of a CUDA process that does nothing
MEMORY_MARGIN = 1.25  # batches and tasks differ in size
MAX_JOBS = 8


@dataclass(frozen=True, slots=True)
class RunStarted:
    """A run has started; `n_jobs` runs are executed in parallel."""

    run: TaskRun
    n_jobs: int


@dataclass(frozen=True, slots=True)
class RunSaved:
    """The records of a run have been saved."""

    run: TaskRun
    result: RunResult
    records: Sequence[Record]


Event: TypeAlias = RunStarted | RunAdvanced | RunSaved
SaveResult: TypeAlias = Callable[[TaskRun, "RunResult"], Sequence["Record"]]


def plan_grid(
    models: Sequence[ModelSpec],
    tasks: Mapping[str, Task],
    seeds: Sequence[int],
    data: Path,
    *,
    languages: Sequence[str] | None = None,
    settings: Mapping[str, Any] | None = None,
    protocol: str | None = None,
) -> tuple[list[TaskRun], list[str]]:
    """Return the runs of a grid, task by task and model by model, and notes on missing tests.

    A task without training has one run per model, or one per seed if the weights are random. A
    model from a training run with its own seed has a single run with that seed. Languages without
    a test are left out; a language for which no task has a test is an error. A `protocol` has its
    own settings for the frozen encoders of models with linear maps.
    """
    if not data.is_dir():
        raise InputError("the folder does not exist", file=data, fix="check --data")
    chosen = dict(settings or {})
    hashes = {model: model.hash() for model in models}
    runs: list[TaskRun] = []
    missing: dict[str, list[str]] = {}
    for name, task in tasks.items():
        settings_of = {m: choose_settings(m, name, task, chosen, protocol) for m in models}
        tests_of: dict[str, tuple[str, ...] | None] = {}
        for key, own in {own.hash(): own for own in settings_of.values()}.items():
            tests_of[key], missing[name] = choose_languages(name, task, data, own, languages)
        files = find_data(data, task.files)
        if not files:
            problem = f"the folder has no files of {name}"
            fix = f"pass a folder with {' or '.join(task.files)}"
            raise InputError(problem, file=data, fix=fix)
        data_hash = hash_files(files)
        for model, own in settings_of.items():
            tests = tests_of[own.hash()]
            config = "-".join((hash_settings(name, task, own, tests), data_hash, hashes[model]))
            if model.seed is not None:
                own_seeds: Sequence[int | None] = [model.seed]
            else:
                own_seeds = seeds if task.trained or model.kind == "random" else [None]
            runs += [
                TaskRun(model, name, task, seed, data, tests, own, config) for seed in own_seeds
            ]
    for language in set.intersection(*map(set, missing.values())):
        raise InputError(f"no task has a test for {language!r}", file=data, fix="check --languages")
    notes = [
        f"{name} has no test for {' '.join(lacks)}" for name, lacks in missing.items() if lacks
    ]
    return runs, notes


def choose_settings(
    model: ModelSpec, name: str, task: Task, chosen: Mapping[str, Any], protocol: str | None
) -> TaskSettings:
    """Return the settings of a model on a task: those chosen, a protocol's, or the defaults."""
    default = "zero-shot" if model.maps is None else "features"
    frozen = chosen.get("setting", default) == "features"
    published = find_protocol(protocol, name, frozen=frozen)
    settings = build_settings(task.defaults, published, chosen)
    check_maps_apply(model, name, task, settings)
    return settings


def check_maps_apply(model: ModelSpec, name: str, task: Task, settings: TaskSettings) -> None:
    """Raise an InputError if a model has linear maps that a task would not apply."""
    if model.maps is None:
        return
    problem, fix = "", "leave out the maps with --maps none"
    if task.model != "encoder":
        problem = f"{name} does not support maps"
    elif task.trained and not settings.is_frozen:
        problem = f"{name} would change the encoder of {model.name}, which its maps do not fit then"
        fix = f"use --setting features, or {fix}"
    elif settings.neutral:
        problem = "a language-neutral space cannot be combined with maps"
    if problem:
        raise InputError(problem, file=model.maps, fix=fix)


def choose_languages(
    name: str, task: Task, data: Path, settings: TaskSettings, asked: Sequence[str] | None
) -> tuple[tuple[str, ...] | None, list[str]]:
    """Return the tests of a task in the languages asked for, and the languages without a test.

    A pair such as de-en is a test of both languages. English is never missing, since it is the
    other side or the source of most tests.
    """
    if task.languages is None:
        return None if asked is None else tuple(asked), []
    try:
        known: list[str] = load_function(task.languages, name)(data, settings)
    except InputError as error:
        if error.file is not None or error.__class__ is not InputError:
            raise
        raise InputError(f"{name}: {error.problem}", file=data, fix=error.fix) from None
    if asked is None:
        return tuple(known), []
    names = list(dict.fromkeys(two_letter_code(each.strip()) for each in asked))
    tests = tuple(test for test in known if is_asked(test, names))
    if not tests:
        problem = f"{name} has no test for {' '.join(names)}"
        raise InputError(problem, file=data, fix=f"choose from: {' '.join(known)}")
    covered = {part for test in tests for part in (test, *test.split("-"))}
    return tests, [each for each in names if each not in {*covered, "en"}]


def is_asked(test: str, languages: Sequence[str]) -> bool:
    """Return whether a test is in the languages asked for; in a pair, English need not be asked.

    >>> [is_asked("de-en", asked) for asked in (["de"], ["de-en"], ["de", "en"], ["en", "fr"])]
    [True, True, True, False]
    >>> is_asked("en", ["de"]), is_asked("en", ["de", "en"])
    (False, True)
    """
    others = set(test.split("-")) - {"en"}
    return test in languages or (bool(others) and others <= set(languages))


def find_state(run: TaskRun, records: Sequence[Record] | None) -> str:
    """Return the state of a run in a results folder: "to do", "done", "failed" or "outdated".

    A run is outdated if its records were made with other settings, data or weights.
    """
    if not records:
        return "to do"
    if records[0]["config"] != run.config:
        return "outdated"
    return "failed" if any(record["error"] for record in records) else "done"


def select_runs(
    runs: Iterable[TaskRun], results: ResultsFolder, *, overwrite: bool = False
) -> list[TaskRun]:
    """Return the runs that are not done; failed runs are repeated.

    An outdated run is an error, or repeated with `overwrite`: results of two configurations in one
    folder would be compared as if they had the same one.
    """
    selected = []
    for run in runs:
        state = find_state(run, results.runs.get(run.key))
        if state == "outdated" and not overwrite:
            changes = describe_changes(results.runs[run.key][0]["config"], run.config)
            problem = f"the results of {run} were made with other {changes}"
            fix = "use a new folder, or repeat such runs with --overwrite"
            raise InputError(problem, file=results.path, fix=fix)
        if state != "done":
            selected.append(run)
    return selected


def execute_runs(
    runs: Sequence[TaskRun],
    save: SaveResult,
    on_event: Callable[[Event], None] = lambda event: None,
    *,
    device: str = "auto",
    n_jobs: int | None = 1,
    deadline: float | None = None,
    raise_errors: bool = False,
) -> None:
    """Execute runs in `n_jobs` processes and save the result of each when it is done.

    With 0 jobs they are executed in this process, where errors may be raised. None starts with one
    process and adds as many as the GPU's memory allows once a run has shown how much it needs. At
    the `deadline` (of `time.monotonic`), unfinished runs are abandoned.
    """
    if n_jobs == 0:
        runner = Runner(device)
        for run in runs:
            if deadline is not None and time.monotonic() > deadline:
                return
            on_event(RunStarted(run, 1))
            report = partial(_report_progress, on_event, run)
            result = runner.run(run, report, raise_errors=raise_errors)
            on_event(RunSaved(run, result, save(run, result)))
        return
    queue, workers, target = list(runs), list[Worker](), n_jobs or 1
    n_threads = max(1, (os.cpu_count() or 1) // target)
    peak_mb = 0.0
    try:
        while queue or any(worker.run for worker in workers):
            if deadline is not None and time.monotonic() > deadline:
                return
            while queue and len(workers) < min(target, len(queue) + len(workers)):
                workers.append(Worker(device, n_threads))
            for worker in [worker for worker in workers if worker.run is None][: len(queue)]:
                run = queue.pop(choose_next(queue, worker, workers))
                worker.start(run)
                on_event(RunStarted(run, len(workers)))
            for event in receive_from(workers, 0.5):
                if isinstance(event, RunAdvanced):
                    on_event(event)
                    continue
                on_event(RunSaved(event.run, event.result, save(event.run, event.result)))
                if event.result.ended_worker:
                    event.worker.stop()
                    workers.remove(event.worker)
                    target, n_jobs = max(1, len(workers)), 1
                elif n_jobs is None:
                    peak_mb = max(peak_mb, event.result.memory_mb or 0.0)
                    free_mb = event.result.free_mb if len(workers) == 1 else None
                    target = max(target, choose_n_jobs(peak_mb, free_mb))
    finally:
        for worker in workers:
            worker.stop()


def choose_next(queue: Sequence[TaskRun], worker: Worker, workers: Sequence[Worker]) -> int:
    """Return the position in the queue of a worker's next run.

    A worker keeps its model and task if possible, since their data are ready; otherwise it takes
    a model and task that no other worker has, so that few workers prepare the same data.
    """

    def group(run: TaskRun | None) -> tuple[str, str] | None:
        return None if run is None else (run.task_name, run.model.name)

    own = group(worker.last_run)
    others = {group(other.last_run) for other in workers if other is not worker}
    for position, run in enumerate(queue):
        if group(run) == own:
            return position
    for position, run in enumerate(queue):
        if group(run) not in others:
            return position
    return 0


def choose_n_jobs(peak_mb: float, free_mb: float | None, n_cores: int | None = None) -> int:
    """Return how many runs fit on a GPU at the same time; 1 without a GPU.

    `free_mb` is the free memory while one process uses its share.

    >>> choose_n_jobs(4000, 20_000, 16), choose_n_jobs(4000, 1000, 16), choose_n_jobs(4000, None)
    (4, 1, 1)
    """
    if free_mb is None or peak_mb <= 0:
        return 1
    n_more = int(free_mb / (peak_mb * MEMORY_MARGIN + CONTEXT_MB))
    return max(1, min(1 + n_more, MAX_JOBS, n_cores or os.cpu_count() or 1))


def _report_progress(
    on_event: Callable[[Event], None], run: TaskRun, done: int, total: int
) -> None:
    on_event(RunAdvanced(run, done, total))
