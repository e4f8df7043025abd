"""How many items a file of a dataset has, read by what the tasks themselves read it with."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path

from calque.text.files import MAGIC, read_lines
from calque.types import InputError


def count_tagged(path: Path) -> int:
    """Count sentences whose words have tags."""
    from calque.text.tagged import read_tagged

    return len(read_tagged(path))


def count_names(path: Path) -> int:
    """Count sentences whose words have tags of spans."""
    from calque.text.tagged import read_names

    return len(read_names(path))


def count_trees(path: Path) -> int:
    """Count sentences that are trees."""
    from calque.text.treebanks import read_trees

    return len(read_trees(path))


def count_pairs(path: Path) -> int:
    """Count pairs of texts with a class."""
    from calque.text.labelled import read_pairs

    return len(read_pairs(path))


def count_questions(path: Path) -> int:
    """Count questions."""
    from calque.text.questions import read_questions

    return len(read_questions(path))


def count_reviews(path: Path) -> int:
    """Count reviews that are good or bad."""
    from calque.text.reviews import read_reviews

    return len(read_reviews(path))


def count_mining(path: Path) -> int:
    """Count the true pairs of two texts."""
    from calque.tasks.mining_data import read_test

    return len(read_test(path).gold)


def count_tatoeba(path: Path) -> int:
    """Count sentences with an English translation."""
    from calque.tasks.retrieval import read_test

    return len(read_test(path.parent, path.suffix[1:])[0])


def count_entries(path: Path) -> int:
    """Count entries of a dictionary."""
    from calque.text.dictionaries import read_dictionary

    return _some(sum(1 for _ in read_dictionary(path)), path)


def count_similarities(path: Path) -> int:
    """Count pairs of words with their similarity."""
    from calque.tasks.word_similarity import read_pairs

    return len(read_pairs(path).src)


def count_links(path: Path) -> int:
    """Count sentence pairs with gold links."""
    from calque.tasks.word_alignment import read_test

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
        from calque.tasks.question_files import is_answered

        return not is_answered(path)
    if split != "test" or reader not in COLUMNS:
        return False
    first = islice((line for line in read_lines(path) if line.strip()), 5)
    return all(line.rstrip("\t").count("\t") < COLUMNS[reader] - 1 for line in first)


def _some(n_items: int, path: Path) -> int:
    if not n_items:
        raise InputError("is empty", file=path, fix="fetch it again")
    return n_items
