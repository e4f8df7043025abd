"""MetaXLM's vocabulary matching: which rows of one model's embedding start a row of another's.

A piece takes the row of the same text; else of the same text but for case and compatibility forms;
else the mean of its translations' rows, where it is a word that dictionaries know; else the row of
what the monolingual tokenizer would make of it (`é` is `e` to many). In scripts that the
monolingual model hardly knows, translations go first.

Paper: Chi et al. (2021) translate first in all scripts. But most short words of English are words
of other languages, too, and would start with another meaning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from calque.text.piece_index import PieceIndex
from calque.text.pieces import Vocabulary, is_whole, normalize_text, place_mark
from calque.text.scripts import UNSPACED, script_of
from calque.text.translations import DictionaryUse, Meanings, read_translations

if TYPE_CHECKING:
    import numpy.typing as npt

    from calque.text.files import PathLike

    IntArray = npt.NDArray[np.int64]
    RuleArray = npt.NDArray[np.int8]

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
