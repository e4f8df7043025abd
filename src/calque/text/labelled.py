"""Texts with a class: one text or a pair of them a line, tabs between."""

from __future__ import annotations

from dataclasses import dataclass

from calque.text.files import PathLike, read_lines, shown
from calque.types import InputError

# XNLI's machine-translated training files spell one class their own way.
RENAMED = {"contradictory": "contradiction"}


@dataclass(frozen=True, slots=True)
class LabelledText:
    """One example as a file has it: a text or two, and the name of its class.

    `original` is what was translated, where the file has it, too.
    """

    texts: tuple[str, ...]
    label: str
    original: tuple[str, ...] | None = None


def read_pairs(path: PathLike) -> list[LabelledText]:
    """Read `first ⇥ second ⇥ class`, XTREME's layout of XNLI and PAWS-X.

    Of five columns, as in its translations of training sets, the first two are the original;
    PAWS-X's own files, which have a header and number their lines, are understood too.
    """
    found = []
    for number, line in enumerate(read_lines(path), start=1):
        columns = line.split("\t")
        if number == 1 and columns[0] == "id":
            continue
        if len(columns) not in (3, 4, 5):
            raise _refuse("two texts and a class", line, path, number)
        first, second, label = (column.strip() for column in columns[-3:])
        if not (first and second and label):
            raise _refuse("two texts and a class", line, path, number)
        original = (columns[0].strip(), columns[1].strip()) if len(columns) == 5 else None
        found.append(LabelledText((first, second), RENAMED.get(label, label), original))
    return _check(found, path)


def read_texts(path: PathLike) -> list[LabelledText]:
    """Read `text ⇥ class`."""
    found = []
    for number, line in enumerate(read_lines(path), start=1):
        text, _, label = line.rpartition("\t")
        if not (text.strip() and label.strip()):
            raise _refuse("a text and a class", line, path, number)
        found.append(LabelledText((text.strip(),), label.strip()))
    return _check(found, path)


def _check(found: list[LabelledText], path: PathLike) -> list[LabelledText]:
    if not found:
        raise InputError("holds no example", file=shown(path), fix="give another file")
    return found


def _refuse(wanted: str, line: str, path: PathLike, number: int) -> InputError:
    return InputError(
        f"not {wanted}: {line[:40]!r}", file=shown(path), line=number, fix="separate them by tabs"
    )
