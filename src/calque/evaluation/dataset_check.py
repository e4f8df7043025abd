"""The public function `check_data`: which datasets a folder contains, and what is wrong with it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from calque.errors import InputError
from calque.evaluation.datasets import Dataset, FileKind, find_dataset, load_datasets
from calque.io import conllu, dictionaries, labeled, questions
from calque.io.files import MAGIC_BYTES, read_lines

if TYPE_CHECKING:
    from calque.types import Progress


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file of a dataset. A file without labels has no items, an invalid one has a problem."""

    dataset: str
    split: str
    language: str
    path: Path
    n_items: int = 0
    is_unlabeled: bool = False
    problem: InputError | None = None


@dataclass(frozen=True, slots=True)
class FolderReport:
    """The files of known datasets in a folder, and the files that belong to none."""

    found: tuple[FoundFile, ...]
    unknown: tuple[Path, ...] = ()

    @property
    def problems(self) -> list[InputError]:
        """The problems of invalid files."""
        return [file.problem for file in self.found if file.problem is not None]

    def files_of(self, dataset: str) -> list[FoundFile]:
        """Return the files of a dataset."""
        return [file for file in self.found if file.dataset == dataset]

    def missing(self, name: str) -> list[str]:
        """Return the splits and languages of a dataset that are missing or could not be read."""
        dataset, files = find_dataset(name), self.files_of(name)
        splits = {file.split for file in files if file.n_items}
        languages = {file.language for file in files if file.n_items}
        absent = [f"no {split}" for split in dataset.splits if split not in splits]
        lacking = [language for language in dataset.expected.split() if language not in languages]
        if lacking:
            absent.append(f"no {' '.join(lacking)}")
        n_unlabeled = sum(file.is_unlabeled for file in files)
        if n_unlabeled:
            absent.append(f"{n_unlabeled} test files without labels")
        return absent


def check_data(
    folder: str | Path,
    tasks: Iterable[str] | None = None,
    *,
    progress: Progress | None = None,
) -> FolderReport:
    """Read every file of a folder that belongs to a known dataset, as the tasks would read it.

    Args:
        folder: Data folder; subfolders are included, links to folders are not followed.
        tasks: Check the datasets of these tasks only. Default: all.
        progress: Called with the number of files that have been read.

    Examples:
        >>> report = calque.check_data("data", ["xnli"])  # doctest: +SKIP
        >>> [(file.language, file.split, file.n_items) for file in report.found]  # doctest: +SKIP
        [('en', 'dev', 2490)]
    """
    folder, datasets = Path(folder), load_datasets(tasks)
    found, unknown = [], []
    paths = _list_files(folder)
    for n_done, path in enumerate(paths, start=1):
        name = f"/{folder.resolve().name}/{path.relative_to(folder).as_posix()}"
        match = recognize_file(name, datasets)
        if match is None:
            unknown.append(path)
        elif match[1].reader is not None:
            found.append(_check_file(path, *match))
        if progress is not None:
            progress("reading", n_done, len(paths))
    return FolderReport(tuple(found), tuple(unknown))


def recognize_file(
    name: str, datasets: Mapping[str, Dataset]
) -> tuple[str, FileKind, re.Match[str]] | None:
    """Return the dataset and the kind of a file by its path."""
    for dataset_name, dataset in datasets.items():
        for kind in dataset.files:
            if match := re.search(f"{kind.pattern}$", name):
                return dataset_name, kind, match
    return None


def _count_mining(path: Path) -> int:
    from calque.evaluation.tasks.bucc import read_test

    return len(read_test(path).gold)


def _count_tatoeba(path: Path) -> int:
    from calque.evaluation.tasks.tatoeba import read_test

    return len(read_test(path.parent, path.suffix[1:])[0])


def _count_similarities(path: Path) -> int:
    from calque.evaluation.tasks.word_similarity import read_pairs

    return len(read_pairs(path).src)


def _count_links(path: Path) -> int:
    from calque.evaluation.tasks.alignment_error import read_test

    return len(read_test(path.parent, path.stem)[0])


def _count_lines(path: Path) -> int:
    """Count the lines of a text; its English translation must have as many."""
    n_lines = sum(1 for _ in read_lines(path))
    name = path.stem if path.suffix in MAGIC_BYTES else path.name
    english = name.rpartition(".")[0] + ".en"
    for suffix in ("", *MAGIC_BYTES):
        other = path.with_name(english + suffix)
        if other.exists() and other != path:
            n_other = sum(1 for _ in read_lines(other))
            if n_other != n_lines:
                problem = f"the file has {n_lines:,} lines, but {other.name} has {n_other:,}"
                fix = "line n of both files must be translations of each other"
                raise InputError(problem, file=path, fix=fix)
    return n_lines


# The number of items in a file, by the name of the reader in datasets.toml.
READERS: dict[str, Callable[[Path], int]] = {
    "tagged": lambda path: len(conllu.read_tagged(path)),
    "names": lambda path: len(conllu.read_entity_tags(path)),
    "trees": lambda path: len(conllu.read_trees(path)),
    "pairs": lambda path: len(labeled.read_labeled_pairs(path)),
    "reviews": lambda path: len(labeled.read_reviews(path)),
    "questions": lambda path: len(questions.read_questions(path)),
    "entries": lambda path: sum(1 for _ in dictionaries.read_dictionary(path)),
    "mining": _count_mining,
    "tatoeba": _count_tatoeba,
    "similarities": _count_similarities,
    "links": _count_links,
    "lines": _count_lines,
}
# Readers of tables whose test files are published without the column of labels.
N_COLUMNS = {"tagged": 2, "names": 2, "pairs": 3}


def _check_file(path: Path, dataset: str, kind: FileKind, match: re.Match[str]) -> FoundFile:
    groups = match.groupdict()
    split = groups.get("split") or kind.split
    language = (groups.get("language") or "en").lower()
    reader = kind.reader or ""
    try:
        if _is_unlabeled(path, reader, split):
            return FoundFile(dataset, split, language, path, is_unlabeled=True)
        n_items = READERS[reader](path)
        if not n_items:
            raise InputError("the file is empty", file=path, fix="download it again")
        return FoundFile(dataset, split, language, path, n_items)
    except InputError as error:
        return FoundFile(dataset, split, language, path, problem=error)


def _is_unlabeled(path: Path, reader: str, split: str) -> bool:
    """Return whether a test file was published without its labels or answers."""
    if reader == "questions":
        from calque.evaluation.tasks.question_answering import has_answers

        return not has_answers(path)
    if split != "test" or reader not in N_COLUMNS:
        return False
    first = islice((line for line in read_lines(path) if line.strip()), 5)
    return all(line.rstrip("\t").count("\t") < N_COLUMNS[reader] - 1 for line in first)


def _list_files(folder: Path) -> list[Path]:
    """List the files of a folder and its subfolders, except hidden ones."""
    if not folder.is_dir():
        raise InputError("the folder does not exist", file=folder, fix="check the path")
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(root, name) for name in sorted(names) if not name.startswith(".")]
    return found
