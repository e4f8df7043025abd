"""Executes the training runs of a study by worker processes on one machine until time is over.

    python benchmarks/run_queue.py --tiny

A run is any object with `name`, `family` (runs of one family can share a compiled step),
`priority` (lower ones first) and `order` (among runs of the same priority). `options` has `out`,
`jobs`, `minutes` and `start` (of `time.monotonic`). `--tiny` executes a few runs that only sleep.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol


class StudyRun(Protocol):
    """One run of a study."""

    @property
    def name(self) -> str: ...

    @property
    def family(self) -> Hashable: ...

    @property
    def priority(self) -> int: ...

    @property
    def order(self) -> tuple[Any, ...]: ...


class RunQueue:
    """Distributes runs to workers, if possible runs of a family that the worker has compiled.

    Runs that are not ready, because they need the result of another run, wait for it.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        runs: Sequence[Any],
        is_ready: Callable[[Any], bool] = lambda run: True,
    ) -> None:
        self.options, self.pending, self.is_ready = options, list(runs), is_ready
        self.running: set[Any] = set()
        self.compiled: dict[int, set[Hashable]] = {}
        self.seconds: dict[Hashable, float] = {}
        self.changed = threading.Condition()

    def take(self, worker: int) -> Any | None:
        """Return the next run of a worker, or None if there is none or no time for it."""
        with self.changed:
            while self.pending:
                ready = [run for run in self.pending if self.is_ready(run)]
                if ready:
                    run = min(ready, key=lambda run: self._rank(run, worker))
                    if self.seconds_left() < 1.1 * self.seconds.get(run.family, 0.0):
                        return None
                    self.pending.remove(run)
                    self.running.add(run)
                    self.compiled.setdefault(worker, set()).add(run.family)
                    return run
                if not self.running or self.seconds_left() < 0:
                    return None
                self.changed.wait(timeout=1)
        return None

    def finish(self, run: StudyRun, seconds: float, problem: str | None) -> None:
        """Record and print that a run has ended."""
        with self.changed:
            self.running.discard(run)
            if problem is None:
                self.seconds[run.family] = seconds
            state = "done" if problem is None else f"failed: {problem}"
            passed = time.monotonic() - self.options.start
            print(f"{passed:6.0f} s  {run.name}: {state}, {seconds:.0f} s", flush=True)
            self.changed.notify_all()

    def seconds_left(self) -> float:
        """Return the time until unfinished runs are abandoned."""
        return float(60 * self.options.minutes - (time.monotonic() - self.options.start))

    def _rank(self, run: StudyRun, worker: int) -> tuple[Any, ...]:
        is_new = run.family not in self.compiled.get(worker, ())
        n_workers = sum(run.family in families for families in self.compiled.values())
        n_waiting = Counter(other.family for other in self.pending)[run.family]
        load = -n_waiting / (1 + n_workers) if is_new else 0
        return (run.priority, is_new, load, *run.order)


def execute_runs(
    options: argparse.Namespace, queue: RunQueue, execute: Callable[..., None]
) -> None:
    """Execute the runs of a queue with `execute(options, run)`, here or in worker processes."""
    if options.jobs > 1:
        return _execute_in_workers(options, queue, execute)
    while (run := queue.take(0)) is not None:
        queue.finish(run, *_execute_safely(options, run, execute))
    return None


def remove_leftovers(out: Path, runs: Sequence[StudyRun]) -> None:
    """Remove the temporary folders of runs that were abandoned the last time."""
    for run in runs:
        for leftover in out.glob(f".{run.name}.*"):
            shutil.rmtree(leftover, ignore_errors=True)


def _execute_in_workers(
    options: argparse.Namespace, queue: RunQueue, execute: Callable[..., None]
) -> None:
    """Start the workers, send them runs, and end them when the time is over."""
    import multiprocessing

    n_threads = str(max(1, (os.cpu_count() or 1) // options.jobs))
    for name in ("OMP_NUM_THREADS", "RAYON_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
        os.environ.setdefault(name, n_threads)
    # CUDA does not survive a fork.
    context = multiprocessing.get_context(getattr(options, "start_method", "spawn"))
    pipes = [context.Pipe() for _ in range(options.jobs)]
    workers = [
        context.Process(target=_work, args=(pipe[1], options, number, execute))
        for number, pipe in enumerate(pipes)
    ]
    for worker, pipe in zip(workers, pipes, strict=True):
        worker.start()
        pipe[1].close()  # otherwise the end of a worker would not be noticed
    threads = [
        threading.Thread(target=_send_runs, args=(queue, number, pipe[0]), daemon=True)
        for number, pipe in enumerate(pipes)
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=max(0.0, queue.seconds_left()))
        for worker in workers:
            worker.join(timeout=2 if queue.seconds_left() > 0 else 0)
    finally:
        for worker in workers:
            worker.kill()


def _send_runs(queue: RunQueue, number: int, pipe: Any) -> None:
    """Send run after run to one worker."""
    while (run := queue.take(number)) is not None:
        try:
            pipe.send(run)
            seconds, problem = pipe.recv()
        except (EOFError, OSError):
            return queue.finish(run, 0.0, "the worker died")
        queue.finish(run, seconds, problem)
    with suppress(OSError):
        pipe.send(None)
    return None


def _work(
    pipe: Any, options: argparse.Namespace, number: int, execute: Callable[..., None]
) -> None:
    """Execute the runs that arrive, with their output in a file."""
    with (options.out / f"worker-{number}.log").open("a", buffering=1) as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
        while (run := pipe.recv()) is not None:
            pipe.send(_execute_safely(options, run, execute))


def _execute_safely(
    options: argparse.Namespace, run: StudyRun, execute: Callable[..., None]
) -> tuple[float, str | None]:
    """Execute a run; return its seconds and its error."""
    start, problem = time.monotonic(), None
    try:
        _share_compiled_steps()
        execute(options, run)
    except Exception as error:  # noqa: BLE001  (other runs continue)
        traceback.print_exc()
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
    _free_memory()
    return time.monotonic() - start, problem


def _free_memory() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@cache
def _share_compiled_steps() -> None:
    """Make batch shapes independent of the seed, so that the runs of a process share graphs."""
    import torch

    from calque.training import data

    torch._dynamo.config.recompile_limit = 64
    sample = data._sample_lengths
    data._sample_lengths = lambda parts, shares, seed: sample(parts, shares, 0)


# A test of the queue itself.


@dataclass(frozen=True)
class SleepingRun:
    """A run that sleeps, or fails."""

    name: str
    family: str
    priority: int
    order: tuple[int, ...] = ()


def sleep(options: argparse.Namespace, run: SleepingRun) -> None:
    """Execute a sleeping run."""
    time.sleep(0.1)
    if run.family == "failing":
        raise ValueError("on purpose")
    (options.out / run.name).touch()


def main() -> None:
    """Execute sleeping runs in this process and in two workers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true")
    parser.parse_args()
    families = ("a", "b", "failing")
    runs = [SleepingRun(f"{name}-{k}", name, k, (k,)) for name in families for k in (0, 1)]
    for jobs in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            options = argparse.Namespace(
                out=Path(folder),
                jobs=jobs,
                minutes=1,
                start=time.monotonic(),
                start_method="fork",
            )
            execute_runs(options, RunQueue(options, runs), sleep)
            done = sorted(path.name for path in options.out.glob("[ab]-*"))
            if done != ["a-0", "a-1", "b-0", "b-1"]:
                raise SystemExit(f"only {done} are done")


if __name__ == "__main__":
    main()
