"""What a folder holds of the known datasets: languages, splits, how much, and what is wrong."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from calque.tasks.dataset_catalog import DATASETS
from calque.tasks.dataset_kinds import Dataset, FileKind
from calque.tasks.dataset_readers import READERS, is_unlabelled
from calque.types import InputError


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file of a dataset; without labels it has no items, if malformed it has a problem."""

    dataset: str
    split: str
    language: str
    path: Path
    n_items: int = 0
    is_unlabelled: bool = False
    problem: InputError | None = None


@dataclass(frozen=True, slots=True)
class FolderReport:
    """All that was found in a folder, and how many files belong to no dataset."""

    found: tuple[FoundFile, ...]
    unknown: tuple[Path, ...] = field(default=())

    @property
    def problems(self) -> list[InputError]:
        """What is wrong with files, in their order."""
        return [file.problem for file in self.found if file.problem is not None]

    def of(self, dataset: str) -> list[FoundFile]:
        """Give the files of a dataset."""
        return [file for file in self.found if file.dataset == dataset]

    def missing(self, name: str) -> list[str]:
        """Say what of a dataset is not there, or could not be read."""
        dataset = DATASETS[name]
        usable = [file for file in self.of(name) if file.n_items]
        splits, languages = (
            {getattr(file, what) for file in usable} for what in ("split", "language")
        )
        absent = [f"no {split}" for split in dataset.splits if split not in splits]
        lacking = [language for language in dataset.expected.split() if language not in languages]
        if lacking:
            absent.append(f"no {' '.join(lacking)}")
        n_unlabelled = sum(file.is_unlabelled for file in self.of(name))
        if n_unlabelled:
            absent.append(f"{n_unlabelled} test files without labels")
        return absent


def check_folder(
    folder: Path,
    datasets: Mapping[str, Dataset] | None = None,
    on_file: Callable[[int], None] | None = None,
) -> FolderReport:
    """Read every file of a folder that belongs to a dataset, and say what is in it.

    Folders in it are looked through, links to folders are not followed.
    """
    known = DATASETS if datasets is None else datasets
    found, unknown = [], []
    for path in list_files(folder):
        place = f"/{folder.resolve().name}/{path.relative_to(folder).as_posix()}"
        match = _recognize(place, known)
        if match is None:
            unknown.append(path)
        elif match[1].reader is not None:
            found.append(_read(path, *match))
        if on_file is not None:
            on_file(1)
    return FolderReport(tuple(found), tuple(unknown))


def list_files(folder: Path) -> list[Path]:
    """List the files beneath a folder, but hidden ones."""
    if not folder.is_dir():
        raise InputError("no such folder", file=folder, fix="check the path")
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(root, name) for name in sorted(names) if not name.startswith(".")]
    return found


def _recognize(
    place: str, known: Mapping[str, Dataset]
) -> tuple[str, FileKind, re.Match[str]] | None:
    for name, dataset in known.items():
        for kind in dataset.files:
            if match := re.search(f"{kind.pattern}$", place):
                return name, kind, match
    return None


def _read(path: Path, dataset: str, kind: FileKind, match: re.Match[str]) -> FoundFile:
    groups = match.groupdict()
    split = groups.get("split") or kind.split
    language = (groups.get("language") or "en").lower()
    reader = kind.reader or ""
    try:
        if is_unlabelled(path, reader, split):
            return FoundFile(dataset, split, language, path, is_unlabelled=True)
        return FoundFile(dataset, split, language, path, READERS[reader](path))
    except InputError as error:
        return FoundFile(dataset, split, language, path, problem=error)
