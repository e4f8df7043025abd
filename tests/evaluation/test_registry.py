"""The table of tasks."""

from __future__ import annotations

import pytest

from calque.errors import InputError
from calque.evaluation.registry import TASKS, find_tasks, load_function
from calque.evaluation.settings import TaskSettings, build_settings


def test_all_tasks_can_be_imported() -> None:
    for name, task in TASKS.items():
        for reference in filter(None, (task.measure, task.languages)):
            assert callable(load_function(reference, name))
        build_settings(task.defaults)
        assert set(task.settings) <= set(TaskSettings.__slots__)


def test_tasks_are_found_by_name() -> None:
    assert list(find_tasks(["pos_probe", " tatoeba", "tatoeba"])) == ["pos_probe", "tatoeba"]
    for names in (["tatoeba", "nope"], [""], []):
        with pytest.raises(InputError, match="choose from: tatoeba"):
            find_tasks(names)
    with pytest.raises(InputError, match="word_similarity measures word vectors and pos does not"):
        find_tasks(["pos", "word_similarity"])
