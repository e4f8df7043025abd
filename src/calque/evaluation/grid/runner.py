"""Executes runs: loads a fresh model, measures it on the task, and records time and memory.

Worker processes execute runs in parallel on one device; if one dies, the others continue.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calque.errors import InputError, first_line, printable
from calque.evaluation.grid.model_specs import EncoderCache, load_translator
from calque.evaluation.grid.task_run import RunResult
from calque.evaluation.registry import load_function
from calque.evaluation.tasks.untrained import check_maps
from calque.io.processes import block_stop_signals, start_worker
from calque.io.result_records import is_name

if TYPE_CHECKING:
    import torch

    from calque.evaluation.grid.task_run import TaskRun
    from calque.evaluation.records import LanguageScores

OnProgress = Callable[[int, int], None]
PROGRESS_EVERY = 0.25  # seconds
PATIENCE = 5.0  # seconds for a worker that closed its connection to end


class Runner:
    """Executes runs one after the other on a device; the next run may reuse what is loaded."""

    def __init__(self, device: str = "auto") -> None:
        import torch

        name = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        self.device = torch.device(name)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device.index or 0)
            torch.cuda.init()  # type: ignore[no-untyped-call]
        self._encoders = EncoderCache()

    def run(
        self,
        run: TaskRun,
        on_progress: OnProgress = lambda done, total: None,
        *,
        raise_errors: bool = False,
    ) -> RunResult:
        """Return the result of a run; unless errors are raised, an error is a result too."""
        start = time.perf_counter()
        _reset_peak(self.device)
        scores: tuple[LanguageScores, ...] = ()
        error, ended = None, False
        try:
            scores = tuple(self._measure(run, on_progress))
            check_scores(scores)
        except Exception as problem:
            if raise_errors:
                raise
            scores, error, ended = (), describe_error(problem), breaks_process(problem)
        result = RunResult(
            scores,
            error,
            time.perf_counter() - start,
            _find_peak(self.device),
            _name_device(self.device),
            _find_free(self.device),
            ended,
        )
        self._free_memory()
        return result

    def _measure(self, run: TaskRun, on_progress: OnProgress) -> list[LanguageScores]:
        measure = load_function(run.task.measure, run.task_name)
        scores: list[LanguageScores] = measure(
            self._load(run),
            run.data,
            languages=None if run.languages is None else list(run.languages),
            settings=run.settings,
            seed=run.seed if run.seed is not None else 0,
            on_progress=on_progress,
        )
        return scores

    def _load(self, run: TaskRun) -> Any:
        import torch

        if run.task.model == "vectors":
            from calque.vectors.static import VectorFolder

            return VectorFolder(run.model.folder, self.device)
        # Training needs full weights; the task itself computes in lower precision if it pays.
        use_half = self.device.type == "cuda" and not run.task.trained
        dtype = torch.bfloat16 if use_half else torch.float32
        if run.task.model == "translator":
            return load_translator(run.model, self.device, dtype)
        uses_plug = run.task.trained or "plug" in run.task.settings
        plugged = uses_plug and run.settings.plug == "in"
        encoder = self._encoders.load(run.model, run.seed, self.device, dtype, plugged=plugged)
        sources = [run.settings.source] if run.task.trained else []
        check_maps(encoder, [*(run.languages or ()), *sources])
        return encoder

    def _free_memory(self) -> None:
        import torch

        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def check_scores(scores: tuple[LanguageScores, ...]) -> None:
    """Raise an InputError for invalid results: none, a language twice, or a non-finite score."""
    names = [each.language for each in scores]
    for name in names:
        if not is_name(name):
            problem = f"the language {name!r} has control characters"
            raise InputError(problem, fix="rename the test file")
    if not scores:
        problem = "the task returned no scores"
        raise InputError(problem, fix="check the data and the languages")
    if len(set(names)) < len(names):
        raise InputError(f"the task returned a language twice: {' '.join(names)}")
    for each in scores:
        for metrics in (each.metrics, *each.layers.values()):
            for name, value in metrics.items():
                if not math.isfinite(value):
                    raise InputError(f"the {name} in {each.language} is {value}")


def breaks_process(error: Exception) -> bool:
    """Return whether a process cannot be used again after an error.

    It may be out of memory; and after a CUDA error every later call in the process fails too.
    """
    text = str(error).lower()
    return isinstance(error, MemoryError) or "out of memory" in text or "cuda error" in text


def describe_error(error: Exception) -> str:
    """Return an error in one line, with the place in the code if it is not an InputError."""
    if isinstance(error, InputError):
        return str(error)
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    text = f"{type(error).__name__}: {printable(first_line(error))}"
    if trace is None:
        return text
    return f"{text} ({Path(trace.tb_frame.f_code.co_filename).name}, line {trace.tb_lineno})"


def _reset_peak(device: torch.device) -> None:
    """Start a new measurement of the peak memory."""
    if device.type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):  # Linux only; elsewhere the peak is that of the whole process
        Path("/proc/self/clear_refs").write_text("5")


def _find_peak(device: torch.device) -> float:
    """Return the peak memory in MB: of the GPU, or of this process."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_reserved(device) / 1e6
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) * 1024 / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def _find_free(device: torch.device) -> float | None:
    """Return the free memory of a GPU in MB."""
    if device.type != "cuda":
        return None
    import torch

    return torch.cuda.mem_get_info(device)[0] / 1e6


def _name_device(device: torch.device) -> str:
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_name(device)
    return device.type


@dataclass(frozen=True, slots=True)
class RunAdvanced:
    """A run has finished `done` of `total` steps."""

    run: TaskRun
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class RunEnded:
    """A worker has finished a run, or died."""

    run: TaskRun
    result: RunResult
    worker: Worker


class Worker:
    """A process that executes one run at a time; it ends when its parent process ends.

    The process starts with the first run, so that there is a worker to stop, whenever a signal
    arrives.
    """

    def __init__(self, device: str, n_threads: int) -> None:
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self.connection, self._theirs = context.Pipe()
        arguments = (self._theirs, device, n_threads)
        self.process = context.Process(target=_work, args=arguments, daemon=True)
        self.run: TaskRun | None = None
        self.last_run: TaskRun | None = None

    def start(self, run: TaskRun) -> None:
        """Send the next run to the process."""
        if self.process.pid is None:
            with block_stop_signals():
                self.process.start()
            self._theirs.close()
        self.run = self.last_run = run
        with suppress(OSError):  # the process has died: `receive` reports it
            self.connection.send(run)

    def receive(self) -> Iterator[RunAdvanced | RunEnded]:
        """Yield the messages that have arrived, without waiting."""
        try:
            while self.run is not None and self.connection.poll():
                message: Any = self.connection.recv()
                if isinstance(message, RunResult):
                    yield self._end_run(message)
                else:
                    yield RunAdvanced(self.run, *message)
        except (EOFError, OSError):
            self.process.join(PATIENCE)
            if self.run is not None:
                error = describe_exit(self.process.exitcode)
                yield self._end_run(RunResult(error=error, ended_worker=True))

    def stop(self) -> None:
        """Kill the process; nothing that it has not sent yet is of use."""
        self.connection.close()
        if self.process.pid is not None:
            self.process.kill()
            self.process.join()

    def _end_run(self, result: RunResult) -> RunEnded:
        run, self.run = self.run, None
        assert run is not None
        return RunEnded(run, result, self)


def receive_from(workers: list[Worker], timeout: float | None) -> Iterator[RunAdvanced | RunEnded]:
    """Wait until a worker has sent a message or has died, and yield all messages."""
    busy = {worker.connection: worker for worker in workers if worker.run is not None}
    for connection in wait(list(busy), timeout):
        assert isinstance(connection, Connection)
        yield from busy[connection].receive()


def describe_exit(exit_code: int | None) -> str:
    """Return how a worker process ended, in one line.

    >>> describe_exit(-9)
    'the worker was killed by SIGKILL, possibly because memory ran out'
    """
    if exit_code is None or exit_code >= 0:
        return f"the worker ended with exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    reason = ", possibly because memory ran out" if name == "SIGKILL" else ""
    return f"the worker was killed by {name}{reason}"


def _work(connection: Connection, device: str, n_threads: int) -> None:
    """Execute runs until the connection is closed."""
    start_worker()
    import torch

    torch.set_num_threads(min(n_threads, torch.get_num_threads()))
    runner = Runner(device)
    last = 0.0

    def report(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last > PROGRESS_EVERY:
            last = time.monotonic()
            connection.send((done, total))

    with suppress(EOFError, BrokenPipeError):
        while True:
            connection.send(runner.run(connection.recv(), report))
