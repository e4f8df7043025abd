"""Dictionaries between a pivot and other languages: which file, which column, which rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from calque.align.mapping import Pairs
from calque.models.static import WordVectors
from calque.text.dictionaries import Entry, read_dictionary
from calque.text.files import SkippedLines
from calque.types import InputError

PIVOT, LANGUAGE = "{pivot}", "{language}"


@dataclass(frozen=True, slots=True)
class SeedDictionary:
    """Entries (word of the pivot, word of the language), in the order of the file."""

    entries: Sequence[Entry]
    path: str

    def find_pairs(self, pivot: WordVectors, other: WordVectors) -> Pairs:
        """Find the rows of entries whose words both have vectors: `src` the language's.

        A dictionary that has none is a mistake: of its languages, its case, or its columns.
        """
        pairs = _look_up(self.entries, pivot, other)
        turned = _look_up([entry[::-1] for entry in self.entries], pivot, other)
        if len(turned) > len(pairs):
            raise InputError(
                f"the columns look swapped: {len(turned):,} entries are there if they are turned, "
                f"{len(pairs):,} as they stand",
                file=self.path,
                fix="name it after its columns, as en-de.txt, or swap them",
            )
        if len(pairs) == 0:
            raise InputError(
                f"none of its {len(self.entries):,} entries has two words with vectors",
                file=self.path,
                fix="check its languages and its case, or leave it out",
            )
        return pairs


def name_dictionary(pattern: str, pivot: str, language: str) -> Path:
    """Fill a pattern like `{pivot}-{language}.txt` in."""
    return Path(pattern.replace(PIVOT, pivot).replace(LANGUAGE, language))


def load_dictionary(
    pattern: str, pivot: str, language: str, skipped: SkippedLines | None = None
) -> SeedDictionary | None:
    """Read the dictionary of a language that a pattern like `{pivot}-{language}.txt` names, if any.

    A name that begins with de-en tells that its first column is German. Without such a name the
    first column is the pivot's.
    """
    path = name_dictionary(pattern, pivot, language)
    if LANGUAGE in pattern and not path.exists():
        return None
    entries = list(read_dictionary(path, None if skipped is None else skipped.of(path)))
    if path.name.split(".")[0] == f"{language}-{pivot}":
        entries = [(word, other) for other, word in entries]
    return SeedDictionary(entries, str(path))


def _look_up(entries: Sequence[Entry], pivot: WordVectors, other: WordVectors) -> Pairs:
    rows, known = pivot.look_up(word for word, _ in entries)
    other_rows, other_known = other.look_up(word for _, word in entries)
    both = known & other_known
    return Pairs(torch.from_numpy(other_rows[both]), torch.from_numpy(rows[both]))
