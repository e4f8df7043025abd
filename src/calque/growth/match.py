"""Vocabulary matching of MetaXLM: which rows of one model's embedding initialize another's.

A new piece takes the mean of the rows of its translations if it is a word of a dictionary, or else
the row of the same text, or else of the same text up to case and NFKC, or else the row of what the
monolingual tokenizer's normalizer makes of it (many turn `é` into `e`). What is left may take the
mean of the pieces that the old tokenizer splits it into, which helps if the old model knows the
language.

Equal text can also come before translations (`prefer`), except in scripts that the monolingual
model hardly knows, and several translations can be weighted by the number of dictionaries that have
them (`average`). Models were worse after training then (docs/studies/mono.md), although most short
English words are also words of other languages and so start with another meaning by default.
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
from calque.io.segmentation import UNSPACED_SCRIPTS, find_script
from calque.tokens.vocabularies import (
    PieceIndex,
    Vocabulary,
    guess_spacing,
    has_whole_characters,
    normalize_piece,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    IntArray = npt.NDArray[np.int64]
    RuleArray = npt.NDArray[np.int8]

RULES = ("unmatched", "special", "exact", "normalized", "dictionary", "composed", "folded", "split")
UNMATCHED, SPECIAL, EXACT, NORMALIZED, DICTIONARY, COMPOSED, FOLDED, SPLIT = range(len(RULES))
Preference: TypeAlias = Literal["surface", "dictionary"]
Averaging: TypeAlias = Literal["weighted", "plain"]
Meanings: TypeAlias = dict[str, int]  # translations and their weights

LANGUAGE_PAIR = re.compile(r"([a-z]{2,3})-([a-z]{2,3})")
# Columns are checked on this many first entries, and only if so many words are known.
N_CHECKED, MIN_KNOWN = 1000, 10


@dataclass(frozen=True, slots=True)
class RowSources:
    """A sparse matrix of weighted means of rows.

    Element k adds `weights[k]` times the old row `sources[k]` to the new row `rows[k]`.
    """

    n_rows: int
    rows: IntArray
    sources: IntArray
    weights: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class DictionaryUse:
    """A dictionary that was read: the numbers of its entries and of those that were used."""

    path: str
    n_entries: int
    n_used: int


@dataclass(frozen=True, slots=True)
class VocabularyMatch:
    """The rule that matched each new row, with and without dictionaries, and the rows' sources.

    `n_unspelled` translations are unknown to the monolingual tokenizer.
    """

    rules: RuleArray
    rules_without: RuleArray
    sources: RowSources
    meanings: dict[int, list[str]]
    dictionaries: list[DictionaryUse]
    n_unspelled: int


def match_rows(
    new: Vocabulary,
    index: PieceIndex,
    dictionaries: Sequence[PathLike] = (),
    *,
    language: str = "en",
    prefer: Preference = "dictionary",
    average: Averaging = "plain",
    compose: bool = True,
    split: bool = False,
) -> VocabularyMatch:
    """Match every row of a new vocabulary with the rows of a monolingual one.

    Args:
        new: The new vocabulary.
        index: The pieces of the monolingual model.
        dictionaries: Dictionaries from or to the language of the monolingual model.
        language: That language.
        prefer: Whether a translation ("dictionary") or equal text ("surface") comes first. In
            scripts that are not the model's own, a translation always comes first.
        average: Mean of several translations: "plain", or "weighted" by the number of dictionaries
            that have them and without the word itself.
        compose: Use translations that the monolingual model splits into several pieces.
        split: Match the remaining rows with the pieces that the monolingual model splits them into.
    """
    rules, found = _match_texts(new, index)
    rules_without = rules.copy()
    for row in np.flatnonzero(rules == UNMATCHED).tolist():
        numbers = map(index.find_by_normalizer, _spellings(new, row))
        if (number := next((n for n in numbers if n is not None), None)) is not None:
            rules_without[row], found[row] = FOLDED, number
    uses: list[DictionaryUse] = []
    meanings: dict[int, Meanings] = {}
    if dictionaries:
        is_foreign = np.array(
            [
                prefer == "dictionary" or find_script(t or "") not in index.own_scripts
                for t in new.texts
            ]
        )
        open_rows = np.flatnonzero((rules == UNMATCHED) | (is_foreign & (rules != SPECIAL)))
        rows = open_rows.tolist()
        meanings, uses = _translate(new, index, rows, dictionaries, language, average)
    ids_of = index.tokenize_words(word for words in meanings.values() for word in words)
    n_unspelled = sum(not ids for ids in ids_of.values())
    if not compose:
        ids_of = {word: ids if len(ids) == 1 else [] for word, ids in ids_of.items()}
    meanings = _drop_unknown(meanings, ids_of)
    rules = rules_without.copy()
    several = {word for word, ids in ids_of.items() if len(ids) > 1}
    for row, words in meanings.items():
        rules[row] = DICTIONARY if several.isdisjoint(words) else COMPOSED
    own: dict[int, Meanings] = {}
    if split:
        own, ids_of_own = _split_rows(new, index, np.flatnonzero(rules == UNMATCHED).tolist())
        ids_of = ids_of | ids_of_own
        rules[list(own)] = SPLIT
        rules_without[rules_without == UNMATCHED] = rules[rules_without == UNMATCHED]
    return VocabularyMatch(
        rules,
        rules_without,
        _gather_sources(rules, found, meanings | own, ids_of),
        # The translation with the largest weight comes first.
        {
            row: sorted(words, key=words.__getitem__, reverse=True)
            for row, words in meanings.items()
        },
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
        for rule, match in ((rule, find(each)) for rule, find in finders for each in spellings):
            if match is not None:
                rules[row], found[row] = rule, match
                break
    return rules, found


def _match_special(new: Vocabulary, mono: Vocabulary) -> dict[int, int]:
    """Match special tokens by their roles, others by name."""
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
    # Where one token has several roles, the first role is assigned last and wins.
    for role in reversed([role for role in new.roles if role in mono.roles]):
        matched[new.roles[role]] = mono.roles[role]
    return matched


def _spellings(vocabulary: Vocabulary, row: int) -> tuple[str, ...]:
    """Return the texts by which a piece may be found; standalone pieces with and without space."""
    text = vocabulary.texts[row] or ""
    if row not in vocabulary.standalone:
        return (text,)
    usual, surface = guess_spacing(text), text.removeprefix(" ")
    return (usual, surface if usual != surface else " " + surface)


def _translate(
    new: Vocabulary,
    index: PieceIndex,
    rows: Sequence[int],
    dictionaries: Sequence[PathLike],
    language: str,
    average: Averaging,
) -> tuple[dict[int, Meanings], list[DictionaryUse]]:
    """Look up the pieces that are words; a translation comes with its weight."""
    words = {row: word for row in rows if (word := _word_of(new, row)) is not None}
    wanted = set(map(normalize_piece, words.values()))
    translations, uses = read_translations(dictionaries, language, wanted, index.is_known)
    found = {row: translations.look_up(word) for row, word in words.items()}
    if average == "plain":
        found = {row: dict.fromkeys(meanings, 1) for row, meanings in found.items()}
    else:
        found = {row: _drop_identical(found[row], word, index) for row, word in words.items()}
    return {row: meanings for row, meanings in found.items() if meanings}, uses


def _split_rows(
    new: Vocabulary, index: PieceIndex, rows: Sequence[int]
) -> tuple[dict[int, Meanings], dict[str, list[int]]]:
    """Return the texts of rows that the old tokenizer can split, and the ids of their pieces."""
    texts = {row: (new.texts[row] or "").removeprefix(" ") for row in rows}
    texts = {row: text for row, text in texts.items() if text and has_whole_characters(text)}
    ids_of = index.tokenize_words(texts.values())
    return {row: {text: 1} for row, text in texts.items() if ids_of[text]}, ids_of


def _word_of(vocabulary: Vocabulary, row: int) -> str | None:
    """Return the word that a piece may represent.

    Inside words there are such pieces only in scripts without spaces: German `er` means "he", but
    `##er` is an ending.
    """
    text = vocabulary.texts[row]
    if text is None or not (word := text.removeprefix(" ")) or not has_whole_characters(word):
        return None
    is_word = text != word or row in vocabulary.standalone or find_script(word) in UNSPACED_SCRIPTS
    return word if is_word else None


def _drop_identical(meanings: Meanings, word: str, index: PieceIndex) -> Meanings:
    """Drop a word as its own translation, of which MUSE has many, unless it is a piece.

    A word that has no other translation is a name; then its own spelling is kept.
    """
    itself = {word, normalize_piece(word)}
    if len(meanings) < 2 or itself.isdisjoint(meanings) or index.find_word(word) is not None:
        return meanings
    return {each: n for each, n in meanings.items() if each not in itself} or meanings


def _drop_unknown(
    meanings: Mapping[int, Meanings], ids_of: Mapping[str, list[int]]
) -> dict[int, Meanings]:
    """Drop translations without pieces, and rows without translations."""
    kept = {
        row: {word: n for word, n in words.items() if ids_of[word]}
        for row, words in meanings.items()
    }
    return {row: words for row, words in kept.items() if words}


def _gather_sources(
    rules: RuleArray,
    found: IntArray,
    meanings: Mapping[int, Meanings],
    ids_of: Mapping[str, list[int]],
) -> RowSources:
    """Return the sources of all rows, ordered by row."""
    single = np.setdiff1d(np.flatnonzero(rules != UNMATCHED), list(meanings))
    rows, sources, weights = [], [], []
    for row, words in meanings.items():
        total = sum(words.values())
        for word, share in words.items():
            ids = ids_of[word]
            rows += [row] * len(ids)
            sources += ids
            weights += [share / total / len(ids)] * len(ids)
    all_rows = np.concatenate([single, np.array(rows, dtype=np.int64)])
    all_sources = np.concatenate([found[single], np.array(sources, dtype=np.int64)])
    all_weights = np.concatenate([np.ones(len(single)), weights]).astype(np.float32)
    order = np.argsort(all_rows, kind="stable")
    return RowSources(len(rules), all_rows[order], all_sources[order], all_weights[order])


class Translations:
    """The translations of words; a word that is not found is looked up without regard to case."""

    def __init__(self) -> None:
        self._meanings: dict[str, Meanings] = {}
        self._by_normalized: dict[str, list[Meanings]] = {}

    def add(self, word: str, translation: str) -> None:
        """Add a translation of a word."""
        meanings = self._meanings.get(word)
        if meanings is None:
            meanings = self._meanings[word] = {}
            self._by_normalized.setdefault(normalize_piece(word), []).append(meanings)
        meanings[translation] = meanings.get(translation, 0) + 1

    def look_up(self, word: str) -> Meanings:
        """Return the translations of a word; an empty dictionary if there are none."""
        if (meanings := self._meanings.get(word)) is not None:
            return meanings
        merged: Counter[str] = Counter()
        for meanings in self._by_normalized.get(normalize_piece(word), ()):
            merged.update(meanings)
        return dict(merged)


def read_translations(
    paths: Sequence[PathLike],
    language: str,
    wanted: Collection[str],
    is_known: Callable[[str], bool],
) -> tuple[Translations, list[DictionaryUse]]:
    """Read translations into a language of the words whose normalized form is wanted.

    A file name like de-en.txt names the columns; by default the first column is in the language.
    Columns that appear to be swapped, because the model knows more words of the other one, raise
    an error.
    """
    translations, uses = Translations(), []
    for path in paths:
        entries = list(read_dictionary(path))
        if not _is_first_column(path, language):
            entries = [(word, other) for other, word in entries]
        _check_columns(path, entries, language, is_known)
        found = dict.fromkeys(
            entry for entry in entries if entry[1] in wanted or normalize_piece(entry[1]) in wanted
        )
        for translation, word in found:
            translations.add(word, translation)
        uses.append(DictionaryUse(str(path), len(entries), len(found)))
    return translations, uses


def _is_first_column(path: PathLike, language: str) -> bool:
    names = LANGUAGE_PAIR.fullmatch(Path(path).name.split(".")[0].lower())
    if names is None:
        return True
    if language not in names.groups():
        raise InputError(
            f"the file name has no column of {language!r}, the language of the model",
            file=path,
            fix="set the language of the model, or remove the dictionary",
        )
    return names[1] == language


def _check_columns(
    path: PathLike, entries: list[Entry], language: str, is_known: Callable[[str], bool]
) -> None:
    """Raise an error if the model knows far more words of the other column, among the first."""
    columns = list(zip(*entries[:N_CHECKED], strict=True)) or [(), ()]
    n_own, n_other = (sum(map(is_known, set(column))) for column in columns)
    if n_other > max(2 * n_own, MIN_KNOWN):
        raise InputError(
            f"the columns seem to be swapped: the model knows {n_own} words of the {language} "
            f"column and {n_other} words of the other column",
            file=path,
            fix="name the file after its columns, for example en-de.txt, or swap them",
        )
