"""How long a grid will take yet, from what its cells have taken so far.

The grid of a study: models × tasks × seeds, planned, run in any number of sittings.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from calque.errors import InputError
from calque.evaluation.grid.cells import Cell, choose_settings, hash_settings, name_changes
from calque.evaluation.grid.model_specs import find_data, hash_files
from calque.evaluation.grid.runner import Advance, Worker, listen_to
from calque.evaluation.registry import load_function

if TYPE_CHECKING:
    from calque.evaluation.grid.cells import CellResult, Row
    from calque.evaluation.grid.model_specs import Entrant
    from calque.evaluation.grid.results_folder import ResultsFolder
    from calque.evaluation.registry import TaskKind
    from calque.evaluation.settings import TaskSettings


SecondsByKind = Mapping[str, Sequence[float]]


class Clock:
    """Remembers the seconds of finished cells by task, and guesses those of the others.

    A task that none is known of is taken for a mean one; with nothing known, nothing is said.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = defaultdict(list)

    def note(self, task: str, seconds: float) -> None:
        """Take down how long a cell took."""
        self._seconds[task].append(seconds)

    def estimate(
        self, pending: Sequence[str], running: Sequence[tuple[str, float]], n_jobs: int
    ) -> float | None:
        """Give the seconds left: `pending` are tasks, `running` those with their seconds so far.

        >>> clock = Clock()
        >>> clock.note("pos", 10.0)
        >>> clock.estimate(["pos", "pos"], [("pos", 4.0)], n_jobs=2)
        13.0
        """
        if not self._seconds:
            return None
        rest = [max(0.0, self._guess(task) - so_far) for task, so_far in running]
        work = sum(map(self._guess, pending)) + sum(rest)
        # The last cell may have to be waited for alone.
        return max([work / max(1, n_jobs), *rest])

    def _guess(self, task: str) -> float:
        known = self._seconds.get(task)
        if known:
            return sum(known) / len(known)
        means = [sum(seconds) / len(seconds) for seconds in self._seconds.values()]
        return sum(means) / len(means)


def show_duration(seconds: float) -> str:
    """Say a time in words short enough for a line.

    >>> show_duration(7.4), show_duration(150), show_duration(3 * 3600 + 120)
    ('7 s', '2 min 30 s', '3 h 2 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


CONTEXT_MB = 700  # of a CUDA process that does nothing yet
SPARE = 1.25  # batches differ, and so do tasks
MOST_JOBS = 8


@dataclass(frozen=True, slots=True)
class Plan:
    """Cells to compute and what is left out: cells that are done, languages without a test."""

    todo: tuple[Cell, ...]
    n_done: int
    n_again: int
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Started:
    """A cell begins; so many are computed at a time."""

    cell: Cell
    n_jobs: int


@dataclass(frozen=True, slots=True)
class Written:
    """A cell's rows are safe."""

    cell: Cell
    result: CellResult
    rows: Sequence[Row]


Event: TypeAlias = Started | Advance | Written


def plan_cells(
    entrants: Sequence[Entrant],
    kinds: Mapping[str, TaskKind],
    seeds: Sequence[int],
    data: Path,
    *,
    languages: Sequence[str] | None = None,
    chosen: Mapping[str, Any] | None = None,
) -> tuple[list[Cell], list[str]]:
    """List the cells of a grid, task by task and model by model, and what is left out of them.

    A task without training has one cell a model, or one a seed where the seed makes the model. A
    model of a training run with a seed of its own is measured with that one alone.
    Its languages are those asked for that it has tests of; one that no task has is an error.
    """
    if not data.is_dir():
        raise InputError("no such folder", file=data, fix="check --data")
    models = {entrant: entrant.hash() for entrant in entrants}
    cells: list[Cell] = []
    missing: dict[str, list[str]] = {}
    for task, kind in kinds.items():
        settings = choose_settings(kind, chosen or {})
        names, missing[task] = choose_languages(task, kind, data, settings, languages)
        parts = hash_settings(task, kind, settings, names), _hash_data(task, kind, data)
        for entrant, model in models.items():
            config = "-".join((*parts, model))
            cells += [
                Cell(entrant, task, kind, seed, data, names, settings, config)
                for seed in _choose_seeds(entrant, kind, seeds)
            ]
    for name in set.intersection(*map(set, missing.values())):
        raise InputError(f"no test for {name!r}", file=data, fix="check --languages")
    notes = [
        f"{task} has no test for {' '.join(names)}" for task, names in missing.items() if names
    ]
    return cells, notes


def _choose_seeds(
    entrant: Entrant, kind: TaskKind, seeds: Sequence[int]
) -> Sequence[int] | list[None]:
    if entrant.seed is not None:
        return [entrant.seed]
    return seeds if kind.trained or entrant.needs_seed else [None]


def choose_languages(
    task: str,
    kind: TaskKind,
    data: Path,
    settings: TaskSettings,
    asked: Sequence[str] | None,
) -> tuple[tuple[str, ...] | None, list[str]]:
    """Give the tests of a task in the languages asked for, and the languages it has none of.

    A pair such as de-en is a test in either of its languages. English may always be named, since
    it is the other side or the source of most tests.
    """
    if kind.languages is None:
        return None if asked is None else tuple(asked), []
    try:
        known: list[str] = load_function(kind.languages, task)(data, settings)
    except InputError as error:
        if error.file is not None or error.__class__ is not InputError:
            raise
        raise InputError(f"{task}: {error.problem}", file=data, fix=error.fix) from None
    if asked is None:
        return tuple(known), []
    names = list(dict.fromkeys(map(_shorten, asked)))
    tests = tuple(test for test in known if is_asked(test, names))
    if not tests:
        fix = f"choose from: {' '.join(known)}"
        raise InputError(f"{task} has no test for {' '.join(names)}", file=data, fix=fix)
    covered = {part for test in tests for part in (test, *test.split("-"))}
    return tests, [name for name in names if name not in {*covered, "en"}]


def is_asked(test: str, languages: Sequence[str]) -> bool:
    """Tell whether a test is in languages asked for; beside another, English need not be.

    >>> [is_asked("de-en", asked) for asked in (["de"], ["de-en"], ["de", "en"], ["en", "fr"])]
    [True, True, True, False]
    >>> is_asked("en", ["de"]), is_asked("en", ["de", "en"])
    (False, True)
    """
    others = set(test.split("-")) - {"en"}
    return test in languages or (bool(others) and others <= set(languages))


def sort_out(cells: Iterable[Cell], results: ResultsFolder, *, force: bool = False) -> Plan:
    """Tell what is done from what is to do; failed cells are done again.

    A cell that was done with other settings, data or weights is an error, or with `force` done
    again: results of two configurations side by side would be compared as if they were one.
    """
    todo, n_done, n_again = [], 0, 0
    for cell in cells:
        rows = results.cells.get(cell.key)
        if rows is None:
            todo.append(cell)
        elif rows[0]["config"] != cell.config:
            if not force:
                changed = name_changes(rows[0]["config"], cell.config)
                problem = f"{cell} was done with other {changed}"
                fix = "name a new folder, or do such cells again with --force"
                raise InputError(problem, file=results.path, fix=fix)
            todo.append(cell)
            n_again += 1
        elif results.find_error(cell.key) is not None:
            todo.append(cell)
            n_again += 1
        else:
            n_done += 1
    return Plan(tuple(todo), n_done, n_again, tuple(results.repairs))


def run_cells(
    cells: Sequence[Cell],
    results: ResultsFolder,
    *,
    device: str = "auto",
    n_jobs: int | None = 1,
    deadline: float | None = None,
) -> Generator[Event, None, None]:
    """Compute cells in so many processes and write each when it is done.

    With 0 jobs they run in this process; None begins with one and takes as many as the memory of
    the GPU allows once a cell has shown how much it needs. At the `deadline`, of
    `time.monotonic`, what is unfinished is given up.
    """
    if n_jobs == 0:
        yield from _run_here(cells, results, device, deadline)
        return
    queue, crew, target = list(cells), list[Worker](), n_jobs or 1
    n_threads = max(1, (os.cpu_count() or 1) // target)
    peak_mb = 0.0
    try:
        while queue or any(worker.cell for worker in crew):
            if deadline is not None and time.monotonic() > deadline:
                return
            while queue and len(crew) < min(target, len(queue) + len(crew)):
                crew.append(Worker(device, n_threads))
            for worker in [worker for worker in crew if worker.cell is None][: len(queue)]:
                worker.give(queue.pop(choose_next(queue, worker, crew)))
                assert worker.cell is not None
                yield Started(worker.cell, len(crew))
            for event in listen_to(crew, 0.5):
                if isinstance(event, Advance):
                    yield event
                    continue
                yield Written(event.cell, event.result, results.add(event.cell, event.result))
                if event.result.ended_worker:
                    event.worker.stop()
                    crew.remove(event.worker)
                    target, n_jobs = max(1, len(crew)), 1
                elif n_jobs is None:
                    peak_mb = max(peak_mb, event.result.memory_mb or 0.0)
                    free_mb = event.result.free_mb if len(crew) == 1 else None
                    target = max(target, decide_jobs(peak_mb, free_mb))
    finally:
        for worker in crew:
            worker.process.terminate()  # all at once, since each is waited for
        for worker in crew:
            worker.stop()


def choose_next(queue: Sequence[Cell], worker: Worker, crew: Sequence[Worker]) -> int:
    """Choose the place in the queue of a worker's next cell: rather one it has data ready for.

    Next best is a model and task that no other worker has, so that as few as possible prepare
    the same data; then whatever is first.
    """

    def group(cell: Cell | None) -> tuple[str, str] | None:
        return None if cell is None else (cell.task, cell.entrant.name)

    mine = group(worker.last)
    others = {group(other.last) for other in crew if other is not worker}
    for place, cell in enumerate(queue):
        if group(cell) == mine:
            return place
    for place, cell in enumerate(queue):
        if group(cell) not in others:
            return place
    return 0


def decide_jobs(peak_mb: float, free_mb: float | None, n_cores: int | None = None) -> int:
    """Tell how many cells fit on a GPU beside each other; 1 without one.

    `free_mb` is what is free with one process on it that has already taken its share.

    >>> decide_jobs(4000, 20_000, n_cores=16), decide_jobs(4000, 1000, 16), decide_jobs(4000, None)
    (4, 1, 1)
    """
    if free_mb is None or peak_mb <= 0:
        return 1
    cores = n_cores or os.cpu_count() or 1
    more = int(free_mb / (peak_mb * SPARE + CONTEXT_MB))
    return max(1, min(1 + more, MOST_JOBS, cores))


def _run_here(
    cells: Sequence[Cell], results: ResultsFolder, device: str, deadline: float | None
) -> Iterator[Event]:
    from calque.evaluation.grid.runner import CellRunner

    runner = CellRunner(device)
    for cell in cells:
        if deadline is not None and time.monotonic() > deadline:
            return
        yield Started(cell, 1)
        result = runner.run(cell)
        yield Written(cell, result, results.add(cell, result))


def _hash_data(task: str, kind: TaskKind, data: Path) -> str:
    files = find_data(data, kind.files)
    if not files:
        shown = " or ".join(kind.files)
        raise InputError(f"no files of {task} here", file=data, fix=f"give a folder with {shown}")
    return hash_files(files)


def _shorten(name: str) -> str:
    from calque.io.xtreme import short_name

    return short_name(name.strip())
