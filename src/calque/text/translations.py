"""What the words of many dictionaries mean in one language, for words that are asked for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from calque.text.dictionaries import Entry, read_dictionary
from calque.text.files import PathLike
from calque.text.pieces import normalize_text
from calque.types import InputError

Meanings: TypeAlias = dict[str, int]  # translations, and how many dictionaries give each

COLUMN_NAMES = re.compile(r"([a-z]{2,3})-([a-z]{2,3})")
N_LOOKED_AT, FEWEST = 1000, 10


@dataclass(frozen=True, slots=True)
class DictionaryUse:
    """A dictionary that was read: its entries, and those whose word was asked for."""

    path: str
    n_entries: int
    n_used: int


class Translations:
    """What words mean.

    A word is looked up as it is written, and if it is not there, whatever its case.
    """

    def __init__(self) -> None:
        self._meanings: dict[str, Meanings] = {}
        self._spellings: dict[str, list[Meanings]] = {}  # by normalised form

    def add(self, word: str, translation: str) -> None:
        """Note what a word means."""
        meanings = self._meanings.get(word)
        if meanings is None:
            meanings = self._meanings[word] = {}
            self._spellings.setdefault(normalize_text(word), []).append(meanings)
        meanings[translation] = meanings.get(translation, 0) + 1

    def look_up(self, word: str) -> Meanings:
        """Give what a word may mean; nothing if no dictionary knows it."""
        if (meanings := self._meanings.get(word)) is not None:
            return meanings
        merged: Counter[str] = Counter()
        for meanings in self._spellings.get(normalize_text(word), ()):
            merged.update(meanings)
        return dict(merged)


def read_translations(
    paths: Sequence[PathLike],
    language: str,
    wanted: Collection[str],
    is_known: Callable[[str], bool],
) -> tuple[Translations, list[DictionaryUse]]:
    """Read what dictionaries say in a language about words whose normalised form is wanted.

    A name like de-en.txt tells the columns. Without such a name the first is the language's own.
    Columns that look swapped, as of one more words are known than of the other, are an error.
    """
    translations, uses = Translations(), []
    for path in paths:
        entries = list(read_dictionary(path))
        if not _comes_first(path, language):
            entries = [(word, other) for other, word in entries]
        _check_columns(path, entries, language, is_known)
        found = dict.fromkeys(
            entry for entry in entries if entry[1] in wanted or normalize_text(entry[1]) in wanted
        )
        for translation, word in found:
            translations.add(word, translation)
        uses.append(DictionaryUse(str(path), len(entries), len(found)))
    return translations, uses


def _comes_first(path: PathLike, language: str) -> bool:
    names = COLUMN_NAMES.fullmatch(Path(path).name.split(".")[0].lower())
    if names is None:
        return True
    if language not in names.groups():
        problem = f"by its name it has no column of {language!r}, the model's language"
        raise InputError(problem, file=path, fix="name the model's language, or leave it out")
    return names[1] == language


def _check_columns(
    path: PathLike, entries: list[Entry], language: str, is_known: Callable[[str], bool]
) -> None:
    """Count known words in both columns, at the beginning where words are frequent."""
    sides = list(zip(*entries[:N_LOOKED_AT], strict=True)) or [(), ()]
    n_own, n_other = (sum(map(is_known, set(side))) for side in sides)
    if n_other > max(2 * n_own, FEWEST):
        raise InputError(
            f"the columns look swapped: the model knows {n_own} words of the {language} column, "
            f"{n_other} of the other",
            file=path,
            fix="name it after its columns, as en-de.txt, or swap them",
        )
