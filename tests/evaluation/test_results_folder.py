"""The folder of results: whole runs only, one writer, repairs."""

from __future__ import annotations

from pathlib import Path

import pytest

from calque.errors import InputError
from calque.evaluation.grid.model_specs import ModelSpec
from calque.evaluation.grid.results_folder import ResultsFolder
from calque.evaluation.grid.task_run import RunResult, TaskRun
from calque.evaluation.records import LanguageScores
from calque.evaluation.registry import TASKS
from calque.evaluation.settings import TaskSettings

RESULT = RunResult(
    (LanguageScores("de", {"accuracy": 50.0}, 2), LanguageScores("fr", {"accuracy": 25.0}, 4)),
    seconds=1.5,
)


def make_run(seed: int | None) -> TaskRun:
    spec = ModelSpec("m", "encoder", Path("nowhere"))
    task = TASKS["tatoeba"]
    return TaskRun(spec, "tatoeba", task, seed, Path(), None, TaskSettings(), "1-2-3")


@pytest.mark.parametrize("n_bytes", [5, 400])
def test_an_incomplete_run_is_removed(tmp_path: Path, n_bytes: int) -> None:
    """Whether the last line or the last line but one is torn, the whole run is repeated."""
    with ResultsFolder(tmp_path) as results:
        for seed in (1, 2):
            results.add(make_run(seed), RESULT)
    path = tmp_path / "results.jsonl"
    first = path.read_bytes()[: path.stat().st_size // 2]
    path.write_bytes(path.read_bytes()[:-n_bytes])
    with ResultsFolder(tmp_path) as results:
        assert list(results.runs) == [("m", "tatoeba", 1)]
        assert results.repairs == ["the last line was incomplete: its run is repeated"]
    assert path.read_bytes() == first
    with ResultsFolder(tmp_path) as results:
        assert results.repairs == []


def test_a_repeated_run_replaces_its_records(tmp_path: Path) -> None:
    with ResultsFolder(tmp_path) as results:
        results.add(make_run(1), RunResult(error="failed"))
        results.add(make_run(2), RESULT)
        assert results.find_error(make_run(1).key) == "failed"
        results.add(make_run(1), RESULT)
    with ResultsFolder(tmp_path) as results:
        assert [record["seed"] for record in results.records] == [2, 2, 1, 1]
        assert results.find_error(make_run(1).key) is None


def test_one_process_writes(tmp_path: Path) -> None:
    with ResultsFolder(tmp_path), pytest.raises(InputError, match="another process"):
        ResultsFolder(tmp_path)
    ResultsFolder(tmp_path).close()
