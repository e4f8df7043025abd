"""Grids: exact records, nothing computed twice, nothing half-written after any failure."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import calque
from calque.cli import run
from calque.errors import InputError
from calque.evaluation.registry import TASKS

TOY = Path(__file__).parent / "toy_grid.py"
KEYS = [
    *("model", "task", "language", "seed", "metric", "value", "metrics", "n_items", "layers"),
    *("counts", "setting", "source", "maps", "higher_is_better", "config", "versions", "seconds"),
    *("memory_mb", "device", "time", "error", "items", "n_records", "checksum"),
]
Row = dict[str, Any]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    (folder / "fake").mkdir(parents=True)
    for language, n_lines in (("de", 5), ("fr", 7)):
        (folder / "fake" / f"test-{language}.txt").write_text("line\n" * n_lines)
    return folder


@pytest.fixture
def evaluate(
    tiny_folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., int]]:
    """Evaluate a toy task in this process, with more options and other models."""
    monkeypatch.syspath_prepend(str(TOY.parent))
    from toy_grid import TRAINED, UNTRAINED

    monkeypatch.setitem(TASKS, "toy", TRAINED)
    monkeypatch.setitem(TASKS, "steady", UNTRAINED)

    def call(*options: str, models: tuple[str, ...] = ("tiny=" + str(tiny_folder),)) -> int:
        fixed = ["--data", str(data), "--tasks", "toy", "--jobs", "0", "-o", str(tmp_path / "out")]
        return run(["evaluate", *models, *fixed, *options])

    yield call
    sys.modules.pop("toy_grid", None)


def read_rows(folder: Path) -> list[Row]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def read_log(data: Path) -> list[int]:
    """The seeds that were computed, in order."""
    path = data / "fake" / "log"
    return [int(line.split()[1]) for line in path.read_text().splitlines()] if path.exists() else []


def test_records_are_exact(evaluate: Callable[..., int], tmp_path: Path) -> None:
    assert evaluate("--seeds", "2", "--set", "epochs=4", "--source", "de") == 0
    rows = read_rows(tmp_path / "out")
    assert [(row["language"], row["seed"]) for row in rows] == [
        ("de", 1), ("fr", 1), ("de", 2), ("fr", 2),
    ]  # fmt: skip
    for row in rows:
        assert list(row) == KEYS
        assert (row["model"], row["task"], row["metric"]) == ("tiny", "toy", "accuracy")
        assert row["value"] == row["metrics"]["accuracy"]
        assert row["n_items"] == row["metrics"]["lines"] == {"de": 5, "fr": 7}[row["language"]]
        assert (row["layers"], row["counts"]) == ({"2": 1.5}, {"cut": 3})
        assert (row["setting"], row["source"]) == ("zero-shot", "de")
        assert row["higher_is_better"] is True and row["error"] is None
        assert set(row["versions"]) == {"calque", "torch", "transformers", "python"}
        assert row["seconds"] > 0 and row["memory_mb"] > 0 and row["device"] == "cpu"
        with np.load(tmp_path / "out" / row["items"], allow_pickle=False) as items:
            num, den = items[f"{row['language']}.num"], items[f"{row['language']}.den"]
            assert sorted(items) == ["de.den", "de.num", "fr.den", "fr.num"]
        assert 100 * num.sum() / den.sum() == pytest.approx(row["value"], abs=1e-6)
        assert num.dtype == den.dtype == np.float64
    assert len({row["config"] for row in rows}) == 1
    assert rows[0]["value"] != rows[2]["value"] or rows[1]["value"] != rows[3]["value"]


def test_supervised_training_has_no_source(evaluate: Callable[..., int], tmp_path: Path) -> None:
    """Otherwise a comparison would report a transfer gap where nothing was transferred."""
    assert evaluate("--seeds", "1", "--setting", "supervised") == 0
    row = read_rows(tmp_path / "out")[0]
    assert (row["setting"], row["source"]) == ("supervised", None)


def test_finished_runs_are_not_repeated(
    evaluate: Callable[..., int], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate("--seeds", "2") == 0
    before = (tmp_path / "out" / "results.jsonl").read_bytes()
    assert evaluate("--seeds", "3") == 0
    after = (tmp_path / "out" / "results.jsonl").read_bytes()
    assert after.startswith(before)
    assert read_log(data) == [1, 2, 3]
    assert "1 runs to do; 2 are done" in capsys.readouterr().err
    assert evaluate("--seeds", "3") == 0
    assert (tmp_path / "out" / "results.jsonl").read_bytes() == after


def test_the_order_of_seeds_has_no_effect(evaluate: Callable[..., int], tmp_path: Path) -> None:
    assert evaluate("--seeds", "2") == 0
    first = [row["value"] for row in read_rows(tmp_path / "out")]
    shutil.rmtree(tmp_path / "out")
    assert evaluate("--seeds", "2,1") == 0
    again = {(row["seed"], row["language"]): row["value"] for row in read_rows(tmp_path / "out")}
    assert [again[seed, name] for seed in (1, 2) for name in ("de", "fr")] == first


def test_a_failed_run_is_recorded_and_repeated(
    evaluate: Callable[..., int], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (data / "fake" / "fail-2").touch()
    assert evaluate("--seeds", "3") == 1
    assert "1 runs failed" in capsys.readouterr().err
    rows = read_rows(tmp_path / "out")
    (failed,) = [row for row in rows if row["error"]]
    assert list(failed) == KEYS
    assert failed["error"].startswith("ZeroDivisionError: on purpose (toy_grid.py, line ")
    assert (failed["seed"], failed["language"], failed["value"]) == (2, None, None)
    assert [row["seed"] for row in rows] == [1, 1, 2, 3, 3]
    (data / "fake" / "fail-2").unlink()
    assert evaluate("--seeds", "3") == 0
    assert "1 runs to do, 1 of them again; 2 are done" in capsys.readouterr().err
    assert sorted(row["seed"] for row in read_rows(tmp_path / "out")) == [1, 1, 2, 2, 3, 3]
    assert all(row["error"] is None for row in read_rows(tmp_path / "out"))
    assert read_log(data) == [1, 2, 3, 2]


@pytest.mark.parametrize("part", ["settings", "data", "model"])
def test_another_configuration_is_an_error(
    evaluate: Callable[..., int],
    data: Path,
    tiny_folder: Path,
    tmp_path: Path,
    part: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_folder, model)
    assert evaluate("--seeds", "1", models=(f"m={model}",)) == 0
    before = read_rows(tmp_path / "out")
    options = ["--set", "epochs=9"] if part == "settings" else []
    if part == "data":
        (data / "fake" / "test-de.txt").write_text("Zeile\n" * 5)
    if part == "model":
        content = bytearray((model / "model.safetensors").read_bytes())
        content[-1] ^= 1
        (model / "model.safetensors").write_bytes(content)
    capsys.readouterr()
    assert evaluate("--seeds", "1", *options, models=(f"m={model}",)) == 2
    assert f"the results of m, toy, seed 1 were made with other {part}" in capsys.readouterr().err
    assert read_rows(tmp_path / "out") == before
    assert evaluate("--seeds", "1", "--overwrite", *options, models=(f"m={model}",)) == 0
    after = read_rows(tmp_path / "out")
    assert [row["language"] for row in after] == ["de", "fr"]
    assert after[0]["config"] != before[0]["config"]
    assert [path.name for path in (tmp_path / "out" / "items").iterdir()] == [
        after[0]["items"].removeprefix("items/")
    ]


def test_models_have_their_own_runs(
    evaluate: Callable[..., int], tiny_folder: Path, tmp_path: Path, capsys: Any
) -> None:
    tiny = str(tiny_folder)
    models = (tiny, tiny + "/", f"random:{tiny}", f"floor=random:{tiny}")
    assert (
        evaluate("--seeds", "2", "--tasks", "toy,steady", "--languages", "de", models=models) == 0
    )
    rows = read_rows(tmp_path / "out")
    cells = [(row["model"], row["task"], row["seed"]) for row in rows]
    seeded = [(name, "toy", seed) for name in (tiny, f"random:{tiny}", "floor") for seed in (1, 2)]
    # Nothing is trained in the other task: only random weights depend on the seed there.
    steady = [(tiny, "steady", None)]
    steady += [(name, "steady", seed) for name in (f"random:{tiny}", "floor") for seed in (1, 2)]
    assert cells == seeded + steady
    found = {cell: row["value"] for cell, row in zip(cells, rows, strict=True)}
    assert found["floor", "steady", 1] == found[f"random:{tiny}", "steady", 1]
    assert {row["higher_is_better"] for row in rows if row["task"] == "steady"} == {False}
    assert evaluate(models=(tiny, f"{tiny}=random:{tiny}")) == 2
    assert evaluate(models=("a=" + tiny, f"a=random:{tiny}")) == 2
    assert "two models have the name 'a'" in capsys.readouterr().err


def test_training_runs_are_seeds_of_one_model(
    evaluate: Callable[..., int], tiny_folder: Path, tmp_path: Path, capsys: Any
) -> None:
    for seed in (1, 2):
        draw_copy(tiny_folder, tmp_path / f"run-{seed}", seed)
    models = (f"mine={tmp_path}/run-{{seed}}", str(tiny_folder))
    options = ("--seeds", "2", "--tasks", "toy,steady", "--languages", "de")
    assert evaluate(*options, models=models) == 0
    rows = read_rows(tmp_path / "out")
    cells = [(row["model"], row["task"], row["seed"]) for row in rows]
    names = ("mine", str(tiny_folder))
    seeded = [(name, "toy", seed) for name in names for seed in (1, 2)]
    # Where nothing is trained, only the training runs differ.
    steady = [("mine", "steady", 1), ("mine", "steady", 2), (str(tiny_folder), "steady", None)]
    assert cells == seeded + steady
    hashes = {(row["model"], row["seed"]): row["config"].split("-")[2] for row in rows}
    assert hashes["mine", 1] != hashes["mine", 2]
    assert evaluate(*options, models=models) == 0
    assert "0 runs to do; 7 are done" in capsys.readouterr().err
    assert evaluate("--seeds", "3", models=models) == 2
    assert "run-3" in capsys.readouterr().err


def draw_copy(folder: Path, target: Path, seed: int) -> None:
    """Copy a model with other weights."""
    shutil.copytree(folder, target)
    weights = load_file(target / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    changed = {name: torch.randn(w.shape, generator=generator) for name, w in weights.items()}
    save_file(changed, target / "model.safetensors", metadata={"format": "pt"})


def test_a_torn_line_is_repaired(
    evaluate: Callable[..., int], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate("--seeds", "2") == 0
    path = tmp_path / "out" / "results.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])  # in the last row of seed 2, whose other row is not to be kept
    assert evaluate("--seeds", "2") == 0
    assert "the last line was incomplete" in capsys.readouterr().err
    assert read_log(data) == [1, 2, 2]
    assert [row["value"] for row in read_rows(tmp_path / "out")] == [
        json.loads(line)["value"] for line in whole.splitlines()
    ]


def test_languages_must_have_a_test(
    evaluate: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate("--seeds", "1", "--languages", "fr,deu,sw") == 2
    assert "has a test for 'sw'" in capsys.readouterr().err
    assert evaluate("--seeds", "1", "--languages", "fr,deu") == 0
    assert [row["language"] for row in read_rows(tmp_path / "out")] == ["de", "fr"]
    assert evaluate("--seeds", "1", "--languages", "de,fr") == 0  # the order says nothing
    assert "0 runs to do; 1 are done" in capsys.readouterr().err


def test_english_is_tested_if_asked_for(
    evaluate: Callable[..., int], data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (data / "fake" / "test-en.txt").write_text("line\n")
    assert evaluate("--seeds", "1", "--languages", "de", "--dry-run") == 0
    assert capsys.readouterr().out.rstrip("\n").endswith("\tde")
    assert evaluate("--seeds", "1", "--languages", "de,en", "--dry-run") == 0
    assert capsys.readouterr().out.rstrip("\n").endswith("\tde en")
    assert evaluate("--seeds", "1", "--languages", "sw", "--dry-run") == 2
    assert "toy has no test for sw" in capsys.readouterr().err


def test_a_dry_run_reports_languages_without_a_test(
    evaluate: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setitem(TASKS, "other", replace(TASKS["toy"], languages="toy_grid:list_more"))
    options = ("--tasks", "toy,other", "--languages", "de,sw", "--dry-run")
    assert evaluate("--seeds", "1", *options) == 0
    assert "toy has no test for sw" in capsys.readouterr().err


def test_a_dry_run_lists_the_runs(
    evaluate: Callable[..., int], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate("--seeds", "2", "--dry-run") == 0
    assert not (tmp_path / "out").exists() and read_log(data) == []
    assert evaluate("--seeds", "1") == 0
    capsys.readouterr()
    assert evaluate("--seeds", "2", "--dry-run") == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [(state, cell) for state, cell, *_ in lines] == [
        ("done", "tiny, toy, seed 1"),
        ("to do", "tiny, toy, seed 2"),
    ]
    assert [line[3] for line in lines] == ["de fr", "de fr"]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--tasks", "nope"], "there is no task 'nope'"),
        (["--languages", "sw"], "toy has no test for sw"),
        (["--seeds", "0"], "the seeds 0 are invalid"),
        (["--seeds", "1,1"], "the seeds [1, 1] are invalid"),
        (["--seeds", "many"], "the seeds many are invalid"),
        (["--jobs", "few"], "jobs 'few' is not a number"),
        (["--set", "speed=3"], "there is no setting 'speed'"),
        (["--set", "epochs=x"], "the value 'x' of epochs is invalid"),
        (["--set", "epochs"], "--set epochs has no equals sign"),
        (["--setting", "magic"], "setting='magic'"),
        (["--device", "cuda:77"], "the device 'cuda:77' does not exist"),
        (["--layers", "3"], "toy does not support layers"),
        (["--center"], "toy does not support center"),
        (
            ["--tasks", "toy,word_similarity"],
            "word_similarity measures word vectors and toy does not",
        ),
        (["--tasks", "tatoeba"], "no files tatoeba.xxx-eng.xxx"),
    ],
)
def test_invalid_options_write_nothing(
    evaluate: Callable[..., int],
    tmp_path: Path,
    options: list[str],
    problem: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert evaluate(*options) == 2
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_invalid_models_and_folders(
    evaluate: Callable[..., int],
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert evaluate(models=("no/such/model/at/all",)) == 2
    assert "no such folder" in capsys.readouterr().err
    assert evaluate(models=(str(data),)) == 2
    assert "no config.json" in capsys.readouterr().err
    (tmp_path / "out").write_text("a file")
    assert evaluate() == 2
    assert "the output is a file" in capsys.readouterr().err
    assert evaluate("-o", str(data)) == 2
    assert "the folder contains fake and no results.jsonl" in capsys.readouterr().err
    other = tmp_path / "other"
    other.mkdir()
    (other / "results.jsonl").write_text('{"something": "else"}\n')
    assert evaluate("-o", str(other)) == 2
    assert "line 1: model is missing" in capsys.readouterr().err
    assert evaluate("-o", str(tmp_path / "out" / "below")) == 2
    assert "out: this is not a folder" in capsys.readouterr().err
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "items").touch()
    assert evaluate("-o", str(tmp_path / "taken")) == 2
    assert "items: the output is a file" in capsys.readouterr().err
    (tmp_path / "taken" / "items").unlink()
    (tmp_path / "taken" / "results.jsonl").mkdir()
    assert evaluate("-o", str(tmp_path / "taken")) == 2
    assert "results.jsonl: this is not a file" in capsys.readouterr().err
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)  # for root, too
    assert evaluate("-o", str(tmp_path / "new")) == 2
    assert "permission denied" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


# With processes.


def start(models: list[str], data: Path, out: Path, *options: str) -> subprocess.Popen[str]:
    fixed = ["--data", str(data), "--tasks", "toy", "--device", "cpu", "-o", str(out)]
    command = [sys.executable, str(TOY), "evaluate", *models, *fixed, *options]
    return subprocess.Popen(
        command,
        text=True,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # a process group of its own
        # Where the tests run in the background, interrupts are ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def wait_for(is_so: Callable[[], object], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 100
    while not is_so() and time.monotonic() < end and process.poll() is None:
        time.sleep(0.05)
    assert is_so(), process.communicate()[1] if process.poll() is not None else "too slow"


def list_group(group: int) -> dict[int, str]:
    """Return the running processes of a group and their command lines."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, own_group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            command = (folder / "cmdline").read_text()  # empty while a process ends
            if int(own_group) == group and state != "Z" and command:
                found[int(folder.name)] = command
        except OSError:  # it has just ended
            continue
    return found


def list_workers(group: int) -> list[int]:
    return [process for process, command in list_group(group).items() if "spawn_main" in command]


def signal_group(process: subprocess.Popen[str], kind: signal.Signals) -> list[str]:
    """Send a signal to a whole process group, check how it ends, and return its messages.

    The workers get it first, as may happen by chance, and must not be disturbed.
    """
    workers = list_workers(process.pid)
    for worker in workers:
        os.kill(worker, kind)
    time.sleep(0.5)
    assert set(workers) <= set(list_workers(process.pid))
    started = time.monotonic()
    os.killpg(process.pid, kind)
    error = process.communicate(timeout=60)[1]
    assert time.monotonic() - started < 8, "the process was ended by force"
    assert process.returncode == 128 + kind, error
    assert not list_group(process.pid)
    return error.splitlines()


@pytest.mark.slow
def test_interrupted_killed_and_resumed(
    evaluate: Callable[..., int], tiny_folder: Path, data: Path, tmp_path: Path
) -> None:
    models, out = ["tiny=" + str(tiny_folder)], tmp_path / "out"
    for seed in (2, 3):
        (data / "fake" / f"slow-{seed}").touch()
    # A signal to the whole group while workers start, and one while they are at work.
    process = start(models, data, out, "--seeds", "4", "--jobs", "2")
    wait_for(lambda: len(list_workers(process.pid)) == 2, process)
    time.sleep(1.0)  # a worker that is being created may still report that its parent has ended
    messages = signal_group(process, signal.SIGINT)
    note = f"runs are saved in {out}: the same command continues"
    assert messages == ["4 runs to do", f"calque: interrupted; 0 of 4 {note}"]

    process = start(models, data, out, "--seeds", "4", "--jobs", "2")
    wait_for(lambda: sorted(read_log(data)) == [1, 2, 3], process)
    messages = signal_group(process, signal.SIGTERM)
    assert messages[-1] == f"calque: interrupted; 1 of 4 {note}"
    assert "Traceback" not in "".join(messages)
    rows = read_rows(out)
    assert [row["seed"] for row in rows] == [1, 1]
    assert sorted(path.name for path in out.iterdir()) == ["items", "results.jsonl"]

    process = start(models, data, out, "--seeds", "4", "--jobs", "1")
    wait_for(lambda: len(read_log(data)) == 4, process)
    locked = f"{out}: process {process.pid} on {socket.gethostname()} is writing here"
    with pytest.raises(InputError, match=re.escape(locked)):
        calque.evaluate(models, data=data, tasks="toy", output=out)
    process.kill()
    process.communicate(timeout=10)  # until the workers, which inherit the pipe, have ended, too
    assert not list_group(process.pid)
    assert read_rows(out) == rows

    for seed in (2, 3):
        (data / "fake" / f"slow-{seed}").unlink()
    assert evaluate("--seeds", "4") == 0
    assert sorted(read_log(data)[4:]) == [2, 3, 4]
    assert read_rows(out)[:2] == rows
    resumed = {(row["seed"], row["language"]): row["value"] for row in read_rows(out)}
    shutil.rmtree(out)
    assert evaluate("--seeds", "4") == 0
    whole = {(row["seed"], row["language"]): row["value"] for row in read_rows(out)}
    assert resumed == whole


@pytest.mark.slow
def test_a_dead_worker_fails_one_run_only(tiny_folder: Path, data: Path, tmp_path: Path) -> None:
    (data / "fake" / "die-2").touch()
    out = tmp_path / "out"
    process = start(["tiny=" + str(tiny_folder)], data, out, "--seeds", "4", "--jobs", "2")
    error = process.communicate(timeout=200)[1]
    assert process.returncode == 1, error
    rows = read_rows(out)
    assert sorted(row["seed"] for row in rows) == [1, 1, 2, 3, 3, 4, 4]
    (failed,) = [row for row in rows if row["error"]]
    assert failed["error"] == "the worker was killed by SIGKILL, possibly because memory ran out"
    n_workers = len({line.split()[0] for line in (data / "fake" / "log").read_text().splitlines()})
    assert n_workers <= 2  # the other one went on alone
    assert os.path.getsize(out / "results.jsonl") > 0
