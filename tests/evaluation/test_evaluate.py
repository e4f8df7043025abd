"""`calque.evaluate`: the same scores in memory, in a file and in a folder, and comparisons."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import calque
from calque.errors import InputError
from calque.report.compare import compare
from calque.report.results import read_results

GOLD = Path(__file__).parents[1] / "data" / "gold"
CHANGING = ("seconds", "memory_mb", "time", "items")


@pytest.fixture(scope="module")
def data(demo_rows: list[tuple[str, str, str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "tatoeba").mkdir()
    for short, code in (("de", "deu"), ("hi", "hin")):
        rows = [row for row in demo_rows if row[0] == short]
        for side, column in (("eng", 1), (code, 2)):
            text = "".join(row[column] + "\n" for row in rows)
            (folder / "tatoeba" / f"tatoeba.{code}-eng.{side}").write_text(text, "utf-8")
    (folder / "gold_alignments").symlink_to(GOLD)
    return folder


@pytest.fixture(scope="module")
def models(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two models with different weights."""
    other = tmp_path_factory.mktemp("models") / "other"
    shutil.copytree(tiny_folder, other)
    weights = load_file(other / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    noisy = {
        name: w + 0.1 * torch.randn(w.shape, generator=generator) for name, w in weights.items()
    }
    save_file(noisy, other / "model.safetensors", metadata={"format": "pt"})
    return [f"old={tiny_folder}", f"new={other}"]


def drop_changing(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in CHANGING}


def test_memory_file_and_folder_have_the_same_records(
    models: list[str], data: Path, tmp_path: Path
) -> None:
    file, folder = tmp_path / "scores.jsonl", tmp_path / "scores"
    options: dict[str, Any] = {"data": data, "tasks": "tatoeba,word_alignment", "jobs": 0}
    in_memory = calque.evaluate(models, **options)
    in_file = calque.evaluate(models, output=file, **options)
    in_folder = calque.evaluate(models, output=folder, **options)
    records = [drop_changing(record) for record in in_memory.records]
    assert len(records) == 2 * (2 + 3)
    assert {record["seed"] for record in records} == {None}
    for result in (in_file, in_folder):
        assert [drop_changing(record) for record in result.records] == records
    for path, result in ((file, in_file), (folder / "results.jsonl", in_folder)):
        lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        assert all(line.pop("checksum") for line in lines)
        assert lines == list(result.records)
    assert {record["items"] for record in in_file.records} == {None}
    assert all((folder / record["items"]).is_file() for record in in_folder.records)
    assert (in_file.output, in_folder.output, in_memory.output) == (file, folder, None)

    # `calque compare` reads both.
    rows = {path: read_results([path]).rows for path in (file, folder)}
    values = [
        {(row.model, row.task, row.language): (row.value, row.layers) for row in found}
        for found in rows.values()
    ]
    assert values[0] == values[1]
    pytest.importorskip("scipy")
    compared = [compare(path, baseline="old") for path in (file, folder)]
    differences = [
        {
            (task.task, language): each.difference
            for task in comparison.tasks
            for model in task.models.values()
            for language, each in model.languages.items()
        }
        for comparison in compared
    ]
    assert differences[0] == differences[1]
    assert len(differences[0]) == 5
    assert any("items" in note for note in compared[0].notes)
    assert not any("items" in note for note in compared[1].notes)


def test_progress_and_log(models: list[str], data: Path) -> None:
    lines: list[str] = []
    steps: list[tuple[str, int, int | None]] = []
    calque.evaluate(
        models[0],
        data=data,
        layers=[0],
        log=lines.append,
        progress=lambda *step: steps.append(step),
    )
    assert steps == [("evaluation", done, 100) for done in (0, 50, 100, 100)]
    (line,) = lines
    assert line.startswith("1/1 old, tatoeba: accuracy ")


def test_a_time_limit_leaves_runs_for_later(models: list[str], data: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"data": data, "output": tmp_path / "out", "jobs": 0}
    stopped = calque.evaluate(models, time_limit=-1, **options)
    assert (stopped.n_remaining, stopped.records) == (2, ())
    finished = calque.evaluate(models, **options)
    assert (finished.n_remaining, len(finished.records)) == (0, 4)


def test_the_first_error_is_raised_without_a_folder(
    models: list[str], data: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"data": data, "layers": [7], "jobs": 0}
    with pytest.raises(InputError, match="layer 7"):
        calque.evaluate(models, output=tmp_path / "r.jsonl", **options)
    assert list(tmp_path.iterdir()) == []
    result = calque.evaluate(models, output=tmp_path / "out", **options)
    assert result.n_failed == 2
    assert all("layer 7" in record["error"] for record in result.records)


def test_values_may_be_written_as_on_the_command_line(models: list[str], data: Path) -> None:
    options: dict[str, Any] = {"data": data, "dry_run": True}
    as_text = {"layers": "all", "languages": "de,hi", "settings": {"layer": "1"}}
    plans = [
        calque.evaluate(models, **options, **kind).planned
        for kind in (as_text, {"languages": ["de", "hi"], "settings": {"layer": 1}})
    ]
    assert plans[0] == plans[1] and len(plans[0]) == 2
    with pytest.raises(InputError, match="the value 'two' of epochs is invalid"):
        calque.evaluate(models, **options, settings={"epochs": "two"})


def test_settings_are_checked_before_the_work(models: list[str], data: Path) -> None:
    for options, problem in (
        ({"settings": {"speed": 1}}, "there is no setting 'speed'"),
        ({"neutral": True, "center": True}, "neutral=True is invalid"),
        ({"tasks": "bucc", "layers": [1]}, "bucc does not support layers"),
        ({"jobs": "many"}, "jobs 'many' is not a number"),
        ({"seeds": [1, 1]}, "seeds .* are invalid"),
        ({"languages": ["xx"]}, "tatoeba has no test for xx"),
    ):
        with pytest.raises(InputError, match=problem):
            calque.evaluate(models, data=data, **options)  # type: ignore[arg-type]
