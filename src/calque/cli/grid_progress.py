"""Progress over a whole grid: a line for every finished cell, a bar with the time left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from calque.tasks.remaining_time import Clock, show_duration
from calque.tasks.study import Event, Started, Written

if TYPE_CHECKING:
    from calque.tasks.cells import Cell
    from calque.tasks.rows import Row


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
