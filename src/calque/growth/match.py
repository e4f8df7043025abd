"""What the words of many dictionaries mean in one language, for words that are asked for.

MetaXLM's vocabulary matching: which rows of one model's embedding start a row of another's.

A piece takes the row of the same text; else of the same text but for case and compatibility forms;
else the mean of its translations' rows, where it is a word that dictionaries know; else the row of
what the monolingual tokenizer would make of it (`é` is `e` to many). In scripts that the
monolingual model hardly knows, translations go first.

Paper: Chi et al. (2021) translate first in all scripts. But most short words of English are words
of other languages, too, and would start with another meaning.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from calque.errors import InputError
from calque.io.dictionaries import Entry, read_dictionary
from calque.io.files import PathLike
from calque.io.segmentation import UNSPACED, script_of
from calque.tokens.vocabularies import PieceIndex, Vocabulary, is_whole, normalize_text, place_mark

if TYPE_CHECKING:
    import numpy.typing as npt

    IntArray = npt.NDArray[np.int64]
    RuleArray = npt.NDArray[np.int8]

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


RULES = ("unmatched", "special", "exact", "normalized", "dictionary", "composed", "folded")
UNMATCHED, SPECIAL, EXACT, NORMALIZED, DICTIONARY, COMPOSED, FOLDED = range(len(RULES))
Preference: TypeAlias = Literal["surface", "dictionary"]


@dataclass(frozen=True, slots=True)
class RowSources:
    """A sparse matrix of means: part k adds `weights[k]` of row `sources[k]` to row `rows[k]`."""

    n_rows: int
    rows: IntArray
    sources: IntArray
    weights: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Glossary:
    """Dictionaries, the language they lead to, and what goes first: they or a piece's own text.

    In scripts that are not the model's own, they always do. Without `composes`, translations of
    several pieces are left out.
    """

    paths: Sequence[PathLike]
    language: str = "en"
    prefer: Preference = "surface"
    composes: bool = True


@dataclass(frozen=True, slots=True)
class VocabularyMatch:
    """The rule each new row was matched by, with and without the dictionaries, and its sources."""

    rules: RuleArray
    rules_without: RuleArray
    sources: RowSources
    meanings: dict[int, list[str]]
    dictionaries: list[DictionaryUse]
    n_unspelled: int


def match_vocabularies(
    new: Vocabulary, index: PieceIndex, glossary: Glossary | None = None
) -> VocabularyMatch:
    """Match every row of a new vocabulary with those of a monolingual one."""
    rules, found = _match_texts(new, index)
    rules_without = rules.copy()
    for row in np.flatnonzero(rules == UNMATCHED).tolist():
        numbers = map(index.find_folded, _spellings(new, row))
        if (number := next((n for n in numbers if n is not None), None)) is not None:
            rules_without[row], found[row] = FOLDED, number
    uses: list[DictionaryUse] = []
    meanings: dict[int, Meanings] = {}
    if glossary is not None:
        free = _find_free(new, rules, index.own_scripts, glossary.prefer)
        meanings, uses = _translate(new, index, free, glossary)
    spelled = index.spell(word for words in meanings.values() for word in words)
    n_unspelled = sum(not ids for ids in spelled.values())
    if glossary is not None and not glossary.composes:
        spelled = {word: ids if len(ids) == 1 else [] for word, ids in spelled.items()}
    meanings = _keep_spelled(meanings, spelled)
    rules = rules_without.copy()
    split = {word for word, ids in spelled.items() if len(ids) > 1}
    for row, words in meanings.items():
        rules[row] = DICTIONARY if split.isdisjoint(words) else COMPOSED
    return VocabularyMatch(
        rules,
        rules_without,
        _gather_sources(rules, found, meanings, spelled),
        {row: _order(words) for row, words in meanings.items()},
        uses,
        n_unspelled,
    )


def _match_texts(new: Vocabulary, index: PieceIndex) -> tuple[RuleArray, IntArray]:
    """Match special tokens by role or name, and other pieces by their text."""
    rules = np.zeros(len(new), dtype=np.int8)
    found = np.full(len(new), -1, dtype=np.int64)
    for row, number in _match_special(new, index.vocabulary).items():
        rules[row], found[row] = SPECIAL, number
    finders = ((EXACT, index.find_exact), (NORMALIZED, index.find_normalized))
    for row, text in enumerate(new.texts):
        if text is None:
            continue
        spellings = _spellings(new, row)
        tries = ((rule, find(each)) for rule, find in finders for each in spellings)
        for rule, place in tries:
            if place is not None:
                rules[row], found[row] = rule, place
                break
    return rules, found


def _match_special(new: Vocabulary, mono: Vocabulary) -> dict[int, int]:
    """Match special tokens: by what they do, others by name."""
    named = {
        token: number
        for number, token in enumerate(mono.tokens)
        if token and mono.texts[number] is None
    }
    matched = {
        row: named[token]
        for row, token in enumerate(new.tokens)
        if new.texts[row] is None and token in named
    }
    # The first roles go last, to win where one token has several.
    for role in reversed([role for role in new.roles if role in mono.roles]):
        matched[new.roles[role]] = mono.roles[role]
    return matched


def _spellings(vocabulary: Vocabulary, row: int) -> tuple[str, ...]:
    """Give the texts a piece may be found by: a lone one with a space in front and without."""
    text = vocabulary.texts[row] or ""
    if row not in vocabulary.lone:
        return (text,)
    usual, surface = place_mark(text), text.removeprefix(" ")
    return (usual, surface if usual != surface else " " + surface)


def _find_free(
    new: Vocabulary, rules: RuleArray, own_scripts: set[str], prefer: Preference
) -> list[int]:
    """List the rows that dictionaries may decide."""
    foreign = (
        prefer == "dictionary" or script_of(text or "") not in own_scripts for text in new.texts
    )
    is_foreign = np.fromiter(foreign, bool, len(new))
    return np.flatnonzero((rules == UNMATCHED) | (is_foreign & (rules != SPECIAL))).tolist()


def _translate(
    new: Vocabulary, index: PieceIndex, rows: Sequence[int], glossary: Glossary
) -> tuple[dict[int, Meanings], list[DictionaryUse]]:
    """Look up the pieces that are words."""
    words = {row: word for row in rows if (word := _word_of(new, row)) is not None}
    wanted = set(map(normalize_text, words.values()))
    translations, uses = read_translations(
        glossary.paths, glossary.language, wanted, index.is_known
    )
    found = {
        row: _drop_itself(translations.look_up(word), word, index) for row, word in words.items()
    }
    return {row: meanings for row, meanings in found.items() if meanings}, uses


def _drop_itself(meanings: Meanings, word: str, index: PieceIndex) -> Meanings:
    """Leave out that a word means itself, as MUSE says of many, if that is no piece.

    Where nothing else is said, it is a name, and its spelling all there is.
    """
    itself = {word, normalize_text(word)}
    if len(meanings) < 2 or itself.isdisjoint(meanings) or index.find_word(word) is not None:
        return meanings
    return {each: n for each, n in meanings.items() if each not in itself} or meanings


def _word_of(vocabulary: Vocabulary, row: int) -> str | None:
    """Give the word a piece may stand for.

    In the middle of words only scripts without spaces have some: German `er` is "he", but `##er`
    is an ending.
    """
    text = vocabulary.texts[row]
    if text is None or not (word := text.removeprefix(" ")) or not is_whole(word):
        return None
    is_word = text != word or row in vocabulary.lone or script_of(word) in UNSPACED
    return word if is_word else None


def _keep_spelled(
    meanings: Mapping[int, Meanings], spelled: Mapping[str, list[int]]
) -> dict[int, Meanings]:
    """Leave out translations without pieces, and pieces without translations."""
    unspelled = {word for word, ids in spelled.items() if not ids}
    kept = {
        row: words
        if unspelled.isdisjoint(words)
        else {word: n for word, n in words.items() if word not in unspelled}
        for row, words in meanings.items()
    }
    return {row: words for row, words in kept.items() if words}


def _gather_sources(
    rules: RuleArray,
    found: IntArray,
    meanings: Mapping[int, Meanings],
    spelled: Mapping[str, list[int]],
) -> RowSources:
    """List the parts of all rows, in their order."""
    single = np.setdiff1d(np.flatnonzero(rules != UNMATCHED), list(meanings))
    rows, sources, weights = [], [], []
    for row, words in meanings.items():
        n_all = sum(words.values())
        for word, n_files in words.items():
            ids = spelled[word]
            rows += [row] * len(ids)
            sources += ids
            weights += [n_files / n_all / len(ids)] * len(ids)
    all_rows = np.concatenate([single, np.array(rows, dtype=np.int64)])
    all_sources = np.concatenate([found[single], np.array(sources, dtype=np.int64)])
    all_weights = np.concatenate([np.ones(len(single)), weights]).astype(np.float32)
    order = np.argsort(all_rows, kind="stable")
    return RowSources(len(rules), all_rows[order], all_sources[order], all_weights[order])


def _order(meanings: Meanings) -> list[str]:
    """Put what most dictionaries say first."""
    return sorted(meanings, key=meanings.__getitem__, reverse=True)
