"""Telemetry: each step once in the file, correct speeds, log lines, and silence elsewhere."""

from __future__ import annotations

import errno
import io
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from calque.errors import InputError, MissingExtra
from calque.training import telemetry
from calque.training.telemetry import Telemetry, cut_metrics, format_metrics, read_metrics


class Clock:
    """A clock that is set by the test."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def _log_everything(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.INFO, "calque"):
        yield


def log_run(run: Path, steps: range, start_step: int = 0, **options: Any) -> None:
    """Log steps of 10 tokens, each with its own number as its loss."""
    with Telemetry(run, 100, start_step=start_step, **options) as log:
        for step in steps:
            log.log_step(step, {"loss": float(step), "lr": 0.5}, 10)


def test_row_has_metrics_tokens_and_speed(tmp_path: Path) -> None:
    clock = Clock()
    with Telemetry(tmp_path, 10, clock=clock) as log:
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
    with Telemetry(tmp_path, 10, clock=clock) as log:
        clock.now += 1
        with log.paused():
            clock.now += 50
        clock.now += 1
        log.log_step(1, {}, 10)
    row = read_metrics(tmp_path / "metrics.jsonl")[0]
    assert (row["tokens_per_second"], row["seconds"]) == (5.0, 52.0)


def test_rows_are_in_the_file_at_once(tmp_path: Path) -> None:
    with Telemetry(tmp_path, 10) as log:
        log.log_step(1, {"loss": 2.0}, 10)
        assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1


def test_resumed_run_has_each_step_once_and_counts_on(tmp_path: Path) -> None:
    clock = Clock()
    with Telemetry(tmp_path, 100, clock=clock) as log:
        for step in range(1, 8):
            clock.now += 1
            log.log_step(step, {"loss": 9.0}, 10)
            log.log_validation(step, {"loss": 9.0})
    with Telemetry(tmp_path, 100, start_step=4, clock=clock) as log:
        clock.now += 1
        log.log_step(5, {"loss": 1.0}, 10)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows if row["kind"] == "train"] == [1, 2, 3, 4, 5]
    assert [row["step"] for row in rows if row["kind"] == "validation"] == [1, 2, 3, 4]
    assert (rows[-1]["loss"], rows[-1]["tokens"], rows[-1]["seconds"]) == (1.0, 50, 5.0)


def test_new_run_starts_with_an_empty_file(tmp_path: Path) -> None:
    log_run(tmp_path, range(3))
    log_run(tmp_path, range(2))
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1]


def test_incomplete_line_is_dropped_on_resume(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    log_run(tmp_path, range(1, 3))
    file.write_bytes(file.read_bytes() + b'{"kind": "train", "step": 3, "lo')
    log_run(tmp_path, range(3, 5), start_step=2)
    steps = [json.loads(line)["step"] for line in file.read_text().splitlines()]
    assert steps == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"kind": "train"}',
        '{"kind": "train", "step": "1"}',
        '{"kind": "train", "step": true}',
        '{"kind": 1, "step": 1}',
        '{"kind": "train", "step": 1, "loss/mlm": "2"}',
        '{"kind": "train", "step": 1' + "0" * 400 + "}",
        '{"kind": "train", "step": 1, "loss/mlm": ' + 9000 * "[" + 9000 * "]" + "}",
        "\udcff",
    ],
)
def test_damaged_line_is_an_error(line: str, tmp_path: Path) -> None:
    file, good = tmp_path / "metrics.jsonl", '{"kind": "train", "step": 1, "loss/mlm": null}\n'
    file.write_text(f"{good}{line}\n{good}", "utf-8", errors="surrogateescape")
    with pytest.raises(InputError, match=r"metrics\.jsonl, line 2: ") as caught:
        cut_metrics(file, 1)
    assert "\n" not in str(caught.value)
    assert cut_metrics(file, 0) == []  # a new run does not need them


def test_folder_instead_of_metrics_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    for step in (0, 1):
        with pytest.raises(InputError, match=r"metrics\.jsonl: is a directory"):
            Telemetry(tmp_path, 2, start_step=step)


def test_file_is_cut_atomically_and_only_if_needed(
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


def test_metrics_that_are_not_finite_become_null(tmp_path: Path) -> None:
    log_run(tmp_path, range(0))
    with Telemetry(tmp_path, 10) as log:
        log.log_step(1, {"loss": float("nan"), "grad_norm": float("inf")}, 10)
    text = (tmp_path / "metrics.jsonl").read_text()
    row = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert row["loss"] is None
    assert row["grad_norm"] is None


def test_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class FullDisk(io.BytesIO):
        def write(self, _: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    with Telemetry(tmp_path, 10) as log:
        monkeypatch.setattr(log, "_metrics", FullDisk())
        with pytest.raises(InputError, match=r"metrics\.jsonl.*No space left"):
            log.log_validation(1, {"loss": 1.0})


def test_other_processes_are_silent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: object) -> None:
        raise AssertionError

    with Telemetry(None, 10, tensorboard=True, progress=fail) as log, log.paused():
        log.log_step(1, {"loss": 1.0}, 10)
        log.log_validation(1, {"loss": 1.0})
        log.info("hello")
        log.warn("careful")
        log.advance(1)
    assert not caplog.records


def test_training_metrics_are_logged_every_30_seconds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    with Telemetry(tmp_path, 10, clock=clock) as log:
        for step in range(1, 8):
            clock.now += 10
            log.log_step(step, {"lr": 0.001, "loss/mlm": 2.34567}, 20_000)
        log.log_validation(7, {"loss": 2.5})
        log.warn("100 %s")
    assert caplog.messages == [
        "step 1/10 · loss/mlm 2.346 · lr 0.001 · 2k tokens/s · 0:01:30 left",
        "step 4/10 · loss/mlm 2.346 · lr 0.001 · 2k tokens/s · 0:01:00 left",
        "step 7/10 · loss/mlm 2.346 · lr 0.001 · 2k tokens/s · 0:00:30 left",
        "step 7 · validation · loss 2.5",
        "100 %s",
    ]
    assert [record.levelname for record in caplog.records] == ["INFO"] * 4 + ["WARNING"]


def test_last_step_is_always_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log_run(tmp_path, range(1, 6), clock=Clock())
    assert [line.split(" · ")[0] for line in caplog.messages] == ["step 1/100", "step 5/100"]


def test_time_left_counts_steps_since_resuming_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    with Telemetry(tmp_path, 10, start_step=8, clock=clock) as log:
        clock.now += 10
        log.log_step(9, {}, 10)
    assert caplog.messages[-1].endswith("0:00:10 left")


def test_progress_is_called_after_every_step(tmp_path: Path) -> None:
    calls: list[tuple[str, int, int | None]] = []
    with Telemetry(tmp_path, 10, progress=lambda *call: calls.append(call)) as log:
        log.advance(1)
        log.advance(2)
    assert calls == [("training", 1, 10), ("training", 2, 10)]


def test_files_are_closed_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), Telemetry(tmp_path, 10) as log:
        raise KeyboardInterrupt
    with pytest.raises(ValueError, match="closed"):
        log.log_step(1, {}, 1)


def test_losses_come_first_and_speed_last() -> None:
    row = {"kind": "train", "step": 1, "lr": 0.25, "loss": 1.0, "tokens": 7, "seconds": 3.0}
    assert format_metrics(row | {"tokens_per_second": 12.0}) == "loss 1 · lr 0.25 · 12 tokens/s"


def test_tensorboard_has_every_metric_once(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log_run(tmp_path, range(1, 5), tensorboard=True)
    with Telemetry(tmp_path, 100, start_step=2, tensorboard=True) as resumed:
        resumed.log_step(3, {"loss": 30.0}, 10)
        resumed.log_validation(3, {"loss": 31.0})
    events = accumulators.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    losses = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert losses == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert [event.value for event in events.Scalars("validation/loss")] == [31.0]
    assert len(events.Scalars("train/tokens_per_second")) == 3


def test_missing_tensorboard_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_run(tmp_path, range(1, 3))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtra, match=r"tensorboard.*calque\[telemetry\]"):
        Telemetry(tmp_path, 10, tensorboard=True)
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 2
