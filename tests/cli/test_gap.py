"""`calque gap`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from calque.cli import run

ROWS = [
    {"kind": "probe", "step": 0, "source": 0.5, "others": 0.2, "gap": 0.3, "score/de": 0.2},
    {"kind": "train", "step": 10, "loss/masked_lm": 3.0},
    {"kind": "probe", "step": 10, "source": 0.75, "others": 0.5, "gap": 0.25, "score/de": 0.5},
    {"kind": "probe", "step": 1000, "source": 0.8, "others": 0.7, "gap": 0.1, "score/de": 0.7},
]


def write_run(folder: Path, rows: list[dict[str, object]]) -> Path:
    folder.mkdir()
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text)
    return folder


def read_cells(shown: str) -> list[list[str]]:
    """Return the cells of the rows that contain numbers."""
    rows = [[cell.strip() for cell in line.split("│")[2:-1]] for line in shown.splitlines()]
    return [row for row in rows if row and row[0][:1].isdigit()]


def test_first_and_last_step_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [write_run(tmp_path / "a", ROWS), write_run(tmp_path / "b", ROWS[:1])]
    assert run(["gap", *map(str, folders)]) == 0
    assert read_cells(capsys.readouterr().out) == [
        ["0", "50.0", "20.0", "30.0"],
        ["1,000", "80.0", "70.0", "10.0"],
        ["0", "50.0", "20.0", "30.0"],
    ]


def test_all_steps_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    folder, picture = write_run(tmp_path / "a", ROWS), tmp_path / "gap.svg"
    assert run(["gap", str(folder), "--steps", "--plot", str(picture)]) == 0
    shown = capsys.readouterr()
    assert [row[0] for row in read_cells(shown.out)] == ["0", "10", "1,000"]
    assert shown.err == f"{picture}: plot of source, others and gap by step\n"
    assert picture.read_bytes().startswith(b"<?xml")


def test_run_without_a_probe_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "a", ROWS[1:2])
    assert run(["gap", str(folder)]) == 2
    error = capsys.readouterr().err
    assert f"{folder}/metrics.jsonl: the run has no transfer scores (train with a `probe`" in error
    assert run(["gap", str(tmp_path / "none")]) == 2
    assert "no such folder" in capsys.readouterr().err
