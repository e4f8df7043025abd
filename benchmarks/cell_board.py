"""Runs of a study handed to worker processes on one machine, in order and while there is time.

A run is anything with `name`, `family` (runs of one can share a compiled step), `priority` (lower
ones come first) and `order` (among those of one priority).
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Protocol


class Cell(Protocol):
    """One run of a study."""

    @property
    def name(self) -> str: ...

    @property
    def family(self) -> Hashable: ...

    @property
    def priority(self) -> int: ...

    @property
    def order(self) -> tuple[Any, ...]: ...


class Board:
    """Gives runs to workers: to each those that it has compiled for, while there is time.

    Runs that are not ready, since they need what another one leaves, wait for it.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        cells: Sequence[Any],
        is_ready: Callable[[Any], bool] = lambda cell: True,
    ) -> None:
        self.options, self.pending, self.is_ready = options, list(cells), is_ready
        self.running: set[Any] = set()
        self.known: dict[int, set[Hashable]] = {}
        self.seconds: dict[Hashable, float] = {}
        self.changed = threading.Condition()

    def take(self, worker: int) -> Any | None:
        """Give the next run of a worker, or nothing when there is none or no time for it."""
        with self.changed:
            while self.pending:
                ready = [cell for cell in self.pending if self.is_ready(cell)]
                if ready:
                    cell = min(ready, key=lambda cell: self._rank(cell, worker))
                    if self.seconds_left() < 1.1 * self.seconds.get(cell.family, 0.0):
                        return None
                    self.pending.remove(cell)
                    self.running.add(cell)
                    self.known.setdefault(worker, set()).add(cell.family)
                    return cell
                if not self.running or self.seconds_left() < 0:
                    return None
                self.changed.wait(timeout=1)
        return None

    def finish(self, cell: Cell, seconds: float, problem: str | None) -> None:
        """Note that a run has ended, and tell it."""
        with self.changed:
            self.running.discard(cell)
            if problem is None:
                self.seconds[cell.family] = seconds
            word = "done" if problem is None else f"failed: {problem}"
            passed = time.monotonic() - self.options.begin
            print(f"{passed:6.0f} s  {cell.name}: {word}, {seconds:.0f} s", flush=True)
            self.changed.notify_all()

    def _rank(self, cell: Cell, worker: int) -> tuple[Any, ...]:
        is_new = cell.family not in self.known.get(worker, ())
        serving = sum(cell.family in families for families in self.known.values())
        waiting = Counter(other.family for other in self.pending)[cell.family]
        burden = -waiting / (1 + serving) if is_new else 0
        return (cell.priority, is_new, burden, *cell.order)

    def seconds_left(self) -> float:
        """Give the time until what still runs is given up."""
        options = self.options
        return float(60 * options.minutes - (time.monotonic() - options.begin))


def do_runs(options: argparse.Namespace, board: Board, do_cell: Callable[..., None]) -> None:
    """Make the runs of a board by `do_cell(options, cell)`: in this process, or by workers."""
    if options.jobs > 1:
        return serve_all(options, board, do_cell)
    while (cell := board.take(0)) is not None:
        board.finish(cell, *do_cell_safely(options, cell, do_cell))
    return None


def serve_all(options: argparse.Namespace, board: Board, do_cell: Callable[..., None]) -> None:
    """Start the workers, hand them runs, and end them when the time is over."""
    import multiprocessing

    n_threads = str(max(1, (os.cpu_count() or 1) // options.jobs))
    for name in ("OMP_NUM_THREADS", "RAYON_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
        os.environ.setdefault(name, n_threads)
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(options.jobs)]
    workers = [
        context.Process(target=serve, args=(pipe[1], options, number, do_cell))
        for number, pipe in enumerate(pipes)
    ]
    for worker, pipe in zip(workers, pipes, strict=True):
        worker.start()
        pipe[1].close()  # or nobody would notice the end of a worker
    threads = [
        threading.Thread(target=hand_out, args=(board, number, pipe[0]), daemon=True)
        for number, pipe in enumerate(pipes)
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=max(0.0, board.seconds_left()))
        for worker in workers:
            worker.join(timeout=2 if board.seconds_left() > 0 else 0)
    finally:
        for worker in workers:
            worker.kill()


def hand_out(board: Board, number: int, pipe: Any) -> None:
    """Give one worker run after run."""
    while (cell := board.take(number)) is not None:
        try:
            pipe.send(cell)
            seconds, problem = pipe.recv()
        except (EOFError, OSError):  # it is gone
            return board.finish(cell, 0.0, "the worker died")
        board.finish(cell, seconds, problem)
    with suppress(OSError):
        pipe.send(None)
    return None


def serve(
    pipe: Any, options: argparse.Namespace, number: int, do_cell: Callable[..., None]
) -> None:
    """Make runs in this process as they are given, with what they tell in a file."""
    with (options.out / f"worker-{number}.log").open("a", buffering=1) as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
        while (cell := pipe.recv()) is not None:
            pipe.send(do_cell_safely(options, cell, do_cell))


def do_cell_safely(
    options: argparse.Namespace, cell: Cell, do_cell: Callable[..., None]
) -> tuple[float, str | None]:
    """Make one run; give the seconds it took, and what went wrong."""
    begin, problem = time.monotonic(), None
    try:
        share_compiled_steps()
        do_cell(options, cell)
    except Exception as error:  # noqa: BLE001  other runs can still be made
        traceback.print_exc()
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
    release_memory()
    return time.monotonic() - begin, problem


def release_memory() -> None:
    """Give back what a run held on the GPU."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@cache
def share_compiled_steps() -> None:
    """Let runs in one process share what is compiled: the shape of batches is drawn by seed."""
    import torch

    from calque.training import data

    torch._dynamo.config.recompile_limit = 64
    sample = data._sample_lengths
    data._sample_lengths = lambda parts, shares, seed: sample(parts, shares, 0)


def remove_leftovers(out: Path, cells: Sequence[Cell]) -> None:
    """Remove what was given up the last time."""
    for cell in cells:
        for leftover in out.glob(f".{cell.name}.*"):
            shutil.rmtree(leftover, ignore_errors=True)
