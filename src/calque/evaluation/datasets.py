"""The catalog of datasets that tasks read, from datasets.toml. Nothing is ever downloaded."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from calque.errors import InputError

COMPRESSED = r"(?:\.(?:gz|xz|zst))?"


@dataclass(frozen=True, slots=True)
class FileKind:
    """Files of a dataset: a regular expression for their path, and the reader that checks them."""

    pattern: str
    reader: str | None = None
    split: str = ""


@dataclass(frozen=True, slots=True)
class Dataset:
    """An entry of the catalog; datasets.toml explains the fields."""

    title: str
    about: str
    languages: str
    license: str
    source: str
    citation: str
    layout: tuple[str, ...]
    tasks: tuple[str, ...]
    files: tuple[FileKind, ...]
    non_commercial: bool = False
    expected: str = ""
    splits: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()


def load_datasets(tasks: Iterable[str] | None = None) -> dict[str, Dataset]:
    """Return all datasets by name, or those of some tasks."""
    datasets = _read_catalog()
    if tasks is None:
        return dict(datasets)
    tasks = list(tasks)
    known = sorted({task for dataset in datasets.values() for task in dataset.tasks})
    for task in tasks:
        if task not in known:
            problem = f"there is no dataset for the task {task!r}"
            raise InputError(problem, fix=f"choose from: {', '.join(known)}")
    return {
        name: dataset
        for name, dataset in datasets.items()
        if not set(dataset.tasks).isdisjoint(tasks)
    }


def find_dataset(name: str) -> Dataset:
    """Return a dataset by name; raise an InputError if it is unknown."""
    datasets = _read_catalog()
    if name not in datasets:
        problem = f"there is no dataset {name!r}"
        raise InputError(problem, fix=f"choose from: {', '.join(datasets)}")
    return datasets[name]


@cache
def _read_catalog() -> dict[str, Dataset]:
    path = resources.files("calque.evaluation").joinpath("datasets.toml")
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    return {name: _build_dataset(name, entry) for name, entry in content.items()}


def _build_dataset(name: str, entry: dict[str, Any]) -> Dataset:
    reader = entry.pop("xtreme", None)
    kinds = entry.pop("files", []) if reader is None else _list_xtreme_files(name, reader)
    files = tuple(
        FileKind(**{**kind, "pattern": kind["pattern"].replace("<z>", COMPRESSED)})
        for kind in kinds
    )
    lists = {key: tuple(value) for key, value in entry.items() if isinstance(value, list)}
    return Dataset(**{**entry, **lists, "files": files})


def _list_xtreme_files(folder: str, reader: str) -> list[dict[str, str]]:
    """Return the patterns of XTREME's train-XX.tsv, dev-XX.tsv, test-XX.tsv and translations."""
    language = "(?P<language>[a-z]{2,3})"
    translated = rf"(?:train-|[a-z]{{2,3}}-){language}(?:-translated)?"
    test = rf"(?:(?:dev|test)-)?{language}[a-z-]*"
    return [
        {"pattern": rf"/{folder}/translate-(?:train|test)/[a-z-]+\.txt<z>"},
        {
            "pattern": rf"/{folder}/translate-train/{translated}(?:\.tsv)?<z>",
            "reader": reader,
            "split": "translate-train",
        },
        {
            "pattern": rf"/{folder}/translate-test/{test}(?:\.tsv)?<z>",
            "reader": reader,
            "split": "translate-test",
        },
        {
            "pattern": rf"/{folder}/(?P<split>train|dev|test)-{language}(?:\.tsv)?<z>",
            "reader": reader,
        },
    ]
