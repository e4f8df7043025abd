"""What a run tells while it trains: a progress bar or plain lines, metrics.jsonl, TensorBoard.

    with open_telemetry(run, n_steps, start_step=resumed_step, is_main=is_main) as telemetry:
        telemetry.log_step(step, {"loss": 2.1, "loss/mlm": 2.1, "lr": 3e-4}, n_tokens)
        with telemetry.paused():        # validation and saving do not count as training time
            telemetry.log_validation(step, {"loss": 2.3})

Figures are plain numbers: take them off the device every few steps, not at every one.
"""

from __future__ import annotations

import importlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from calque.errors import InputError, MissingExtra
from calque.io.files import write_atomically

METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"
TRAIN, VALIDATION, PROBE = "train", "validation", "probe"
# Figures of a probe: the source language, the mean of the others, the difference, all by name.
PROBE_SOURCE, PROBE_OTHERS, PROBE_GAP, PROBE_LANGUAGE = "source", "others", "gap", "score/"

Row = dict[str, Any]
Clock = Callable[[], float]


class Sink(Protocol):
    """A place that rows and messages go to."""

    def write(self, row: Row) -> None:
        """Take one row: `kind`, `step` and figures."""

    def say(self, text: str) -> None:
        """Take one message for a reader."""

    def close(self) -> None:
        """Let go of files and screen."""


class Telemetry:
    """Sends every figure to all sinks; with no sinks it is silent.

    `n_tokens` are those of all processes since the previous `log_step`.
    """

    def __init__(
        self, sinks: Sequence[Sink] = (), *, past: Row | None = None, clock: Clock = time.monotonic
    ) -> None:
        past = past or {}
        self._sinks, self._clock = sinks, clock
        self._n_tokens: int = past.get("tokens", 0)
        self._begin = clock() - past.get("seconds", 0.0)
        self._mark = clock()

    def __enter__(self) -> Telemetry:
        self._mark = self._clock()
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as stack:
            for sink in self._sinks:
                stack.callback(sink.close)

    def log_step(self, step: int, figures: Mapping[str, float], n_tokens: int) -> None:
        """Record the figures of a training step and the speed since the last one recorded."""
        now = self._clock()
        passed, self._mark = now - self._mark, now
        self._n_tokens += n_tokens
        speed = n_tokens / passed if passed > 0 else math.nan
        pace = {"tokens": self._n_tokens, "tokens_per_second": speed}
        self._send(TRAIN, step, {**figures, **pace, "seconds": now - self._begin})

    def log_validation(self, step: int, figures: Mapping[str, float]) -> None:
        """Record what validation found after a step."""
        self._send(VALIDATION, step, {**figures, "seconds": self._clock() - self._begin})

    def log_probe(self, step: int, figures: Mapping[str, float]) -> None:
        """Record what the probe of transfer found after a step."""
        self._send(PROBE, step, {**figures, "seconds": self._clock() - self._begin})

    def say(self, text: str) -> None:
        """Tell the reader of the screen something."""
        for sink in self._sinks:
            sink.say(text)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep what happens inside out of the training speed."""
        before = self._clock()
        try:
            yield
        finally:
            self._mark += self._clock() - before

    def _send(self, kind: str, step: int, figures: Mapping[str, float]) -> None:
        row = {"kind": kind, "step": step, **figures}
        for sink in self._sinks:
            sink.write(row)


class JsonLines:
    """Appends rows to metrics.jsonl, each at once; not-finite numbers become null."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._stream = file.open("ab", buffering=0)

    def write(self, row: Row) -> None:
        """Append one row."""
        finite = {key: _finite(value) for key, value in row.items()}
        try:
            self._stream.write(json.dumps(finite).encode() + b"\n")
        except OSError as error:
            raise InputError(f"cannot be written: {error}", file=self._file) from error

    def say(self, text: str) -> None:
        """Messages are for the screen."""

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


class TensorBoard:
    """Writes every figure as a TensorBoard scalar: `train/…`, `validation/…`, `probe/…`."""

    def __init__(self, folder: Path, start_step: int) -> None:
        try:
            # importlib: torch's own import of it is not typed
            module = importlib.import_module("torch.utils.tensorboard")
        except ImportError as error:
            raise MissingExtra("tensorboard", "telemetry") from error
        purge = start_step + 1 if start_step else None
        self._writer = module.SummaryWriter(str(folder), purge_step=purge)

    def write(self, row: Row) -> None:
        """Add one row's figures."""
        for key, value in row.items():
            if key not in ("kind", "step"):
                self._writer.add_scalar(f"{row['kind']}/{key}", value, row["step"])
        self._writer.flush()

    def say(self, text: str) -> None:
        """Messages are for the screen."""

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class Bar:
    """A live bar for a terminal: step k/n, time left, figures of the last row."""

    def __init__(self, console: Console, n_steps: int, start_step: int) -> None:
        columns: list[str | ProgressColumn] = [
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}", markup=False, table_column=Column(ratio=1)),
        ]
        # The figures take the width that is left, and wrap where a terminal is narrow.
        self._progress = Progress(*columns, console=console, refresh_per_second=4, expand=True)
        self._task = self._progress.add_task("", total=n_steps, completed=start_step, figures="")
        self._progress.start()

    def write(self, row: Row) -> None:
        """Move the bar, or print a row of another kind above it."""
        if row["kind"] != TRAIN:
            self.say(f"step {row['step']} · {row['kind']} · {describe(row)}")
        else:
            self._progress.update(self._task, completed=row["step"], figures=describe(row))

    def say(self, text: str) -> None:
        """Print above the bar."""
        _print(self._progress.console, text)

    def close(self) -> None:
        """Leave the bar as it stands."""
        self._progress.stop()


class PlainLines:
    """One line every so many seconds, for logs and pipes; the last step is always told."""

    def __init__(
        self, console: Console, n_steps: int, start_step: int, seconds: float, clock: Clock
    ) -> None:
        self._console, self._n_steps, self._seconds, self._clock = console, n_steps, seconds, clock
        self._start_step, self._begin = start_step, clock()
        self._due = self._begin
        self._untold: Row | None = None

    def write(self, row: Row) -> None:
        """Print a row if it is time, or if it is no step of training."""
        if row["kind"] != TRAIN:
            self.say(f"step {row['step']} · {row['kind']} · {describe(row)}")
            return
        self._untold = row
        if self._clock() >= self._due:
            self._tell()

    def say(self, text: str) -> None:
        """Print a line."""
        _print(self._console, text)

    def close(self) -> None:
        """Print the last row, if it was not due."""
        self._tell()

    def _tell(self) -> None:
        if self._untold is None:
            return
        row, self._untold = self._untold, None
        self._due = self._clock() + self._seconds
        left = format_seconds(self._seconds_left(row["step"]))
        self.say(f"step {row['step']}/{self._n_steps} · {describe(row)} · {left} left")

    def _seconds_left(self, step: int) -> float:
        done = max(step - self._start_step, 1)
        return (self._clock() - self._begin) / done * (self._n_steps - step)


def open_telemetry(
    run: Path,
    n_steps: int,
    *,
    start_step: int = 0,
    is_main: bool = True,
    tensorboard: bool = False,
    line_seconds: float = 30.0,
    console: Console | None = None,
    clock: Clock = time.monotonic,
) -> Telemetry:
    """Open a run's telemetry; processes other than the main one get a silent one.

    A new run (`start_step=0`) starts metrics.jsonl afresh; a resumed one cuts the rows after
    `start_step` and counts tokens and seconds on from there. `clock` counts seconds.
    """
    if not is_main:
        return Telemetry(clock=clock)
    run.mkdir(parents=True, exist_ok=True)
    # Tensorboard first: if it is missing, nothing has been touched yet.
    sinks: list[Sink] = [TensorBoard(run / TENSORBOARD, start_step)] if tensorboard else []
    kept = cut_metrics(run / METRICS, start_step)
    sinks.append(JsonLines(run / METRICS))
    console = console or Console()
    if console.is_terminal:
        sinks.append(Bar(console, n_steps, start_step))
    else:
        sinks.append(PlainLines(console, n_steps, start_step, line_seconds, clock))
    past = next((row for row in reversed(kept) if row["kind"] == TRAIN), None)
    return Telemetry(sinks, past=past, clock=clock)


def read_metrics(file: Path) -> list[Row]:
    """Read the rows of a metrics.jsonl; a line that a kill cut short is left out."""
    if not file.exists():
        return []
    rows = (_parse(line) for line in file.read_text("utf-8", errors="replace").splitlines())
    return [row for row in rows if row is not None]


def cut_metrics(file: Path, last_step: int) -> list[Row]:
    """Drop the rows after a step, all of them for step 0, and return those kept."""
    kept = [row for row in read_metrics(file) if last_step and row["step"] <= last_step]
    text = "".join(json.dumps(row) + "\n" for row in kept)
    if file.exists() and file.read_bytes() != text.encode():
        with write_atomically(file) as stream:
            stream.write(text)
    return kept


def plot_losses(run: Path, out: Path) -> None:
    """Draw every loss of a run over its steps into a PNG, validation dashed."""
    try:
        figures: Any = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise MissingExtra("matplotlib", "plots") from error
    curves = _loss_curves(read_metrics(run / METRICS))
    if not curves:
        raise InputError("holds no losses to plot", file=run / METRICS, fix="train first")
    figure = figures.Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss")
    for (kind, name), points in curves.items():
        style = "o--" if kind == VALIDATION else "-"
        axes.plot(*zip(*points, strict=True), style, label=f"{name} ({kind})")
    axes.grid(alpha=0.3)
    axes.legend()
    _save_figure(figure, out)


def describe(row: Row) -> str:
    """Put a row's figures into one line: losses, the rest, then the speed.

    >>> describe({"loss/mlm": 2.34567, "lr": 3e-4, "tokens_per_second": 1.21e6})
    'loss/mlm 2.346 · lr 0.0003 · 1.21M tokens/s'
    """
    left_out = ("kind", "step", "tokens", "seconds", *filter(_is_language, row))
    shown = {k: v for k, v in row.items() if k not in left_out}
    speed = shown.pop("tokens_per_second", None)
    names = sorted(shown, key=lambda name: not name.startswith("loss"))
    parts = [f"{name} {shown[name]:.4g}" for name in names]
    return " · ".join(parts if speed is None else [*parts, f"{format_count(speed)} tokens/s"])


def format_count(number: float) -> str:
    """Shorten a large number.

    >>> format_count(950), format_count(1_210_000)
    ('950', '1.21M')
    """
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def format_seconds(seconds: float) -> str:
    """Write a duration as hours, minutes and seconds.

    >>> format_seconds(3725)
    '1:02:05'
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}"


def _is_language(name: str) -> bool:
    """Tell the figures of single languages, of which there may be too many for a line."""
    return name.startswith(PROBE_LANGUAGE)


def _print(console: Console, text: str) -> None:
    """Print text as it is: no markup, no colours by guess, no wrapping in the middle of a log."""
    console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)


def _finite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _parse(line: str) -> Row | None:
    """Read one line of metrics.jsonl, or None where it is not a row."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and {"kind", "step"} <= row.keys() else None


def _loss_curves(rows: Sequence[Row]) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """Collect (step, value) for every loss of every kind of row."""
    curves: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith("loss") and value is not None:
                curves.setdefault((row["kind"], name), []).append((row["step"], value))
    return curves


def _save_figure(figure: Any, out: Path) -> None:
    """Write a PNG aside and rename it, so that no half of it is ever left."""
    draft = out.with_name(f".{out.name}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(draft, format="png", dpi=120)
        draft.replace(out)
    except OSError as error:
        raise InputError(f"cannot be written: {error}", file=out) from error
    finally:
        draft.unlink(missing_ok=True)
