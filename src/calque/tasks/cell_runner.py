"""Runs one cell: a fresh model, the task, and what it cost in time and memory."""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calque.tasks.entrants import EncoderShelf, load_translator
from calque.tasks.rows import CellResult
from calque.tasks.suite import load_function
from calque.types import InputError, first_line

if TYPE_CHECKING:
    import torch

    from calque.tasks.cells import Cell
    from calque.tasks.outcome import Outcome

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
            from calque.tools.vector_space import VectorFolder

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
