"""The datasets that tasks read: look them up by name or by task. Nothing is ever downloaded."""

from __future__ import annotations

from calque.tasks.dataset_catalog import DATASETS
from calque.tasks.dataset_kinds import Dataset
from calque.types import InputError


def find_dataset(name: str) -> Dataset:
    """Look up a dataset; an unknown one is an error."""
    if name not in DATASETS:
        raise InputError(
            f"no dataset is called {name!r}", fix=f"choose from: {', '.join(DATASETS)}"
        )
    return DATASETS[name]


def datasets_of(tasks: list[str]) -> dict[str, Dataset]:
    """List the datasets that tasks read; a task without one is an error."""
    with_data = sorted({task for dataset in DATASETS.values() for task in dataset.tasks})
    for task in tasks:
        if task not in with_data:
            raise InputError(
                f"no dataset of task {task!r}", fix=f"choose from: {', '.join(with_data)}"
            )
    return {
        name: found for name, found in DATASETS.items() if not set(found.tasks).isdisjoint(tasks)
    }
