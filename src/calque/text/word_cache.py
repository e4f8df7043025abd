"""Encoding sentences in bulk, each distinct word once: several times the tokenizer's own speed.

The ids are the tokenizer's own, whatever the text: `lone_words` says which words may be looked
up, and a sentence that holds another is left to the tokenizer whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import TYPE_CHECKING

import numpy as np

from calque.text.batching import Ragged, ranges
from calque.text.lone_words import LoneWords

if TYPE_CHECKING:
    import numpy.typing as npt
    from tokenizers import Tokenizer

    IdArray = npt.NDArray[np.uint32]
    IntArray = npt.NDArray[np.int64]

MAX_WORDS = 1 << 17  # about 20 MB
# Longer words, among them sentences in scripts without spaces, seldom come back.
MAX_CHARS = 20
REFUSED = -1


def make_sentence_encoder(tokenizer: Tokenizer) -> Callable[[Sequence[str]], Ragged]:
    """Choose the fastest way to encode sentences without special tokens, always the same ids."""
    lone_words = LoneWords.of(tokenizer)
    if lone_words is None:
        return lambda sentences: encode_whole(tokenizer, sentences)
    return WordCache(tokenizer, lone_words).encode


def encode_whole(tokenizer: Tokenizer, sentences: Sequence[str]) -> Ragged:
    """Encode sentences without special tokens, as they stand."""
    encodings = tokenizer.encode_batch_fast(list(sentences), add_special_tokens=False)
    return _flatten([encoding.ids for encoding in encodings])


class WordCache:
    """Remembers the ids of words; what it learns in one call serves the next."""

    def __init__(
        self, tokenizer: Tokenizer, lone_words: LoneWords, max_words: int = MAX_WORDS
    ) -> None:
        self._tokenizer, self._lone_words, self._max_words = tokenizer, lone_words, max_words
        self._lexicon, self._table = WordNumbers([""]), PieceTable.of_nothing().extend([None])
        self._uses = np.zeros(1, dtype=np.int64)

    def encode(self, sentences: Sequence[str]) -> Ragged:
        """Encode sentences without special tokens."""
        if not sentences:
            return _flatten([])
        if len(self._lexicon) > self._max_words:
            self._forget()
        words = " ".join(sentences).split(" ")
        index = np.fromiter(map(self._lexicon.__getitem__, words), np.int64, len(words))
        table = self._learn(index)
        n_words = np.fromiter((text.count(" ") + 1 for text in sentences), np.int64)
        firsts = np.cumsum(n_words) - n_words
        starts, lengths = table.starts[index], table.lengths[index]
        is_hard = np.minimum.reduceat(lengths, firsts) == REFUSED
        hard = np.flatnonzero(is_hard)
        whole = encode_whole(self._tokenizer, [sentences[k] for k in hard.tolist()])
        # A sentence encoded whole stands where its first word would.
        lengths[np.repeat(is_hard, n_words)] = 0
        lengths[firsts[hard]] = whole.lengths
        starts[firsts[hard]] = len(table.ids) + np.cumsum(whole.lengths) - whole.lengths
        ids = np.concatenate([table.ids, whole.ids])[ranges(starts, lengths)]
        return Ragged(ids, np.add.reduceat(lengths, firsts))

    def _learn(self, index: IntArray) -> PieceTable:
        """Take in the words that are new, and give the table to look all of them up in."""
        kept, passing = self._lexicon.take_new()
        self._uses = np.concatenate([self._uses, np.zeros(len(kept), dtype=np.int64)])
        self._uses += np.bincount(index[index >= 0], minlength=len(self._uses))
        self._table = self._table.extend(self._encode_words(kept))
        return self._table.extend(self._encode_words(passing[::-1]))  # −1 is the first of them

    def _forget(self) -> None:
        """Forget the words that came once, or all if too many came more often."""
        self._uses[0] = 2  # the empty word stays
        kept = np.flatnonzero(self._uses > 1)
        if len(kept) > self._max_words // 2:
            kept = kept[:1]
        words = list(self._lexicon)
        self._lexicon, self._table = WordNumbers(words[k] for k in kept), self._table.select(kept)
        self._uses = np.zeros(len(kept), dtype=np.int64)

    def _encode_words(self, words: Sequence[str]) -> list[list[int] | None]:
        tokenize = self._tokenizer.model.tokenize
        return [
            None if parts is None else [token.id for part in parts for token in tokenize(part)]
            for parts in self._lone_words.cut(words)
        ]


class WordNumbers(dict[str, int]):
    """Numbers words as they are looked up; long ones get −1, −2, … and are forgotten."""

    def __init__(self, words: Iterable[str]) -> None:
        super().__init__(zip(words, count(), strict=False))
        self._kept: list[str] = []
        self._passing: list[str] = []

    def __missing__(self, word: str) -> int:
        if len(word) > MAX_CHARS:
            self._passing.append(word)
            return -len(self._passing)
        self._kept.append(word)
        self[word] = number = len(self)
        return number

    def take_new(self) -> tuple[list[str], list[str]]:
        """Hand over the words to keep and the long ones that came since the last call."""
        taken = self._kept, self._passing
        self._kept, self._passing = [], []
        return taken


@dataclass(frozen=True, slots=True)
class PieceTable:
    """The ids of every word; a length of `REFUSED` marks one that cannot stand alone."""

    ids: IdArray
    starts: IntArray
    lengths: IntArray

    @staticmethod
    def of_nothing() -> PieceTable:
        """Make a table without words."""
        nothing = np.zeros(0, dtype=np.int64)
        return PieceTable(nothing.astype(np.uint32), nothing, nothing)

    def select(self, index: IntArray) -> PieceTable:
        """Keep some of the words, in the order given."""
        lengths = self.lengths[index]
        n_ids = np.maximum(lengths, 0)
        ids = self.ids[ranges(self.starts[index], n_ids)]
        return PieceTable(ids, np.cumsum(n_ids) - n_ids, lengths)

    def extend(self, words: Sequence[Sequence[int] | None]) -> PieceTable:
        """Add words at the end."""
        if not words:
            return self
        lengths = np.array([REFUSED if ids is None else len(ids) for ids in words])
        n_ids = np.maximum(lengths, 0)
        flat = chain.from_iterable(ids for ids in words if ids)
        return PieceTable(
            np.concatenate([self.ids, np.fromiter(flat, np.uint32, n_ids.sum())]),
            np.concatenate([self.starts, len(self.ids) + np.cumsum(n_ids) - n_ids]),
            np.concatenate([self.lengths, lengths]),
        )


def _flatten(sequences: Sequence[Sequence[int]]) -> Ragged:
    lengths = np.fromiter(map(len, sequences), np.int64, len(sequences))
    ids = np.fromiter(chain.from_iterable(sequences), np.uint32, lengths.sum())
    return Ragged(ids, lengths)  # type: ignore[arg-type]
