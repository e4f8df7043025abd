"""Progress over a whole grid: a line for every finished cell, a bar with the time left.

`calque evaluate` of a grid: models × tasks × seeds into a folder, in any number of sittings.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from calque.errors import InputError
from calque.evaluation.grid.grid import Clock, Event, Started, Written, show_duration

if TYPE_CHECKING:
    from calque.evaluation.grid.cells import Cell, Row
    from calque.evaluation.grid.grid import Plan


class GridProgress:
    """Counts cells and says when the rest will be done; lines go to `show`."""

    def __init__(
        self, cells: Sequence[Cell], known: Sequence[Row], show: Callable[[str], None]
    ) -> None:
        self.clock, self.show = Clock(), show
        for row in known:
            if row["error"] is None:
                self.clock.note(row["task"], row["seconds"])
        self.pending = {cell.key: cell for cell in cells}
        self.running: dict[object, tuple[Cell, float]] = {}
        self.n_all, self.n_failed, self.n_jobs = len(cells), 0, 1
        self._told: set[str] = set()

    @property
    def n_done(self) -> int:
        """Count the cells that are written."""
        return self.n_all - len(self.pending) - len(self.running)

    def note(self, event: Event) -> None:
        """Take in what happened."""
        if isinstance(event, Started):
            self.n_jobs = event.n_jobs
            self.running[event.cell.key] = (self.pending.pop(event.cell.key), time.monotonic())
        elif isinstance(event, Written):
            del self.running[event.cell.key]
            if event.result.error is None:
                self.clock.note(event.cell.task, event.result.seconds)
            else:
                self.n_failed += 1
            self.show(self._describe(event))
            warning = tell_missing(event.rows)
            if warning is not None and warning not in self._told:  # another seed has said the same
                self._told.add(warning)
                self.show(f"warning: {warning}")

    def tell_rest(self) -> str:
        """Say how much time is left, if anything is known of it."""
        now = time.monotonic()
        running = [(cell.task, now - begin) for cell, begin in self.running.values()]
        pending = [cell.task for cell in self.pending.values()]
        rest = self.clock.estimate(pending, running, self.n_jobs)
        if rest is None or not (running or pending):
            return ""
        return f"{show_duration(rest)} left"

    def _describe(self, event: Written) -> str:
        head = f"{self.n_done}/{self.n_all} {event.cell}"
        if event.result.error is not None:
            return f"{head}: failed: {event.result.error}"
        values = [row["value"] for row in event.rows]
        what = f"{event.rows[0]['metric']} {sum(values) / len(values):.1f}"
        if len(values) > 1:
            what += f" (mean of {len(values)})"
        rest = self.tell_rest()
        took = show_duration(event.result.seconds)
        return f"{head}: {what}, {took}" + (f"; {rest}" if rest else "")


def tell_missing(rows: Sequence[Row]) -> str | None:
    """Say how much of a cell had no translation to plug in, if any."""
    counts: list[dict[str, int]] = [row.get("counts") or {} for row in rows]
    parts = [
        f"{n_missing:,} of {row['n_items']:,} tests of {row['language']}"
        for row, count in zip(rows, counts, strict=True)
        if (n_missing := count.get("without_translation", 0))
    ]
    if n_learnt := max((count.get("learnt_without_translation", 0) for count in counts), default=0):
        parts.insert(0, f"{n_learnt:,} examples to learn from")
    if not parts:
        return None
    cell = f"{rows[0]['model']}, {rows[0]['task']}"
    return f"{cell}: no translation of {', '.join(parts)}: read alone, as with plug=out"


@contextmanager
def show_grid(
    cells: Sequence[Cell], known: Sequence[Row]
) -> Iterator[tuple[GridProgress, Callable[[], None]]]:
    """Show progress on standard error; yield it, and what redraws the bar."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield (
            GridProgress(cells, known, lambda line: print(line, file=sys.stderr, flush=True)),
            lambda: None,
        )
        return
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        progress = GridProgress(cells, known, lambda line: console.print(line, markup=False))
        task = bar.add_task("", total=len(cells))

        def redraw() -> None:
            names = "; ".join(str(cell) for cell, _ in progress.running.values())
            text = " · ".join(filter(None, (progress.tell_rest(), names)))
            bar.update(task, completed=progress.n_done, description=text)

        yield progress, redraw


DEFAULT_SEEDS = "5"


@dataclass(frozen=True, slots=True)
class GridOptions:
    """What a grid takes beside the models, as given on the command line."""

    data: Path
    tasks: str
    languages: Sequence[str] | None
    seeds: str | None
    output: Path
    jobs: str
    device: str
    setting: str | None
    source: str | None
    changes: Sequence[str]
    force: bool
    dry_run: bool


def evaluate_grid(models: Sequence[str], options: GridOptions) -> None:
    """Do the cells that are missing; exit with 1 if some have failed."""
    from calque.evaluation.grid.grid import plan_cells, sort_out
    from calque.evaluation.grid.model_specs import find_entrants
    from calque.evaluation.grid.results_folder import ResultsFolder, check_folder
    from calque.evaluation.registry import find_kinds

    kinds = find_kinds(options.tasks.split(","))
    of_vectors = {kind.of_vectors for kind in kinds.values()}
    if len(of_vectors) > 1:
        problem = "some of these tasks score word vectors, others encoders"
        raise InputError(problem, fix="ask for them one after the other, into the same folder")
    n_jobs = parse_jobs(options.jobs)
    _check_device(options.device)
    check_folder(options.output)
    seeds = parse_seeds(options.seeds or DEFAULT_SEEDS)
    cells, notes = plan_cells(
        find_entrants(models, of_vectors=of_vectors.pop(), seeds=seeds),
        kinds,
        seeds,
        options.data,
        languages=options.languages,
        chosen=parse_settings(options),
    )
    for line in notes:
        print(line, file=sys.stderr)
    if options.dry_run:
        return _list_cells(cells, options)
    with ResultsFolder(options.output) as results:
        plan = sort_out(cells, results, force=options.force)
        for line in (*plan.notes, _describe(plan)):
            print(line, file=sys.stderr)
        n_failed = _run(plan.todo, results, options.device, n_jobs)
        n_rows = len(results.rows)
    print(f"{options.output}: {n_rows:,} rows", file=sys.stderr)
    if n_failed:
        print(f"{n_failed} cells failed: the same command tries them again", file=sys.stderr)
        raise typer.Exit(1)
    return None


def parse_seeds(text: str) -> list[int]:
    """Read a number of seeds, or the seeds themselves.

    >>> parse_seeds("3"), parse_seeds("7,11"), parse_seeds("7,")
    ([1, 2, 3], [7, 11], [7])
    """
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < ("," not in text) or len(set(numbers)) < len(numbers):
        fix = "give how many, 5, or which, 1,2,7"
        raise InputError(f"--seeds {text} are no seeds", fix=fix)
    return numbers if "," in text else list(range(1, numbers[0] + 1))


def parse_jobs(text: str) -> int | None:
    """Read a number of processes; None lets memory decide, 0 is this process.

    >>> parse_jobs("auto"), parse_jobs("4")
    (None, 4)
    """
    if text == "auto":
        return None
    if not text.isdecimal():
        raise InputError(f"--jobs {text} is no number", fix="try auto or 4")
    return int(text)


def parse_settings(options: GridOptions) -> dict[str, Any]:
    """Collect what is chosen of the settings, each as what its field takes."""
    chosen: dict[str, Any] = {}
    for name in ("setting", "source"):
        if getattr(options, name) is not None:
            chosen[name] = getattr(options, name)
    for text in options.changes:
        name, equals, value = text.partition("=")
        if not equals:
            raise InputError(f"--set {text} has no =", fix="try --set epochs=2")
        chosen[name.strip()] = parse_setting(name.strip(), value.strip())
    return chosen


def parse_setting(name: str, text: str) -> Any:
    """Read a value as the type of its field says.

    >>> parse_setting("epochs", "2"), parse_setting("max_length", "none")
    (2, None)
    """
    from calque.evaluation.settings import TaskSettings

    types: Mapping[str, str] = {field.name: str(field.type) for field in fields(TaskSettings)}
    if name not in types:
        raise InputError(f"no setting is called {name!r}", fix=f"choose from: {', '.join(types)}")
    kind = types[name]
    if "None" in kind and text.lower() in ("none", "null", ""):
        return None
    try:
        if "bool" in kind:
            return {"true": True, "false": False, "1": True, "0": False}[text.lower()]
        if "int" in kind and "float" not in kind:
            return int(text)
        return float(text) if "float" in kind else text
    except (ValueError, KeyError):
        wanted = "true or false" if "bool" in kind else "a number"
        raise InputError(f"--set {name}={text}", fix=f"give {wanted}") from None


def _run(cells: Sequence[Cell], results: Any, device: str, n_jobs: int | None) -> int:
    """Compute cells and show how it goes; give how many have failed."""
    from calque.evaluation.grid.grid import run_cells

    if not cells:
        return 0
    with (
        show_grid(cells, results.rows) as (progress, redraw),
        closing(run_cells(cells, results, device=device, n_jobs=n_jobs)) as events,
    ):
        try:
            for event in events:
                progress.note(event)
                redraw()
        except KeyboardInterrupt:
            n_left = progress.n_all - progress.n_done
            print(
                f"{progress.n_done} cells are safe in {results.folder}, {n_left} are left: "
                "the same command goes on with them",
                file=sys.stderr,
            )
            raise
    return progress.n_failed


def _describe(plan: Plan) -> str:
    text = f"{len(plan.todo)} cells to do"
    if plan.n_again:
        text += f", {plan.n_again} of them again"
    return text + (f"; {plan.n_done} are done" if plan.n_done else "")


def _list_cells(cells: Sequence[Cell], options: GridOptions) -> None:
    from calque.evaluation.grid.results_folder import read_folder

    rows = read_folder(options.output)
    for cell in cells:
        mine = rows.get(cell.key)
        state = "to do"
        if mine is not None:
            same = mine[0]["config"] == cell.config
            state = ("failed" if mine[0]["error"] else "done") if same else "done otherwise"
        tests = "" if cell.languages is None else f"\t{' '.join(cell.languages)}"
        print(f"{state}\t{cell}\t{cell.config}{tests}")


def _check_device(name: str) -> None:
    """Refuse a device that is not there, without taking any of its memory."""
    if name in ("auto", "cpu"):
        return
    import torch

    kind, _, number = name.partition(":")
    n_devices = torch.cuda.device_count() if kind == "cuda" else 0
    if kind != "cuda" or not (number or "0").isdecimal() or int(number or 0) >= n_devices:
        problem = f"device {name!r} cannot be used: there are {n_devices} GPUs"
        raise InputError(problem, fix="try auto, cpu or cuda")
