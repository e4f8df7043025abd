"""The folder of results: whole runs only, one writer, repairs."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calque.errors import InputError
from calque.evaluation.grid.model_specs import ModelSpec
from calque.evaluation.grid.results_folder import (
    open_results_folder,
    read_results_folder,
)
from calque.evaluation.grid.task_run import RunResult, TaskRun
from calque.evaluation.records import ItemScores, LanguageScores
from calque.evaluation.registry import TASKS
from calque.evaluation.settings import TaskSettings

RESULT = RunResult(
    (LanguageScores("de", {"accuracy": 50.0}, 2), LanguageScores("fr", {"accuracy": 25.0}, 4)),
    seconds=1.5,
)


def make_scores(*hits: float) -> tuple[LanguageScores, ...]:
    items = ItemScores(np.array(hits), np.ones(len(hits)))
    return tuple(
        LanguageScores(name, {"accuracy": items.score}, len(hits), items) for name in ("de", "fr")
    )


WITH_ITEMS, OTHER_SCORES = RunResult(make_scores(1, 0)), make_scores(1, 1, 0, 1)


def make_run(seed: int | None) -> TaskRun:
    spec = ModelSpec("m", "encoder", Path("nowhere"))
    task = TASKS["tatoeba"]
    return TaskRun(spec, "tatoeba", task, seed, Path(), None, TaskSettings(), "1-2-3")


@pytest.mark.parametrize("n_bytes", [5, 400])
def test_an_incomplete_run_is_removed(tmp_path: Path, n_bytes: int) -> None:
    """Whether the last line or the last line but one is torn, the whole run is repeated."""
    with open_results_folder(tmp_path) as results:
        for seed in (1, 2):
            results.add(make_run(seed), RESULT)
    path = tmp_path / "results.jsonl"
    first = path.read_bytes()[: path.stat().st_size // 2]
    path.write_bytes(path.read_bytes()[:-n_bytes])
    with open_results_folder(tmp_path) as results:
        assert list(results.runs) == [("m", "tatoeba", 1)]
        assert results.repairs == ["the last line was incomplete: its run is repeated"]
    assert path.read_bytes() == first
    with open_results_folder(tmp_path) as results:
        assert results.repairs == []


def test_a_repeated_run_replaces_its_records(tmp_path: Path) -> None:
    with open_results_folder(tmp_path) as results:
        results.add(make_run(1), RunResult(error="failed"))
        results.add(make_run(2), RESULT)
        assert results.find_error(make_run(1).key) == "failed"
        results.add(make_run(1), RESULT)
    with open_results_folder(tmp_path) as results:
        assert [record["seed"] for record in results.records] == [2, 2, 1, 1]
        assert results.find_error(make_run(1).key) is None


def test_one_process_writes(tmp_path: Path) -> None:
    with open_results_folder(tmp_path):
        problem = rf"process {os.getpid()} on {socket.gethostname()} is writing here"
        with pytest.raises(InputError, match=problem), open_results_folder(tmp_path):
            pass
    with open_results_folder(tmp_path):
        pass


def write_runs(folder: Path) -> bytes:
    """Write two runs with items and return their records."""
    with open_results_folder(folder) as results:
        for seed in (1, 2):
            results.add(make_run(seed), WITH_ITEMS)
    return (folder / "results.jsonl").read_bytes()


def change_items(folder: Path, change: Callable[[bytes], bytes]) -> None:
    (path,) = folder.glob("items/*.2.*")
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda folder: change_items(folder, lambda old: old[:-9]), "not a valid .npz file"),
        (lambda folder: change_items(folder, lambda old: old[:60] + b"x" + old[61:]), "npz"),
        (lambda folder: change_items(folder, lambda old: b""), "not a valid .npz file"),
        (lambda folder: next(folder.glob("items/*.2.*")).unlink(), "no such file"),
        (lambda folder: shutil.copy(*sorted(folder.glob("items/*"))), "the items give 50"),
        (lambda folder: cut_line(folder, 3), "it has 1 of 2 records"),
        (lambda folder: cut_line(folder, 2), "it has 1 of 2 records"),
    ],
)
def test_a_damaged_run_counts_as_not_done(
    tmp_path: Path, damage: Callable[[Path], object], problem: str
) -> None:
    """Its lines stay in the file until the run has been repeated."""
    write_runs(tmp_path)
    with open_results_folder(tmp_path) as results:  # another result, for items that do not fit
        results.add(make_run(2), replace(WITH_ITEMS, scores=OTHER_SCORES))
    damage(tmp_path)
    damaged = (tmp_path / "results.jsonl").read_bytes()
    assert list(read_results_folder(tmp_path)) == [("m", "tatoeba", 1)]
    with open_results_folder(tmp_path) as results:
        assert list(results.runs) == [("m", "tatoeba", 1)]
        (repair,) = results.repairs
        assert repair.startswith("m, tatoeba, seed 2: ") and problem in repair
        assert repair.endswith("; it counts as not done")
        assert results.path.read_bytes() == damaged
        results.add(make_run(2), WITH_ITEMS)
    assert [row["seed"] for row in read_rows(tmp_path)] == [1, 1, 2, 2]
    with open_results_folder(tmp_path) as results:
        assert results.repairs == []


def cut_line(folder: Path, number: int) -> None:
    lines = (folder / "results.jsonl").read_bytes().splitlines(keepends=True)
    del lines[number]
    (folder / "results.jsonl").write_bytes(b"".join(lines))


def test_a_changed_line_is_an_error_and_nothing_is_changed(tmp_path: Path) -> None:
    whole = write_runs(tmp_path)
    path = tmp_path / "results.jsonl"
    path.write_bytes(whole.replace(b'"seed": 2', b'"seed": 7', 1))
    before = path.read_bytes()
    with (
        pytest.raises(InputError, match=r"line 3: the line was changed .remove the line"),
        open_results_folder(tmp_path),
    ):
        pass
    assert path.read_bytes() == before
    cut_line(tmp_path, 2)  # as the message says
    with open_results_folder(tmp_path) as results:
        assert list(results.runs) == [("m", "tatoeba", 1)]


def test_folders_without_checksums_are_read(tmp_path: Path) -> None:
    write_runs(tmp_path)
    rows = [
        {name: value for name, value in row.items() if name not in ("checksum", "n_records")}
        for row in read_rows(tmp_path)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "results.jsonl").write_text(text, "utf-8")
    with open_results_folder(tmp_path) as results:
        assert results.records == rows and results.repairs == []
        results.add(make_run(3), WITH_ITEMS)
    assert all("checksum" in row for row in read_rows(tmp_path))


def test_items_that_another_run_shares_are_kept(tmp_path: Path) -> None:
    """Names of models that differ in punctuation only have the same file if all else is equal."""
    runs = [replace(make_run(1), model=ModelSpec(name, "encoder", Path())) for name in "./"]
    with open_results_folder(tmp_path) as results:
        for run in runs:
            results.add(run, WITH_ITEMS)
        results.add(replace(runs[0], config="7-8-9"), WITH_ITEMS)
    with open_results_folder(tmp_path) as results:
        assert results.repairs == []


def test_a_process_killed_at_its_first_write_can_be_continued(tmp_path: Path) -> None:
    for name in (".lock", ".calque-0.partial"):
        (tmp_path / name).touch()
    with open_results_folder(tmp_path) as results:
        assert results.records == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["items", "results.jsonl"]


def read_rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
