"""Runs whose metrics are read while they are written."""

from __future__ import annotations

import json
import os
import time
from itertools import pairwise
from pathlib import Path

import pytest
from tests.server.conftest import write_metrics

from calque.server import training_runs
from calque.server.training_runs import MetricsFile, TrainingRuns


def test_an_incomplete_line_is_read_when_it_is_complete(tmp_path: Path) -> None:
    path = write_metrics(tmp_path, 20, end='{"kind": "train", "step": 30, "lo')
    file = MetricsFile(path)
    file.update()
    assert [row["step"] for row in file.rows] == [10, 20]
    with path.open("a") as stream:
        stream.write('ss/mlm": 3.0}\nnot JSON\n[1]\n{"kind": "train", "step": 40}\n')
    file.update()
    assert [row["step"] for row in file.rows] == [10, 20, 30, 40]
    assert file.rows[2]["loss/mlm"] == 3.0


def test_only_new_lines_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_metrics(tmp_path, 1000)
    file = MetricsFile(path)
    file.update()
    read: list[bytes] = []
    monkeypatch.setattr(MetricsFile, "_add", lambda self, line: read.append(line))
    file.update()
    assert read == []
    with path.open("a") as stream:
        stream.write('{"kind": "train", "step": 1010}\n')
    file.update()
    assert read == [b'{"kind": "train", "step": 1010}']


def test_a_replaced_file_is_read_from_its_start(tmp_path: Path) -> None:
    path = write_metrics(tmp_path / "run", 100)
    file = MetricsFile(path)
    file.update()
    os.replace(write_metrics(tmp_path / "other", 30), path)
    file.update()
    assert [row["step"] for row in file.rows] == [10, 20, 30]


def test_rows_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_runs, "MAX_ROWS", 100)
    path = tmp_path / "metrics.jsonl"
    rows = [{"kind": "train", "step": step} for step in range(1, 5001)]
    rows[2500:2500] = [{"kind": "validation", "step": 2500, "loss/mlm": 2.0}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    file = MetricsFile(path)
    file.update()
    steps = [row["step"] for row in file.rows]
    assert 40 <= len(steps) <= 101 and steps == sorted(steps)
    assert steps[0] < 200 and steps[-1] > 4800
    assert max(after - before for before, after in pairwise(steps)) <= 200
    assert any(row["kind"] == "validation" for row in file.rows)


def test_states(tmp_path: Path) -> None:
    for name in ("running", "finished", "stopped", "in/side"):
        write_metrics(tmp_path / name, 100)
    (tmp_path / "finished" / "model").mkdir()
    (tmp_path / "finished" / "model" / "config.json").write_text("{}")
    past = time.time() - 3600
    os.utime(tmp_path / "stopped" / "metrics.jsonl", (past, past))
    runs = TrainingRuns(tmp_path)
    states = {run["name"]: run["state"] for run in runs.describe()}
    assert states == {
        "running": "running",
        "finished": "finished",
        "stopped": "stopped",
        "in/side": "running",
    }
    by_name = {run["name"]: run for run in runs.describe()}
    assert by_name["running"]["eta_seconds"] == pytest.approx(450)
    assert by_name["stopped"]["eta_seconds"] is by_name["finished"]["eta_seconds"] is None
    assert runs.read("nothing", 0) is None


def test_a_run_without_recipe_and_rows(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    (run,) = TrainingRuns(tmp_path).describe()
    assert (run["step"], run["steps"], run["tokens_per_second"]) == (0, None, None)
    assert run["name"] == tmp_path.name
