"""Sentences with names, `id ⇥ sentence`, and lists of named pairs: the files of BUCC."""

from __future__ import annotations

import re
from collections.abc import Iterator

from calque.text.files import PathLike, read_lines, scan_lines, shown
from calque.types import InputError

BUCC_LINE = re.compile(r"[a-z]{2,3}-[0-9]{9}\t")


def has_ids(path: PathLike) -> bool:
    """Tell whether a file names its sentences as BUCC does, `en-000000001 ⇥ sentence`."""
    first = next(scan_lines(path), "")
    return isinstance(first, str) and BUCC_LINE.match(first) is not None


def split_id(line: str, path: PathLike, number: int) -> tuple[str, str]:
    """Part a line into name and sentence."""
    name, tab, sentence = line.partition("\t")
    if not tab or not name.strip():
        fix = "write id TAB sentence on every line"
        raise InputError("no id before a tab", file=shown(path), line=number, fix=fix)
    return name.strip(), sentence.strip()


def read_identified(path: PathLike) -> Iterator[tuple[str, str]]:
    """Read names and sentences."""
    for number, line in enumerate(read_lines(path), start=1):
        yield split_id(line, path, number)


def read_id_pairs(path: PathLike) -> Iterator[tuple[str, str]]:
    """Read pairs, `source ⇥ target`, of names or of whatever else holds no tab."""
    for number, line in enumerate(read_lines(path), start=1):
        columns = [column.strip() for column in line.split("\t")]
        if len(columns) != 2 or not all(columns):
            fix = "write source TAB target on every line"
            raise InputError(f"not a pair: {line[:40]!r}", file=shown(path), line=number, fix=fix)
        yield columns[0], columns[1]
