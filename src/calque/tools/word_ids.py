"""Words as numbers, and sentences as arrays of them: what statistical aligners count."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from calque.text.batching import ranges

if TYPE_CHECKING:
    import numpy.typing as npt

    from calque.tools.aligning import WordPair

    IntArray = npt.NDArray[np.int64]

UNKNOWN = -1
CHUNK_PAIRS = 10_000


class Vocabulary:
    """The words of a language, numbered in the order they were first met.

    With `lowercase`, words that differ in case only are one.
    """

    def __init__(self, words: Iterable[str] = (), *, lowercase: bool = True) -> None:
        self.lowercase, self.words = lowercase, list(words)
        self._numbers = _Numbers(self.words, lowercase)

    def __len__(self) -> int:
        return len(self.words)

    def learn(self, sentences: Iterable[Sequence[str]]) -> NumberedText:
        """Number the words of sentences; a new word gets the next number."""
        sides = list(sentences)
        return _lay_out(sides, map(self._numbers.__getitem__, chain.from_iterable(sides)))

    def find(self, sentences: Iterable[Sequence[str]]) -> NumberedText:
        """Number the words of sentences by what is known; a word never met is −1."""
        sides = list(sentences)
        known = self._numbers.get
        words = chain.from_iterable(sides)
        if self.lowercase:
            return _lay_out(sides, (known(w, known(w.lower(), UNKNOWN)) for w in words))
        return _lay_out(sides, (known(word, UNKNOWN) for word in words))


@dataclass(frozen=True, slots=True)
class NumberedText:
    """Sentences laid end to end; the words of sentence k are `ids[offsets[k]:offsets[k + 1]]`."""

    ids: npt.NDArray[np.int32]
    offsets: IntArray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> IntArray:
        """Count the words of every sentence."""
        return np.diff(self.offsets)

    def cut(self, rows: IntArray, first: IntArray, stop: IntArray) -> NumberedText:
        """Take words `first` to `stop` of the sentences asked for."""
        begins, lengths = self.offsets[rows] + first, stop - first
        chunks = (slice(low, low + CHUNK_PAIRS) for low in range(0, len(rows), CHUNK_PAIRS))
        ids = [self.ids[ranges(begins[chunk], lengths[chunk])] for chunk in chunks]
        return NumberedText(np.concatenate([self.ids[:0], *ids]), starts_of(lengths))

    def sentences(self, start: int = 0, stop: int | None = None) -> Iterator[list[int]]:
        """Give the words of consecutive sentences as lists."""
        stop = len(self) if stop is None else min(stop, len(self))
        for low in range(start, stop, CHUNK_PAIRS):
            bounds = self.offsets[low : min(low + CHUNK_PAIRS, stop) + 1]
            ids = self.ids[bounds[0] : bounds[-1]].tolist()
            yield from (ids[i:j] for i, j in pairwise((bounds - bounds[0]).tolist()))


@dataclass(frozen=True, slots=True)
class NumberedPairs:
    """The two sides of sentence pairs."""

    src: NumberedText
    tgt: NumberedText

    def __len__(self) -> int:
        return len(self.src)


def number_pairs(pairs: Iterable[WordPair], src: Vocabulary, tgt: Vocabulary) -> NumberedPairs:
    """Number the words of sentence pairs, and put the new ones into the vocabularies."""
    iterator = iter(pairs)
    parts: list[tuple[NumberedText, NumberedText]] = []
    while chunk := list(islice(iterator, CHUNK_PAIRS)):
        parts.append((src.learn(pair[0] for pair in chunk), tgt.learn(pair[1] for pair in chunk)))
    return NumberedPairs(_join(part[0] for part in parts), _join(part[1] for part in parts))


def find_pairs(pairs: Sequence[WordPair], src: Vocabulary, tgt: Vocabulary) -> NumberedPairs:
    """Number the words of sentence pairs by what is known; other words are −1."""
    return NumberedPairs(src.find(pair[0] for pair in pairs), tgt.find(pair[1] for pair in pairs))


def starts_of(lengths: npt.NDArray[Any]) -> IntArray:
    """Say where sequences of these lengths begin when laid end to end, and where the last ends.

    >>> starts_of(np.array([2, 0, 3])).tolist()
    [0, 2, 2, 5]
    """
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts


class _Numbers(dict[str, int]):
    """Numbers by form; a form looked up for the first time gets one.

    Forms are kept as they were written, so that most words need not be lower-cased again.
    """

    def __init__(self, words: list[str], lowercase: bool) -> None:
        super().__init__((word, number) for number, word in enumerate(words))
        self.words, self.lowercase = words, lowercase

    def __missing__(self, form: str) -> int:
        word = form.lower() if self.lowercase else form
        number = self.get(word)
        if number is None:
            number = self[word] = len(self.words)
            self.words.append(word)
        self[form] = number
        return number


def _lay_out(sides: list[Sequence[str]], numbers: Iterable[int]) -> NumberedText:
    lengths = np.array(list(map(len, sides)), dtype=np.int64)
    return NumberedText(np.array(list(numbers), dtype=np.int32), starts_of(lengths))


def _join(texts: Iterable[NumberedText]) -> NumberedText:
    parts = list(texts)
    ids = [np.zeros(0, dtype=np.int32), *(part.ids for part in parts)]
    lengths = [np.zeros(0, dtype=np.int64), *(part.lengths for part in parts)]
    return NumberedText(np.concatenate(ids), starts_of(np.concatenate(lengths)))
