"""Runs one cell: a fresh model, the task, and what it cost in time and memory.

Processes that run cells side by side on one device; one that dies takes no other with it.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calque.errors import InputError, first_line
from calque.evaluation.grid.cells import CellResult
from calque.evaluation.grid.model_specs import EncoderShelf, load_translator
from calque.evaluation.registry import load_function

if TYPE_CHECKING:
    import torch

    from calque.evaluation.grid.cells import Cell
    from calque.evaluation.records import Outcome


Progress = Callable[[int, int], None]


class CellRunner:
    """Runs cells one after the other on a device, keeping what the next one can use."""

    def __init__(self, device: str = "auto") -> None:
        import torch

        name = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        self.device = torch.device(name)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device.index or 0)
            torch.cuda.init()  # type: ignore[no-untyped-call]
        self._shelf = EncoderShelf()

    def run(self, cell: Cell, on_progress: Progress = lambda done, total: None) -> CellResult:
        """Give what came of a cell; whatever goes wrong in it is its error, and others go on."""
        begin = time.perf_counter()
        _forget_peak(self.device)
        outcomes: tuple[Outcome, ...] = ()
        error, is_spoilt = None, False
        try:
            outcomes = tuple(self._measure(cell, on_progress))
            check_outcomes(outcomes)
        except Exception as problem:  # noqa: BLE001 - a failed cell is a result too
            outcomes, error = (), describe_error(problem)
            is_spoilt = spoils_process(problem)
        result = CellResult(
            outcomes,
            error,
            time.perf_counter() - begin,
            _find_peak(self.device),
            _name_device(self.device),
            _find_free(self.device),
            is_spoilt,
        )
        self._clean()
        return result

    def _measure(self, cell: Cell, on_progress: Progress) -> list[Outcome]:
        measure = load_function(cell.kind.measure, cell.task)
        found: list[Outcome] = measure(
            self._load(cell),
            cell.data,
            languages=None if cell.languages is None else list(cell.languages),
            settings=cell.settings,
            seed=cell.seed if cell.seed is not None else 0,
            on_progress=on_progress,
        )
        return found

    def _load(self, cell: Cell) -> Any:
        import torch

        if cell.entrant.kind == "vectors":
            from calque.vectors.static import VectorFolder

            return VectorFolder(Path(cell.entrant.folder), self.device)
        # What is trained needs its weights in full; the task computes in less where it pays.
        is_halved = self.device.type == "cuda" and not cell.kind.trained
        dtype = torch.bfloat16 if is_halved else torch.float32
        if cell.kind.of_translators:
            return load_translator(cell.entrant, self.device, dtype)
        plugged = cell.kind.trained and cell.settings.plug == "in"
        return self._shelf.take(cell.entrant, cell.seed, self.device, dtype, plugged=plugged)

    def _clean(self) -> None:
        """Let go of the last model's memory before the next is measured."""
        import torch

        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def check_outcomes(outcomes: tuple[Outcome, ...]) -> None:
    """Refuse what cannot be a result: nothing, a language twice, or a score that is no number."""
    names = [outcome.language for outcome in outcomes]
    if not outcomes:
        raise InputError("the task gave no outcome", fix="check the data and the languages")
    if len(set(names)) < len(names):
        raise InputError(f"the task gave a language twice: {' '.join(names)}")
    for outcome in outcomes:
        value = next(iter(outcome.metrics.values()))
        if value != value or abs(value) == float("inf"):
            raise InputError(f"the score in {outcome.language} is {value}")


def spoils_process(error: Exception) -> bool:
    """Tell whether a process is of no more use: it may be out of memory, or CUDA out of order.

    After a fault on the device every later call in the same process fails, too.
    """
    text = str(error).lower()
    return isinstance(error, MemoryError) or "out of memory" in text or "cuda error" in text


def describe_error(error: Exception) -> str:
    """Say what went wrong in one line, with the place in the code if it is no one's input."""
    if isinstance(error, InputError):
        return str(error)
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    text = f"{type(error).__name__}: {first_line(error)}"
    if trace is None:
        return text
    return f"{text} ({Path(trace.tb_frame.f_code.co_filename).name}, line {trace.tb_lineno})"


def _forget_peak(device: torch.device) -> None:
    """Begin to measure memory anew."""
    if device.type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):  # Linux only; elsewhere the peak is that of the whole process
        Path("/proc/self/clear_refs").write_text("5")


def _find_peak(device: torch.device) -> float:
    """Give the most memory in MB that was held at once: the device's, or this process's."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_reserved(device) / 1e6
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) * 1024 / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def _find_free(device: torch.device) -> float | None:
    """Give the memory of a GPU that nobody has, in MB."""
    if device.type != "cuda":
        return None
    import torch

    return torch.cuda.mem_get_info(device)[0] / 1e6


def _name_device(device: torch.device) -> str:
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_name(device)
    return device.type


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
