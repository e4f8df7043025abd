"""How many items a file of a dataset has, read by what the tasks themselves read it with.

What a folder holds of the known datasets: languages, splits, how much, and what is wrong.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from calque.errors import InputError
from calque.evaluation.datasets import DATASETS, Dataset, FileKind
from calque.io.files import MAGIC, read_lines


def count_tagged(path: Path) -> int:
    """Count sentences whose words have tags."""
    from calque.io.conllu import read_tagged

    return len(read_tagged(path))


def count_names(path: Path) -> int:
    """Count sentences whose words have tags of spans."""
    from calque.io.conllu import read_names

    return len(read_names(path))


def count_trees(path: Path) -> int:
    """Count sentences that are trees."""
    from calque.io.conllu import read_trees

    return len(read_trees(path))


def count_pairs(path: Path) -> int:
    """Count pairs of texts with a class."""
    from calque.io.labelled import read_pairs

    return len(read_pairs(path))


def count_questions(path: Path) -> int:
    """Count questions."""
    from calque.io.questions import read_questions

    return len(read_questions(path))


def count_reviews(path: Path) -> int:
    """Count reviews that are good or bad."""
    from calque.io.labelled import read_reviews

    return len(read_reviews(path))


def count_mining(path: Path) -> int:
    """Count the true pairs of two texts."""
    from calque.evaluation.tasks.bucc import read_test

    return len(read_test(path).gold)


def count_tatoeba(path: Path) -> int:
    """Count sentences with an English translation."""
    from calque.evaluation.tasks.tatoeba import read_test

    return len(read_test(path.parent, path.suffix[1:])[0])


def count_entries(path: Path) -> int:
    """Count entries of a dictionary."""
    from calque.io.dictionaries import read_dictionary

    return _some(sum(1 for _ in read_dictionary(path)), path)


def count_similarities(path: Path) -> int:
    """Count pairs of words with their similarity."""
    from calque.evaluation.tasks.word_similarity import read_pairs

    return len(read_pairs(path).src)


def count_links(path: Path) -> int:
    """Count sentence pairs with gold links."""
    from calque.evaluation.tasks.alignment_error import read_test

    return _some(len(read_test(path.parent, path.stem)[0]), path)


def count_lines(path: Path) -> int:
    """Count the lines of a text, as many as its English translation has."""
    n_lines = sum(1 for _ in read_lines(path))
    name = path.stem if path.suffix in MAGIC else path.name
    english = name.rpartition(".")[0] + ".en"
    for suffix in ("", *MAGIC):
        other = path.with_name(english + suffix)
        if other.exists() and other != path:
            n_other = sum(1 for _ in read_lines(other))
            if n_other != n_lines:
                problem = f"{n_lines:,} lines, but {n_other:,} in {other.name}"
                raise InputError(problem, file=path, fix="the files must pair line by line")
    return _some(n_lines, path)


READERS: dict[str, Callable[[Path], int]] = {
    "tagged": count_tagged,
    "names": count_names,
    "trees": count_trees,
    "pairs": count_pairs,
    "questions": count_questions,
    "reviews": count_reviews,
    "mining": count_mining,
    "tatoeba": count_tatoeba,
    "entries": count_entries,
    "similarities": count_similarities,
    "links": count_links,
    "lines": count_lines,
}
# Readers of tables whose test files are given out without the column of labels.
COLUMNS = {"tagged": 2, "names": 2, "pairs": 3}


def is_unlabelled(path: Path, reader: str, split: str) -> bool:
    """Tell a test file that was given out without its labels, or its answers."""
    if reader == "questions":
        from calque.evaluation.tasks.question_answering import is_answered

        return not is_answered(path)
    if split != "test" or reader not in COLUMNS:
        return False
    first = islice((line for line in read_lines(path) if line.strip()), 5)
    return all(line.rstrip("\t").count("\t") < COLUMNS[reader] - 1 for line in first)


def _some(n_items: int, path: Path) -> int:
    if not n_items:
        raise InputError("is empty", file=path, fix="fetch it again")
    return n_items


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
