"""Processes that run cells side by side on one device; one that dies takes no other with it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from calque.tasks.rows import CellResult

if TYPE_CHECKING:
    from calque.tasks.cells import Cell

PROGRESS_EVERY = 0.25  # seconds
PATIENCE = 5.0  # seconds for a worker to end by itself


@dataclass(frozen=True, slots=True)
class Advance:
    """How far a cell is."""

    cell: Cell
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Finish:
    """What came of a cell, and by whom."""

    cell: Cell
    result: CellResult
    worker: Worker


class Worker:
    """A process with one cell at a time; it ends with the process that made it."""

    def __init__(self, device: str, n_threads: int) -> None:
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self.connection, theirs = context.Pipe()
        arguments = (theirs, device, n_threads)
        self.process = context.Process(target=_work, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        self.cell: Cell | None = None
        self.last: Cell | None = None

    def give(self, cell: Cell) -> None:
        """Hand over the next cell."""
        self.cell = self.last = cell
        with suppress(OSError):  # dead already: `listen` finds out
            self.connection.send(cell)

    def listen(self) -> Iterator[Advance | Finish]:
        """Read what there is to hear without waiting."""
        try:
            while self.cell is not None and self.connection.poll():
                message: Any = self.connection.recv()
                if isinstance(message, CellResult):
                    yield self._finish(message)
                else:
                    yield Advance(self.cell, *message)
        except (EOFError, OSError):
            self.process.join(PATIENCE)
            if self.cell is not None:
                error = describe_end(self.process.exitcode)
                yield self._finish(CellResult(error=error, ended_worker=True))

    def stop(self) -> None:
        """End the process, whatever it does."""
        self.connection.close()
        self.process.terminate()
        self.process.join(PATIENCE)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()

    def _finish(self, result: CellResult) -> Finish:
        cell, self.cell = self.cell, None
        assert cell is not None
        return Finish(cell, result, self)


def listen_to(workers: list[Worker], timeout: float | None) -> Iterator[Advance | Finish]:
    """Wait until one of the workers has something to say or has died, and tell it."""
    busy = {worker.connection: worker for worker in workers if worker.cell is not None}
    for connection in wait(list(busy), timeout):
        assert isinstance(connection, Connection)
        yield from busy[connection].listen()


def describe_end(exit_code: int | None) -> str:
    """Say how a process ended.

    >>> describe_end(-9)
    'the worker was killed by SIGKILL: perhaps for want of memory'
    """
    if exit_code is None or exit_code >= 0:
        return f"the worker ended with exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    why = ": perhaps for want of memory" if name == "SIGKILL" else ""
    return f"the worker was killed by {name}{why}"


def _work(connection: Connection, device: str, n_threads: int) -> None:
    """Run cells until the connection ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one who gives the work
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import torch

    from calque.tasks.cell_runner import CellRunner

    torch.set_num_threads(min(n_threads, torch.get_num_threads()))
    runner = CellRunner(device)
    last = 0.0

    def tell(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last > PROGRESS_EVERY:
            last = time.monotonic()
            connection.send((done, total))

    with suppress(EOFError, BrokenPipeError):
        while True:
            connection.send(runner.run(connection.recv(), tell))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
