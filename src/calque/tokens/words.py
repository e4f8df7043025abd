"""Fast encoding of many sentences: every distinct word is encoded once and then looked up.

`build_sentence_encoder` encodes plain text. Many tokenizers split text at spaces and never look
across them; for these, the ids of a sentence are the ids of its words, and looking words up is
several times faster than the tokenizer. `ContextFreeWords` decides for which words that holds; a
sentence with another word is encoded as a whole. The ids always equal the tokenizer's own.

`WordEncoder` encodes sentences that are given as lists of words.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import TYPE_CHECKING, Any

import numpy as np

from calque.tokens.ragged import Ragged, ranges
from calque.tokens.tokenizer import disable_truncation_and_padding, keeps_leading_space

if TYPE_CHECKING:
    import numpy.typing as npt
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    IdArray = npt.NDArray[np.uint32]
    IntArray = npt.NDArray[np.int64]

MAX_CACHED_WORDS = 1 << 17  # about 20 MB
# Longer words, among them sentences in scripts without spaces, are not cached: they rarely repeat.
MAX_CACHED_CHARACTERS = 20
# The length of words in a PieceTable that cannot be encoded without their context.
NEEDS_CONTEXT = -1

# Separates words that are normalized in one call. No text uses this character, and no normalizer
# changes it or joins it to another.
SEPARATOR = "\N{RIGHT ANGLE WITH DOWNWARDS ZIGZAG ARROW}"
# Normalizers that look at single characters or at what Unicode composes of them; a space is never
# part of a composition.
# A regular expression that matches one of some characters, none of them a space.
CHARACTER_SET = re.compile(r"\[[^\s\[\]\\^&-]+\]")
LOCAL_NORMALIZERS = {
    "BertNormalizer",
    "Lowercase",
    "NFC",
    "NFD",
    "NFKC",
    "NFKD",
    "Nmt",
    "Precompiled",  # works on grapheme clusters: see _may_join_space
    "Strip",
    "StripAccents",
}
# Categories and letters that extend the grapheme cluster before them, even a space. Unassigned
# characters count, since the tokenizer's version of Unicode may be newer than Python's.
EXTENDING = {"Mn", "Mc", "Me", "Cc", "Cf", "Cn", "Co", "Cs", "Lm", "Sk"}
EXTENDING_LETTERS = "\N{THAI CHARACTER SARA AM}\N{LAO VOWEL SIGN AM}"
# Characters that begin a grapheme cluster which a following space continues: those of the Basic
# Multilingual Plane, and everything beyond it to be safe.
PREPENDED = re.compile(
    "[\u0600-\u0605\u06dd\u070f\u0890\u0891\u08e2\u0d4e\U00010000-\U0010ffff]\\Z"
)
# Normalized words that are empty, or have white space that depends on the neighboring words.
EMPTY_OR_SPACED = r"\A\Z|\A | \Z|  |[^\S ]"


@dataclass(frozen=True, slots=True)
class EncodedWords:
    """The subwords of many sentences in one array, with their number per word."""

    ids: IntArray
    n_pieces: IntArray  # of every word
    n_words: IntArray  # of every sentence

    @property
    def first_words(self) -> IntArray:
        """Return the index of every sentence's first word, and the number of all words."""
        return np.concatenate([[0], np.cumsum(self.n_words)])

    @property
    def first_pieces(self) -> IntArray:
        """Return the index of every word's first subword, and the number of all subwords."""
        return np.concatenate([[0], np.cumsum(self.n_pieces)])

    @property
    def lengths(self) -> IntArray:
        """Return the number of subwords of every sentence."""
        return np.diff(self.first_pieces[self.first_words])

    def truncate_words(self, max_pieces: int) -> tuple[EncodedWords, int]:
        """Keep the first `max_pieces` subwords of every word; also count the truncated words."""
        n_kept = np.minimum(self.n_pieces, max_pieces)
        n_cut = int((n_kept < self.n_pieces).sum())
        if not n_cut:
            return self, 0
        ids = self.ids[ranges(self.first_pieces[:-1], n_kept)]
        return EncodedWords(ids, n_kept, self.n_words), n_cut


class WordEncoder:
    """Encodes sentences given as words; every distinct word is encoded once and then cached."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, max_words: int = MAX_CACHED_WORDS
    ) -> None:
        self._tokenizer, self._max_words = tokenizer, max_words
        self._keeps_space = keeps_leading_space(tokenizer)
        self._index: WordIndex
        self._table: PieceTable
        self._clear()

    def encode(self, sentences: Sequence[Sequence[str]]) -> EncodedWords:
        """Encode sentences without special tokens."""
        if len(self._index) > self._max_words:
            self._clear()
        n_words = np.fromiter(map(len, sentences), np.int64, len(sentences))
        words = list(chain.from_iterable(sentences))
        if self._keeps_space:
            words = _add_spaces(words, n_words)
        index = np.fromiter(map(self._index.__getitem__, words), np.int64, len(words))
        cached, uncached = self._index.pop_new()
        self._table = self._table.extend(self._encode(cached))
        table = self._table.extend(self._encode(uncached[::-1]))  # index −1 is the first of them
        n_pieces = table.lengths[index]
        ids = table.ids[ranges(table.starts[index], n_pieces)].astype(np.int64)
        return EncodedWords(ids, n_pieces, n_words)

    def _clear(self) -> None:
        """Empty the cache except for the empty word, which has no subwords."""
        self._index, self._table = WordIndex([""]), PieceTable.empty().extend([[]])

    def _encode(self, words: Sequence[str]) -> list[list[int]]:
        backend = disable_truncation_and_padding(self._tokenizer.backend_tokenizer)
        encodings = backend.encode_batch_fast(
            [[word] for word in words], is_pretokenized=True, add_special_tokens=False
        )
        return [encoding.ids for encoding in encodings]


def _add_spaces(words: list[str], n_words: IntArray) -> list[str]:
    """Add the space that byte-level tokenizers expect before every word but a sentence's first.

    >>> _add_spaces(["a", "b", "", "c"], np.array([2, 0, 2]))
    ['a', ' b', '', ' c']
    """
    spaced = [" " + word if word else word for word in words]
    for first in np.unique((np.cumsum(n_words) - n_words)[n_words > 0]).tolist():
        spaced[first] = words[first]
    return spaced


def build_sentence_encoder(tokenizer: Tokenizer) -> Callable[[Sequence[str]], Ragged]:
    """Return the fastest function that encodes sentences without special tokens."""
    words = ContextFreeWords.of(tokenizer)
    if words is None:
        return lambda sentences: encode_whole(tokenizer, sentences)
    return WordCache(tokenizer, words).encode


def encode_whole(tokenizer: Tokenizer, sentences: Sequence[str]) -> Ragged:
    """Encode sentences without special tokens and without a cache."""
    encodings = tokenizer.encode_batch_fast(list(sentences), add_special_tokens=False)
    ids = [encoding.ids for encoding in encodings]
    lengths = np.fromiter(map(len, ids), np.int64, len(ids))
    flat = np.fromiter(chain.from_iterable(ids), np.uint32, lengths.sum())
    return Ragged(flat, lengths)  # type: ignore[arg-type]


class WordCache:
    """Encodes sentences by looking up the ids of their words."""

    def __init__(
        self, tokenizer: Tokenizer, words: ContextFreeWords, max_words: int = MAX_CACHED_WORDS
    ) -> None:
        self._tokenizer, self._words, self._max_words = tokenizer, words, max_words
        self._index, self._table = WordIndex([""]), PieceTable.empty().extend([None])
        self._uses = np.zeros(1, dtype=np.int64)

    def encode(self, sentences: Sequence[str]) -> Ragged:
        """Encode sentences without special tokens."""
        if not sentences:
            return encode_whole(self._tokenizer, [])
        if len(self._index) > self._max_words:
            self._evict()
        words = " ".join(sentences).split(" ")
        index = np.fromiter(map(self._index.__getitem__, words), np.int64, len(words))
        table = self._add_new_words(index)
        n_words = np.fromiter((text.count(" ") + 1 for text in sentences), np.int64)
        firsts = np.cumsum(n_words) - n_words
        starts, lengths = table.starts[index], table.lengths[index]
        is_hard = np.minimum.reduceat(lengths, firsts) == NEEDS_CONTEXT
        hard = np.flatnonzero(is_hard)
        whole = encode_whole(self._tokenizer, [sentences[k] for k in hard.tolist()])
        # The ids of a sentence that was encoded whole take the place of its first word's.
        lengths[np.repeat(is_hard, n_words)] = 0
        lengths[firsts[hard]] = whole.lengths
        starts[firsts[hard]] = len(table.ids) + np.cumsum(whole.lengths) - whole.lengths
        ids = np.concatenate([table.ids, whole.ids])[ranges(starts, lengths)]
        return Ragged(ids, np.add.reduceat(lengths, firsts))

    def _add_new_words(self, index: IntArray) -> PieceTable:
        """Cache the new words and count uses; return a table that has the uncached words, too."""
        cached, uncached = self._index.pop_new()
        self._uses = np.concatenate([self._uses, np.zeros(len(cached), dtype=np.int64)])
        self._uses += np.bincount(index[index >= 0], minlength=len(self._uses))
        self._table = self._table.extend(self._encode_words(cached))
        return self._table.extend(self._encode_words(uncached[::-1]))  # −1 is the first of them

    def _evict(self) -> None:
        """Remove the words that were used once; remove all words if too many would be left."""
        self._uses[0] = 2  # the empty word stays
        kept = np.flatnonzero(self._uses > 1)
        if len(kept) > self._max_words // 2:
            kept = kept[:1]
        words = list(self._index)
        self._index, self._table = WordIndex(words[k] for k in kept), self._table.select(kept)
        self._uses = np.zeros(len(kept), dtype=np.int64)

    def _encode_words(self, words: Sequence[str]) -> list[list[int] | None]:
        tokenize = self._tokenizer.model.tokenize
        return [
            None if parts is None else [token.id for part in parts for token in tokenize(part)]
            for parts in self._words.split(words)
        ]


class WordIndex(dict[str, int]):
    """Numbers words when they are first looked up.

    Words that are too long to cache get −1, −2, … and are not stored.
    """

    def __init__(self, words: Iterable[str]) -> None:
        super().__init__(zip(words, count(), strict=False))
        self._cached: list[str] = []
        self._uncached: list[str] = []

    def __missing__(self, word: str) -> int:
        if len(word) > MAX_CACHED_CHARACTERS:
            self._uncached.append(word)
            return -len(self._uncached)
        self._cached.append(word)
        self[word] = number = len(self)
        return number

    def pop_new(self) -> tuple[list[str], list[str]]:
        """Return the new cached and uncached words since the last call."""
        new = self._cached, self._uncached
        self._cached, self._uncached = [], []
        return new


@dataclass(frozen=True, slots=True)
class PieceTable:
    """The ids of words; the length `NEEDS_CONTEXT` marks words that cannot be looked up."""

    ids: IdArray
    starts: IntArray
    lengths: IntArray

    @staticmethod
    def empty() -> PieceTable:
        """Return a table without words."""
        nothing = np.zeros(0, dtype=np.int64)
        return PieceTable(nothing.astype(np.uint32), nothing, nothing)

    def select(self, index: IntArray) -> PieceTable:
        """Return a table of some of the words, in the order given."""
        lengths = self.lengths[index]
        n_ids = np.maximum(lengths, 0)
        ids = self.ids[ranges(self.starts[index], n_ids)]
        return PieceTable(ids, np.cumsum(n_ids) - n_ids, lengths)

    def extend(self, words: Sequence[Sequence[int] | None]) -> PieceTable:
        """Return a table with more words at the end."""
        if not words:
            return self
        lengths = np.array([NEEDS_CONTEXT if ids is None else len(ids) for ids in words])
        n_ids = np.maximum(lengths, 0)
        flat = chain.from_iterable(ids for ids in words if ids)
        return PieceTable(
            np.concatenate([self.ids, np.fromiter(flat, np.uint32, n_ids.sum())]),
            np.concatenate([self.starts, len(self.ids) + np.cumsum(n_ids) - n_ids]),
            np.concatenate([self.lengths, lengths]),
        )


class ContextFreeWords:
    """Splits words into the strings that the tokenizer's model receives, independent of context.

    A word depends on its context if it holds a special token, if its normalized form is empty or
    holds white space or the word-start symbol, or if it could form one grapheme cluster with the
    space beside it. Use `of`, which checks that the tokenizer's components are known.
    """

    def __init__(self, tokenizer: Tokenizer, word_start: str | None) -> None:
        self._normalizer, self._pre_tokenizer = tokenizer.normalizer, tokenizer.pre_tokenizer
        self._word_start = word_start
        special = "|".join(map(re.escape, [SEPARATOR, *_special_forms(tokenizer)]))
        spaces = "" if word_start is None else f"{EMPTY_OR_SPACED}|{re.escape(word_start)}|"
        self._bad_word, self._bad_form = re.compile(special), re.compile(spaces + special)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ContextFreeWords | None:
        """Return the splitter of a tokenizer; None if its words may depend on their context."""
        splits_words, word_start = _find_word_start(_read_settings(tokenizer.pre_tokenizer))
        is_context_free = (
            splits_words
            and all(map(_is_local, _list_steps(_read_settings(tokenizer.normalizer))))
            and not getattr(tokenizer.model, "dropout", None)
            # Special tokens with spaces would have to be searched across words.
            and all(form.split() == [form] for form in _special_forms(tokenizer))
        )
        return cls(tokenizer, word_start) if is_context_free else None

    def split(self, words: Sequence[str]) -> list[list[str] | None]:
        """Return the strings of every word; None for a word that depends on its context."""
        bad_form, bad_word = self._bad_form.search, self._bad_word.search
        is_good = [not (bad_word(word) or _may_join_space(word)) for word in words]
        forms = self._normalize(
            [word if good else "" for word, good in zip(words, is_good, strict=True)]
        )
        return [
            self._split_form(form) if good and not bad_form(form) else None
            for form, good in zip(forms, is_good, strict=True)
        ]

    def _normalize(self, words: Sequence[str]) -> Sequence[str]:
        """Normalize all words in one call; return separators, which are refused, if that fails."""
        if self._normalizer is None:
            return words
        joined = SEPARATOR + SEPARATOR.join(words) + SEPARATOR
        forms = self._normalizer.normalize_str(joined).split(SEPARATOR)[1:-1]
        return forms if len(forms) == len(words) else [SEPARATOR] * len(words)

    def _split_form(self, form: str) -> list[str]:
        if self._word_start is not None:  # some characters are normalized to several words
            return [self._word_start + part for part in form.split(" ")]
        return [part for part, _ in self._pre_tokenizer.pre_tokenize_str(form)]


def _may_join_space(word: str) -> bool:
    """Return whether a word may form one grapheme cluster with a space before or after it."""
    if word.isascii():
        return False
    first = word[0]
    extends = not first.isascii() and unicodedata.category(first) in EXTENDING
    return extends or first in EXTENDING_LETTERS or PREPENDED.search(word) is not None


def _special_forms(tokenizer: Tokenizer) -> list[str]:
    """Return the tokens that are searched in the text itself, as written and as normalized."""
    written = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    normalizer = tokenizer.normalizer
    return written + ([] if normalizer is None else list(map(normalizer.normalize_str, written)))


def _find_word_start(pre_tokenizer: dict[str, Any] | None) -> tuple[bool, str | None]:
    """Return whether words are split at spaces, and the word-start symbol if it is always added."""
    steps = _list_steps(pre_tokenizer)
    kinds = [step["type"] for step in steps]
    if kinds == ["BertPreTokenizer"]:
        return True, None
    if kinds not in (["Metaspace"], ["WhitespaceSplit", "Metaspace"]):
        return False, None
    scheme, splits = steps[-1]["prepend_scheme"], steps[-1]["split"]
    marks_all = scheme == "always" or (scheme == "first" and len(steps) == 1)
    return splits and marks_all, steps[-1]["replacement"]


def _is_local(step: dict[str, Any]) -> bool:
    """Return whether a normalizer never looks across spaces."""
    if step["type"] != "Replace":
        return step["type"] in LOCAL_NORMALIZERS
    pattern = step["pattern"]
    if "String" in pattern:
        return " " not in pattern["String"]
    return pattern["Regex"] == " {2,}" or bool(CHARACTER_SET.fullmatch(pattern["Regex"]))


def _list_steps(component: dict[str, Any] | None) -> list[dict[str, Any]]:
    if component is None:
        return []
    if component["type"] != "Sequence":
        return [component]
    parts = component.get("normalizers", component.get("pretokenizers", ()))
    return [step for part in parts for step in _list_steps(part)]


def _read_settings(component: Any) -> dict[str, Any] | None:
    """Return the settings of a normalizer or pre-tokenizer."""
    if component is None:
        return None
    settings: dict[str, Any] = json.loads(component.__getstate__())
    return settings
