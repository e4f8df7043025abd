"""Subwords of sentences that are split into words already, each distinct word encoded once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from calque.text.batching import ranges
from calque.text.tokenization import keeps_spaces, lift_limits
from calque.text.word_cache import MAX_WORDS, PieceTable, WordNumbers

if TYPE_CHECKING:
    import numpy.typing as npt
    from transformers import PreTrainedTokenizerFast

    IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PieceCounts:
    """The subwords of many sentences in one array: how many a word has, how many words a line."""

    ids: IntArray
    n_pieces: IntArray  # of every word
    n_words: IntArray  # of every sentence

    @property
    def first_words(self) -> IntArray:
        """Where the words of every sentence begin, and where the last end."""
        return np.concatenate([[0], np.cumsum(self.n_words)])

    @property
    def first_pieces(self) -> IntArray:
        """Where the subwords of every word begin, and where the last end."""
        return np.concatenate([[0], np.cumsum(self.n_pieces)])

    def shorten(self, most: int) -> tuple[PieceCounts, int]:
        """Keep the first subwords of words that have more than `most`; count such words."""
        n_kept = np.minimum(self.n_pieces, most)
        n_cut = int((n_kept < self.n_pieces).sum())
        if not n_cut:
            return self, 0
        ids = self.ids[ranges(self.first_pieces[:-1], n_kept)]
        return PieceCounts(ids, n_kept, self.n_words), n_cut


class WordEncoder:
    """Encodes words apart from each other, as tokenizers do with text that is split already.

    What it learns in one call serves the next.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, max_words: int = MAX_WORDS) -> None:
        self._tokenizer, self._max_words = tokenizer, max_words
        self._spaced = keeps_spaces(tokenizer)
        self._numbers, self._table = _know_nothing()

    def encode(self, sentences: Sequence[Sequence[str]]) -> PieceCounts:
        """Encode sentences without special tokens."""
        if len(self._numbers) > self._max_words:
            self._numbers, self._table = _know_nothing()
        n_words = np.fromiter(map(len, sentences), np.int64, len(sentences))
        words = list(chain.from_iterable(sentences))
        if self._spaced:
            words = _add_spaces(words, n_words)
        index = np.fromiter(map(self._numbers.__getitem__, words), np.int64, len(words))
        kept, passing = self._numbers.take_new()
        self._table = self._table.extend(self._encode(kept))
        table = self._table.extend(self._encode(passing[::-1]))  # −1 is the first of them
        n_pieces = table.lengths[index]
        ids = table.ids[ranges(table.starts[index], n_pieces)].astype(np.int64)
        return PieceCounts(ids, n_pieces, n_words)

    def _encode(self, words: Sequence[str]) -> list[list[int]]:
        encodings = lift_limits(self._tokenizer.backend_tokenizer).encode_batch_fast(
            [[word] for word in words], is_pretokenized=True, add_special_tokens=False
        )
        return [encoding.ids for encoding in encodings]


def _know_nothing() -> tuple[WordNumbers, PieceTable]:
    """Begin with the empty word, which has no subwords."""
    return WordNumbers([""]), PieceTable.of_nothing().extend([[]])


def _add_spaces(words: list[str], n_words: IntArray) -> list[str]:
    """Put the space before a word that byte-level tokenizers keep; not before a sentence's first.

    >>> _add_spaces(["a", "b", "", "c"], np.array([2, 0, 2]))
    ['a', ' b', '', ' c']
    """
    spaced = [" " + word if word else word for word in words]
    for first in np.unique((np.cumsum(n_words) - n_words)[n_words > 0]).tolist():
        spaced[first] = words[first]
    return spaced
