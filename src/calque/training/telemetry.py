"""What a run records while it trains: metrics.jsonl, TensorBoard, log lines and progress.

    with Telemetry(run_folder, n_steps, start_step=resumed_step) as telemetry:
        telemetry.log_step(step, {"loss/mlm": 2.1, "lr": 3e-4}, n_tokens)
        with telemetry.paused():        # validation and saving do not count as training time
            telemetry.log_validation(step, {"loss/mlm": 2.3})

Metrics are plain numbers: reading them from a GPU takes time, so do it every few steps only.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calque.errors import InputError, MissingExtra
from calque.io.files import write_atomically
from calque.io.structured import parse_json, read_document

if TYPE_CHECKING:
    from calque.types import Progress

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"
# Kinds of rows.
TRAIN, VALIDATION, PROBE = "train", "validation", "probe"
# Metrics of a probe: source language, mean of the others, their difference, every language.
PROBE_SOURCE, PROBE_OTHERS, PROBE_GAP, PROBE_LANGUAGE = "source", "others", "gap", "score/"

Row = dict[str, Any]


class Telemetry:
    """Records the metrics of a run; without a folder it does nothing (processes but the main one).

    Args:
        folder: Folder of the run.
        n_steps: Number of steps of the whole run.
        start_step: Last finished step of a resumed run: later rows of metrics.jsonl are removed,
            and tokens and seconds are counted on. With 0, metrics.jsonl starts empty.
        tensorboard: Whether to write TensorBoard events, too.
        progress: Called after every step.
        line_seconds: Seconds between two log lines of training metrics.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        folder: Path | None = None,
        n_steps: int = 0,
        *,
        start_step: int = 0,
        tensorboard: bool = False,
        progress: Progress | None = None,
        line_seconds: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder, self._n_steps, self._progress = folder, n_steps, progress
        self._start_step, self._line_seconds, self._clock = start_step, line_seconds, clock
        self._files = ExitStack()
        self._tensorboard: Any = None
        last: Row = {}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            if tensorboard:  # before metrics.jsonl changes, because it may not be installed
                self._tensorboard = _open_tensorboard(folder / TENSORBOARD, start_step)
                self._files.callback(self._tensorboard.close)
            kept = cut_metrics(folder / METRICS, start_step)
            last = next((row for row in reversed(kept) if row["kind"] == TRAIN), {})
            self._metrics = self._files.enter_context((folder / METRICS).open("ab", buffering=0))
        self._n_tokens: int = last.get("tokens", 0)
        self._opened = self._line_due = self._last_logged = clock()
        self._begin = self._opened - last.get("seconds", 0.0)
        self._unlogged: Row | None = None

    def __enter__(self) -> Telemetry:
        self._last_logged = self._clock()
        return self

    def __exit__(self, *_: object) -> None:
        self._log_line()
        self._files.close()

    def log_step(self, step: int, metrics: Mapping[str, float], n_tokens: int) -> None:
        """Record the metrics of a step, and the speed since the last call.

        `n_tokens` are the tokens of all processes since the last call.
        """
        now = self._clock()
        passed, self._last_logged = now - self._last_logged, now
        self._n_tokens += n_tokens
        speed = n_tokens / passed if passed > 0 else math.nan
        pace = {"tokens": self._n_tokens, "tokens_per_second": speed}
        self._unlogged = self._write(TRAIN, step, {**metrics, **pace})
        if now >= self._line_due:
            self._log_line()

    def log_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the validation losses after a step."""
        self._log_row(self._write(VALIDATION, step, metrics))

    def log_probe(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the scores of the transfer probe after a step."""
        self._log_row(self._write(PROBE, step, metrics))

    def advance(self, step: int) -> None:
        """Report the number of finished steps to `progress`."""
        if self._progress is not None and self.folder is not None:
            self._progress("training", step, self._n_steps)

    def info(self, text: str) -> None:
        """Log a message."""
        if self.folder is not None:
            logger.info(text)

    def warn(self, text: str) -> None:
        """Log a warning."""
        if self.folder is not None:
            logger.warning(text)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time of the block from the training speed."""
        before = self._clock()
        try:
            yield
        finally:
            self._last_logged += self._clock() - before

    def _write(self, kind: str, step: int, metrics: Mapping[str, float]) -> Row:
        """Append a row to metrics.jsonl and TensorBoard; JSON has null for NaN and infinity."""
        row = {"kind": kind, "step": step, **metrics, "seconds": self._clock() - self._begin}
        if self.folder is None:
            return row
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in row.items()
        }
        try:
            self._metrics.write(json.dumps(finite).encode() + b"\n")
        except OSError as error:
            raise InputError(
                f"the metrics cannot be written: {error}",
                file=self.folder / METRICS,
                fix="free some disk space",
            ) from error
        if self._tensorboard is not None:
            for key, value in row.items():
                if key not in ("kind", "step"):
                    self._tensorboard.add_scalar(f"{kind}/{key}", value, step)
            self._tensorboard.flush()
        return row

    def _log_row(self, row: Row) -> None:
        self.info(f"step {row['step']} · {row['kind']} · {format_metrics(row)}")

    def _log_line(self) -> None:
        """Log the last training metrics, if they were not logged yet, with the time left."""
        if self._unlogged is None:
            return
        row, self._unlogged = self._unlogged, None
        now = self._clock()
        self._line_due = now + self._line_seconds
        n_done = max(row["step"] - self._start_step, 1)
        seconds_left = (now - self._opened) / n_done * (self._n_steps - row["step"])
        left = timedelta(seconds=round(seconds_left))
        self.info(f"step {row['step']}/{self._n_steps} · {format_metrics(row)} · {left} left")


def read_metrics(file: Path) -> list[Row]:
    """Return the rows of a metrics.jsonl; an incomplete last line, left by a kill, is skipped."""
    if not file.exists():
        return []
    lines = read_document(file).split(b"\n")[:-1]
    return [_parse_row(line, file, number) for number, line in enumerate(lines, start=1)]


def _parse_row(line: bytes, file: Path, number: int) -> Row:
    row = parse_json(line, file=file, line=number)
    values = dict(row) if isinstance(row, dict) else {}
    kind, step = values.pop("kind", None), values.pop("step", None)
    types = {type(value) for value in values.values()}
    if not isinstance(kind, str) or type(step) is not int or types - {int, float, type(None)}:
        problem = "the line has no metrics of a step"
        raise InputError(problem, file=file, line=number, fix="delete the line")
    return {"kind": kind, "step": step, **values}


def cut_metrics(file: Path, last_step: int) -> list[Row]:
    """Remove the rows after a step, all of them for step 0, and return the others."""
    rows = read_metrics(file) if last_step else []
    kept = [row for row in rows if row["step"] <= last_step]
    text = "".join(json.dumps(row) + "\n" for row in kept)
    if file.exists() and read_document(file) != text.encode():
        with write_atomically(file) as stream:
            stream.write(text)
    return kept


def format_metrics(row: Row) -> str:
    """Return the metrics of a row as one line: losses, other metrics, then the speed.

    Scores of single languages are left out, because there may be many.

    >>> format_metrics({"loss/mlm": 2.34567, "lr": 3e-4, "tokens_per_second": 1.21e6})
    'loss/mlm 2.346 · lr 0.0003 · 1.21M tokens/s'
    """
    skipped = ("kind", "step", "tokens", "seconds", "tokens_per_second")
    names = [name for name in row if name not in skipped and not name.startswith(PROBE_LANGUAGE)]
    names.sort(key=lambda name: not name.startswith("loss"))
    parts = [f"{name} {row[name]:.4g}" for name in names]
    if "tokens_per_second" in row:
        parts.append(f"{format_count(row['tokens_per_second'])} tokens/s")
    return " · ".join(parts)


def format_count(number: float) -> str:
    """Return a number in three digits, with a letter for thousands, millions and billions.

    >>> format_count(950), format_count(1_210_000)
    ('950', '1.21M')
    """
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def _open_tensorboard(folder: Path, start_step: int) -> Any:
    """Open a TensorBoard writer that discards events after a resumed step."""
    try:
        # importlib, because torch's own import of it is not typed
        module = importlib.import_module("torch.utils.tensorboard")
    except ImportError as error:
        raise MissingExtra("tensorboard", "telemetry") from error
    return module.SummaryWriter(str(folder), purge_step=start_step + 1 if start_step else None)
