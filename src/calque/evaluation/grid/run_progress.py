"""Progress of an evaluation: a line for every finished run, and an estimate of the time left."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from calque.evaluation.grid.run_grid import Event, RunSaved, RunStarted
from calque.evaluation.grid.runner import RunAdvanced

if TYPE_CHECKING:
    from calque.evaluation.grid.task_run import RunKey, TaskRun
    from calque.io.result_records import Record
    from calque.types import Progress


class TimeEstimate:
    """Estimates the remaining time from the seconds of finished runs, task by task.

    A task without a finished run counts as an average one; with no finished run at all there is
    no estimate.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = defaultdict(list)

    def add(self, task: str, seconds: float) -> None:
        """Add the time of a finished run."""
        self._seconds[task].append(seconds)

    def estimate(
        self, pending: Sequence[str], running: Sequence[tuple[str, float]], n_jobs: int
    ) -> float | None:
        """Return the seconds left for pending tasks and for running ones with their seconds so far.

        >>> estimate = TimeEstimate()
        >>> estimate.add("pos", 10.0)
        >>> estimate.estimate(["pos", "pos"], [("pos", 4.0)], n_jobs=2)
        13.0
        """
        if not self._seconds:
            return None
        left = [max(0.0, self._guess(task) - so_far) for task, so_far in running]
        work = sum(map(self._guess, pending)) + sum(left)
        return max([work / max(1, n_jobs), *left])  # the last run cannot be divided

    def _guess(self, task: str) -> float:
        known = self._seconds.get(task)
        if known:
            return sum(known) / len(known)
        means = [sum(seconds) / len(seconds) for seconds in self._seconds.values()]
        return sum(means) / len(means)


class RunProgress:
    """Receives the events of an evaluation; writes lines to `log` and numbers to `progress`."""

    def __init__(
        self,
        runs: Sequence[TaskRun],
        known: Sequence[Record],
        log: Callable[[str], None],
        progress: Progress | None = None,
    ) -> None:
        self.log, self.progress, self.estimate = log, progress, TimeEstimate()
        for record in known:
            if record["error"] is None:
                self.estimate.add(record["task"], record["seconds"])
        self.pending = {run.key: run for run in runs}
        self.running: dict[RunKey, tuple[TaskRun, float]] = {}
        self.shares: dict[RunKey, float] = {}
        self.n_runs, self.n_failed, self.n_jobs = len(runs), 0, 1
        self._warnings: set[str] = set()

    @property
    def n_done(self) -> int:
        """Number of finished runs."""
        return self.n_runs - len(self.pending) - len(self.running)

    def __call__(self, event: Event) -> None:
        """Process an event."""
        key = event.run.key
        if isinstance(event, RunStarted):
            self.n_jobs = event.n_jobs
            self.running[key] = (self.pending.pop(key), time.monotonic())
        elif isinstance(event, RunAdvanced):
            self.shares[key] = event.done / max(1, event.total)
        elif isinstance(event, RunSaved):
            del self.running[key]
            self.shares[key] = 1.0
            if event.result.error is None:
                self.estimate.add(event.run.task_name, event.result.seconds)
            else:
                self.n_failed += 1
            self.log(self._describe(event))
            warning = describe_missing(event.records)
            if warning is not None and warning not in self._warnings:  # the same for every seed
                self._warnings.add(warning)
                self.log(f"warning: {warning}")
        if self.progress is not None:  # in percent of a run, since a run may take hours
            self.progress("evaluation", round(100 * sum(self.shares.values())), 100 * self.n_runs)

    def _describe(self, event: RunSaved) -> str:
        head = f"{self.n_done}/{self.n_runs} {event.run}"
        if event.result.error is not None:
            return f"{head}: failed: {event.result.error}"
        values = [record["value"] for record in event.records]
        score = f"{event.records[0]['metric']} {sum(values) / len(values):.1f}"
        if len(values) > 1:
            score += f" (mean of {len(values)})"
        line = f"{head}: {score}, {format_duration(event.result.seconds)}"
        now = time.monotonic()
        running = [(run.task_name, now - start) for run, start in self.running.values()]
        pending = [run.task_name for run in self.pending.values()]
        left = self.estimate.estimate(pending, running, self.n_jobs)
        if left is None or not (running or pending):
            return line
        return f"{line}; {format_duration(left)} left"


def describe_missing(records: Sequence[Record]) -> str | None:
    """Return how many examples had no translation for VECO's `plug=in`, if any."""
    counts: list[dict[str, int]] = [record.get("counts") or {} for record in records]
    parts = [
        f"{n_missing:,} of {record['n_items']:,} tests of {record['language']}"
        for record, count in zip(records, counts, strict=True)
        if (n_missing := count.get("without_translation", 0))
    ]
    n_training = max((count.get("learnt_without_translation", 0) for count in counts), default=0)
    if n_training:
        parts.insert(0, f"{n_training:,} training examples")
    if not parts:
        return None
    name = f"{records[0]['model']}, {records[0]['task']}"
    return f"{name}: {', '.join(parts)} have no translation and are read alone, as with plug=out"


def format_duration(seconds: float) -> str:
    """Return a duration in words.

    >>> format_duration(7.4), format_duration(150), format_duration(3 * 3600 + 120)
    ('7 s', '2 min 30 s', '3 h 2 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
