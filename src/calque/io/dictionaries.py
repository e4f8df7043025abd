"""Bilingual dictionaries in MUSE's format: `source target` lines, in order, repetitions kept.

A tab separates entries of several words; without one, the line must hold two words. A number in a
third column is a score, as `calque lexicon` writes it, and is passed over.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from calque.errors import InputError
from calque.io.files import (
    BadLine,
    PathLike,
    SkipBad,
    report_bad_line,
    scan_lines,
    write_atomically,
)

Entry: TypeAlias = tuple[str, str]
SCORE = re.compile(r"[-+]?[0-9]*\.?[0-9]+([eE][-+]?[0-9]+)?")


def read_dictionary(path: PathLike, skip_bad: SkipBad | None = None) -> Iterator[Entry]:
    """Read (source, target) entries; a bad line is an InputError, or goes to `skip_bad`."""
    for number, line in enumerate(scan_lines(path), start=1):
        entry = _parse_entry(line) if isinstance(line, str) else line
        if isinstance(entry, BadLine):
            report_bad_line(entry, path, number, skip_bad)
        else:
            yield entry


def write_dictionary(path: PathLike, entries: Iterable[Entry]) -> int:
    """Write entries with a tab between source and target, and count them."""
    number = 0
    with write_atomically(path) as stream:
        for number, (src, tgt) in enumerate(entries, start=1):
            line = f"{src}\t{tgt}"
            if any(end in line for end in "\n\r\0") or _parse_entry(line) != (src, tgt):
                raise InputError(
                    f"entry {number} cannot be written: {src!r}, {tgt!r}",
                    fix="give two words without tabs, line ends and spaces around them",
                )
            stream.write(line + "\n")
    return number


def group_translations(entries: Iterable[Entry]) -> dict[str, list[str]]:
    """Gather each source word's translations, in order and each once.

    >>> group_translations([("cat", "Katze"), ("cat", "Kater"), ("cat", "Katze")])
    {'cat': ['Katze', 'Kater']}
    """
    groups: dict[str, dict[str, None]] = {}
    for src, tgt in entries:
        groups.setdefault(src, {})[tgt] = None
    return {src: list(translations) for src, translations in groups.items()}


def _parse_entry(line: str) -> Entry | BadLine:
    words = [word.strip() for word in line.split("\t")] if "\t" in line else line.split()
    if len(words) == 3 and "\t" in line and SCORE.fullmatch(words[2]):
        del words[2]
    if len(words) != 2 or not all(words):
        reason = f"{len(words)} words where 2 are due" if all(words) else "an empty side"
        return BadLine(reason, "write source TAB target", line)
    return words[0], words[1]
