"""Bilingual dictionaries in the format of MUSE: lines of `source target`.

With a tab between source and target, both may have several words; without one, the line must have
exactly two words. A number in a third column is a score, as `calque lexicon` writes it, and is
ignored. The order of entries and repeated entries are kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TypeAlias

from calque.io.files import BadLine, PathLike, SkipBad, report_bad_line, scan_lines

Entry: TypeAlias = tuple[str, str]
SCORE = re.compile(r"[-+]?[0-9]*\.?[0-9]+([eE][-+]?[0-9]+)?")


def read_dictionary(path: PathLike, skip_bad: SkipBad | None = None) -> Iterator[Entry]:
    """Yield (source, target) entries; a bad line is an InputError or is passed to `skip_bad`."""
    for number, line in enumerate(scan_lines(path), start=1):
        entry = parse_entry(line) if isinstance(line, str) else line
        if isinstance(entry, BadLine):
            report_bad_line(entry, path, number, skip_bad)
        else:
            yield entry


def parse_entry(line: str) -> Entry | BadLine:
    r"""Return the entry of a line, or what is wrong with it.

    >>> parse_entry("ice cream\tEis\t0.8431")
    ('ice cream', 'Eis')
    """
    words = [word.strip() for word in line.split("\t")] if "\t" in line else line.split()
    if len(words) == 3 and "\t" in line and SCORE.fullmatch(words[2]):
        del words[2]
    if len(words) != 2 or not all(words):
        reason = "one side is empty"
        if all(words):
            kind = "columns" if "\t" in line else "words"
            reason = f"the line has {len(words)} {kind} instead of 2"
        return BadLine(reason, "write source TAB target", line)
    return words[0], words[1]
