"""Telemetry: each step once in the file, honest speeds, a bar or lines, silence elsewhere."""

from __future__ import annotations

import errno
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from calque.errors import InputError, MissingExtra
from calque.training import telemetry
from calque.training.telemetry import (
    JsonLines,
    cut_metrics,
    describe,
    open_telemetry,
    plot_losses,
    read_metrics,
)


class Clock:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def screen(terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=100)


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def log_run(run: Path, steps: range, start_step: int = 0, **options: Any) -> None:
    """Log steps of 10 tokens, each with its own number as its loss."""
    options = {"console": screen()} | options
    with open_telemetry(run, 100, start_step=start_step, **options) as log:
        for step in steps:
            log.log_step(step, {"loss": float(step), "lr": 0.5}, 10)


def test_a_row_holds_figures_tokens_and_speed(tmp_path: Path) -> None:
    clock = Clock()
    with open_telemetry(tmp_path, 10, console=screen(), clock=clock) as log:
        clock.now += 2
        log.log_step(5, {"loss": 1.5, "lr": 1e-4, "grad_norm": 0.5}, 1000)
        clock.now += 1
        log.log_validation(5, {"loss": 1.75})
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == [
        {"kind": "train", "step": 5, "loss": 1.5, "lr": 1e-4, "grad_norm": 0.5}
        | {"tokens": 1000, "tokens_per_second": 500.0, "seconds": 2.0},
        {"kind": "validation", "step": 5, "loss": 1.75, "seconds": 3.0},
    ]


def test_pauses_do_not_count_as_training_time(tmp_path: Path) -> None:
    clock = Clock()
    with open_telemetry(tmp_path, 10, console=screen(), clock=clock) as log:
        clock.now += 1
        with log.paused():
            clock.now += 50
        clock.now += 1
        log.log_step(1, {}, 10)
    row = read_metrics(tmp_path / "metrics.jsonl")[0]
    assert (row["tokens_per_second"], row["seconds"]) == (5.0, 52.0)


def test_rows_are_in_the_file_at_once(tmp_path: Path) -> None:
    with open_telemetry(tmp_path, 10, console=screen()) as log:
        log.log_step(1, {"loss": 2.0}, 10)
        assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1


def test_resuming_leaves_each_step_once_and_counts_on(tmp_path: Path) -> None:
    clock = Clock()
    with open_telemetry(tmp_path, 100, console=screen(), clock=clock) as log:
        for step in range(1, 8):
            clock.now += 1
            log.log_step(step, {"loss": 9.0}, 10)
            log.log_validation(step, {"loss": 9.0})
    with open_telemetry(tmp_path, 100, start_step=4, console=screen(), clock=clock) as log:
        clock.now += 1
        log.log_step(5, {"loss": 1.0}, 10)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows if row["kind"] == "train"] == [1, 2, 3, 4, 5]
    assert [row["step"] for row in rows if row["kind"] == "validation"] == [1, 2, 3, 4]
    assert (rows[-1]["loss"], rows[-1]["tokens"], rows[-1]["seconds"]) == (1.0, 50, 5.0)


def test_a_new_run_starts_the_file_afresh(tmp_path: Path) -> None:
    log_run(tmp_path, range(3))
    log_run(tmp_path, range(2))
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1]


def test_a_line_cut_by_a_kill_is_dropped_on_resume(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    log_run(tmp_path, range(1, 3))
    file.write_bytes(file.read_bytes() + b'{"kind": "train", "step": 3, "lo')
    log_run(tmp_path, range(3, 5), start_step=2)
    steps = [json.loads(line)["step"] for line in file.read_text().splitlines()]
    assert steps == [1, 2, 3, 4]


def test_cutting_is_atomic_and_needless_cuts_write_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_run(tmp_path, range(1, 4))
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def refuse(*_: object) -> None:
        raise InputError("no space")

    monkeypatch.setattr(telemetry, "write_atomically", refuse)
    assert len(cut_metrics(tmp_path / "metrics.jsonl", 3)) == 3
    with pytest.raises(InputError, match="no space"):
        cut_metrics(tmp_path / "metrics.jsonl", 2)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_not_finite_figures_stay_valid_json(tmp_path: Path) -> None:
    log_run(tmp_path, range(0))
    with open_telemetry(tmp_path, 10, console=screen()) as log:
        log.log_step(1, {"loss": float("nan"), "grad_norm": float("inf")}, 10)
    text = (tmp_path / "metrics.jsonl").read_text()
    row = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert row["loss"] is None
    assert row["grad_norm"] is None


def test_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class FullDisk(io.BytesIO):
        def write(self, _: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    sink = JsonLines(tmp_path / "metrics.jsonl")
    sink.close()
    monkeypatch.setattr(sink, "_stream", FullDisk())
    with pytest.raises(InputError, match=r"metrics\.jsonl.*No space left"):
        sink.write({"kind": "train", "step": 1})


def test_other_processes_are_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    with open_telemetry(run, 10, is_main=False, tensorboard=True) as log, log.paused():
        log.log_step(1, {"loss": 1.0}, 10)
        log.log_validation(1, {"loss": 1.0})
        log.say("hello")
    assert not run.exists()
    assert capsys.readouterr() == ("", "")


def test_without_a_terminal_lines_come_every_so_many_seconds(tmp_path: Path) -> None:
    clock, console = Clock(), screen()
    with open_telemetry(tmp_path, 10, console=console, clock=clock, line_seconds=30) as log:
        for step in range(1, 8):
            clock.now += 10
            log.log_step(step, {"lr": 0.001, "loss/mlm": 2.34567}, 20_000)
        log.log_validation(7, {"loss": 2.5})
        log.say("a [bold]message[/bold] :smile:")
    assert text_of(console).splitlines() == [
        "step 1/10 · loss/mlm 2.346 · lr 0.001 · 2k tokens/s · 0:01:30 left",
        "step 4/10 · loss/mlm 2.346 · lr 0.001 · 2k tokens/s · 0:01:00 left",
        "step 7/10 · loss/mlm 2.346 · lr 0.001 · 2k tokens/s · 0:00:30 left",
        "step 7 · validation · loss 2.5",
        "a [bold]message[/bold] :smile:",
    ]


def test_the_last_step_is_told_even_if_not_due(tmp_path: Path) -> None:
    console = screen()
    log_run(tmp_path, range(1, 6), console=console, clock=Clock())
    assert [line.split(" · ")[0] for line in text_of(console).splitlines()] == [
        "step 1/100",
        "step 5/100",
    ]


def test_lines_are_never_wrapped(tmp_path: Path) -> None:
    console = screen()
    with open_telemetry(tmp_path, 10, console=console) as log:
        log.log_step(1, {f"loss/objective_{k}": 1.0 for k in range(20)}, 10)
    assert len(text_of(console).splitlines()) == 1


def test_the_time_left_counts_only_steps_since_resuming(tmp_path: Path) -> None:
    clock, console = Clock(), screen()
    with open_telemetry(tmp_path, 10, start_step=8, console=console, clock=clock) as log:
        clock.now += 10
        log.log_step(9, {}, 10)
    assert text_of(console).endswith("0:00:10 left\n")


def test_a_terminal_gets_a_bar(tmp_path: Path) -> None:
    console = screen(terminal=True)
    with open_telemetry(tmp_path, 10, console=console) as log:
        log.log_step(5, {"loss/mlm": 2.5, "loss/tlm": 3.5, "lr": 1e-4}, 10)
        log.say("saved [step-5]")
        log.log_validation(5, {"loss": 4.25})
    text = text_of(console)
    assert "5/10" in text
    assert "loss/mlm 2.5 · loss/tlm 3.5 · lr 0.0001" in text
    assert "saved [step-5]" in text
    assert "step 5 · validation · loss 4.25" in text


def test_everything_is_closed_after_an_error(tmp_path: Path) -> None:
    console = screen(terminal=True)
    with pytest.raises(KeyboardInterrupt), open_telemetry(tmp_path, 10, console=console) as log:
        raise KeyboardInterrupt
    with pytest.raises(ValueError, match="closed"):
        log.log_step(1, {}, 1)


def test_describe_puts_losses_first_and_speed_last() -> None:
    row = {"kind": "train", "step": 1, "lr": 0.25, "loss": 1.0, "tokens": 7, "seconds": 3.0}
    assert describe(row | {"tokens_per_second": 12.0}) == "loss 1 · lr 0.25 · 12 tokens/s"


def test_tensorboard_gets_every_figure_and_forgets_what_was_redone(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log_run(tmp_path, range(1, 5), tensorboard=True)
    with open_telemetry(tmp_path, 100, start_step=2, console=screen(), tensorboard=True) as resumed:
        resumed.log_step(3, {"loss": 30.0}, 10)
        resumed.log_validation(3, {"loss": 31.0})
    events = accumulators.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    losses = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert losses == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert [event.value for event in events.Scalars("validation/loss")] == [31.0]
    assert len(events.Scalars("train/tokens_per_second")) == 3


def test_missing_tensorboard_names_the_extra_and_touches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_run(tmp_path, range(1, 3))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtra, match=r"tensorboard.*calque\[telemetry\]"):
        open_telemetry(tmp_path, 10, tensorboard=True)
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 2


def test_missing_matplotlib_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtra, match=r"matplotlib.*calque\[plots\]"):
        plot_losses(tmp_path, tmp_path / "losses.png")


def test_losses_are_drawn_into_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(InputError, match="holds no losses"):
        plot_losses(tmp_path, tmp_path / "losses.png")
    with open_telemetry(tmp_path, 100, console=screen()) as log:
        for step in range(1, 9):
            log.log_step(step, {"loss": 9.0 / step, "loss/mlm": float("nan"), "lr": 1.0}, 10)
        log.log_validation(8, {"loss": 2.0, "accuracy": 0.5})
    plot_losses(tmp_path, tmp_path / "plots" / "losses.png")
    assert (tmp_path / "plots" / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in (tmp_path / "plots").iterdir()] == ["losses.png"]


class RecordingFigure:
    """Stands in for a matplotlib figure and notes what is drawn."""

    def __init__(self, **_: object) -> None:
        self.lines: dict[str, tuple[tuple[float, ...], tuple[float, ...], str]] = {}
        RecordingFigure.last = self

    last: RecordingFigure

    def add_subplot(self, **_: object) -> RecordingFigure:
        return self

    def plot(self, x: tuple[float, ...], y: tuple[float, ...], style: str, label: str) -> None:
        self.lines[label] = (x, y, style)

    def grid(self, **_: object) -> None: ...

    def legend(self) -> None: ...

    def savefig(self, file: Path, **_: object) -> None:
        file.write_bytes(b"png")


def test_only_finite_losses_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        sys.modules, "matplotlib.figure", type("module", (), {"Figure": RecordingFigure})
    )
    with open_telemetry(tmp_path, 100, console=screen()) as log:
        log.log_step(1, {"loss": 3.0, "lr": 1.0}, 10)
        log.log_step(2, {"loss": float("nan")}, 10)
        log.log_step(3, {"loss": 1.0}, 10)
        log.log_validation(3, {"loss": 2.0, "accuracy": 0.5})
    plot_losses(tmp_path, tmp_path / "losses.png")
    assert RecordingFigure.last.lines == {
        "loss (train)": ((1, 3), (3.0, 1.0), "-"),
        "loss (validation)": ((3,), (2.0,), "o--"),
    }
