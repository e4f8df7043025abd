"""Execution of runs: checks of results, errors in one line, the order of runs, estimated time."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from calque.errors import InputError
from calque.evaluation.grid.model_specs import ModelSpec
from calque.evaluation.grid.run_grid import choose_languages, choose_next
from calque.evaluation.grid.run_progress import TimeEstimate
from calque.evaluation.grid.runner import (
    breaks_process,
    check_scores,
    describe_error,
    describe_exit,
)
from calque.evaluation.grid.task_run import TaskRun
from calque.evaluation.records import LanguageScores
from calque.evaluation.registry import TASKS
from calque.evaluation.settings import TaskSettings


def make_run(task: str, seed: int) -> TaskRun:
    spec = ModelSpec("m", "encoder", Path("nowhere"))
    return TaskRun(spec, task, TASKS[task], seed, Path(), None, TaskSettings(), "1-2-3")


def test_scores_are_checked() -> None:
    good = LanguageScores("de", {"a": 1.0}, 1)
    check_scores((good,))
    for bad in ((), (good, good), (LanguageScores("fr", {"a": float("nan")}, 1),)):
        with pytest.raises(InputError):
            check_scores(bad)


def test_errors_are_one_line() -> None:
    with pytest.raises(RuntimeError) as caught:
        raise RuntimeError("CUDA out of memory.\nA long story")
    assert describe_error(caught.value).startswith("RuntimeError: CUDA out of memory. (test_runner")
    assert breaks_process(caught.value) and breaks_process(MemoryError())
    assert not breaks_process(ValueError("no CUDA here"))
    assert describe_error(InputError("bad", fix="repair it")) == "bad (repair it)"
    assert describe_exit(3) == "the worker ended with exit code 3"


def test_an_error_without_a_file_names_the_task() -> None:
    data, settings = Path(__file__).parents[1] / "data", TaskSettings(source="zu")
    with pytest.raises(InputError, match=r"data: ner: .*'zu'"):
        choose_languages("ner", TASKS["ner"], data, settings, None)


def test_the_estimate_depends_on_jobs_and_tasks() -> None:
    time = TimeEstimate()
    assert time.estimate(["pos"], [], 1) is None
    time.add("pos", 10)
    time.add("pos", 20)
    assert time.estimate(["pos", "pos"], [], 1) == 30
    assert time.estimate(["pos", "pos"], [], 2) == 15
    assert time.estimate(["ner"], [], 1) == 15  # unknown: as the others
    time.add("ner", 45)
    assert time.estimate(["ner", "qa"], [], 1) == 45 + 30
    assert time.estimate(["pos"], [("pos", 5), ("ner", 60)], 1) == 15 + 10
    assert time.estimate([], [("ner", 5)], 4) == 40  # the last run cannot be divided
    assert time.estimate([], [], 4) == 0


def test_workers_keep_their_model_and_task() -> None:
    queue = [make_run(task, seed) for task in ("pos_probe", "tatoeba") for seed in (1, 2)]
    workers: list[Any] = [SimpleNamespace(last_run=None), SimpleNamespace(last_run=None)]
    assert choose_next(queue, workers[0], workers) == 0
    workers[0].last_run = queue[0]
    assert choose_next(queue[1:], workers[1], workers) == 1  # the other task
    workers[1].last_run = queue[2]
    assert choose_next(queue[1:], workers[0], workers) == 0
    assert choose_next(queue[:2], workers[1], workers) == 0  # nothing else is left
