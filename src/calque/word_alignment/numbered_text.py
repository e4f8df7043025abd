"""Words as numbers, and sentences as arrays of them: the input of the statistical aligners.

Sentences that are too long for the statistical aligners are split into overlapping parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calque.io.structured import read_array
from calque.tokens.ragged import ranges
from calque.types import Links

if TYPE_CHECKING:
    import numpy.typing as npt

    from calque.word_alignment.protocol import WordPair

    IntArray = npt.NDArray[np.int64]

UNKNOWN = -1
CHUNK_PAIRS = 10_000
# Maximum words of a sentence. eflomal gives a sentence of 1,024 words or more no links, without a
# message; fast_align's time grows with the cube of the length.
MAX_WORDS = 1023


class WordNumbering:
    """The words of a language, numbered in the order of their first occurrence.

    With `lowercase`, words that differ only in case have the same number. With `stem`, words with
    the same first letters have, which unites most forms of a word.
    """

    def __init__(self, words: Iterable[str] = (), *, lowercase: bool = True, stem: int = 0) -> None:
        self.lowercase, self.stem, self.words = lowercase, stem, list(words)
        self._numbers = _Numbers(self.words, lowercase, stem)

    def __len__(self) -> int:
        return len(self.words)

    def add(self, sentences: Iterable[Sequence[str]]) -> NumberedText:
        """Number the words of sentences; a new word gets the next number."""
        sides = list(sentences)
        return _to_text(sides, map(self._numbers.__getitem__, chain.from_iterable(sides)))

    def find(self, sentences: Iterable[Sequence[str]]) -> NumberedText:
        """Number the words of sentences without adding any; an unknown word is −1."""
        sides = list(sentences)
        known, shorten = self._numbers.get, self._numbers.shorten
        words = chain.from_iterable(sides)
        return _to_text(sides, (known(w, known(shorten(w), UNKNOWN)) for w in words))


@dataclass(frozen=True, slots=True)
class NumberedText:
    """Concatenated sentences; those of sentence k are `ids[offsets[k]:offsets[k + 1]]`."""

    ids: npt.NDArray[np.int32]
    offsets: IntArray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> IntArray:
        """Number of words of every sentence."""
        return np.diff(self.offsets)

    def select(self, rows: IntArray, first: IntArray, stop: IntArray) -> NumberedText:
        """Return words `first` to `stop` of the given sentences."""
        begins, lengths = self.offsets[rows] + first, stop - first
        chunks = (slice(low, low + CHUNK_PAIRS) for low in range(0, len(rows), CHUNK_PAIRS))
        ids = [self.ids[ranges(begins[chunk], lengths[chunk])] for chunk in chunks]
        return NumberedText(np.concatenate([self.ids[:0], *ids]), to_offsets(lengths))

    def sentences(self, start: int = 0, stop: int | None = None) -> Iterator[list[int]]:
        """Yield consecutive sentences as lists of numbers."""
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


def number_pairs(
    pairs: Iterable[WordPair], src: WordNumbering, tgt: WordNumbering
) -> NumberedPairs:
    """Number the words of sentence pairs and add new words to the two lists."""
    iterator = iter(pairs)
    parts: list[tuple[NumberedText, NumberedText]] = []
    while chunk := list(islice(iterator, CHUNK_PAIRS)):
        parts.append((src.add(pair[0] for pair in chunk), tgt.add(pair[1] for pair in chunk)))
    return NumberedPairs(_join(part[0] for part in parts), _join(part[1] for part in parts))


def find_pairs(pairs: Sequence[WordPair], src: WordNumbering, tgt: WordNumbering) -> NumberedPairs:
    """Number the words of sentence pairs without adding any; unknown words are −1."""
    return NumberedPairs(src.find(pair[0] for pair in pairs), tgt.find(pair[1] for pair in pairs))


def to_offsets(lengths: npt.NDArray[Any]) -> IntArray:
    """Return the start of each of some concatenated sequences, and the end of the last.

    >>> to_offsets(np.array([2, 0, 3])).tolist()
    [0, 2, 2, 5]
    """
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


@dataclass(frozen=True, slots=True)
class SplitPairs:
    """How pairs were split: the parts of pair p are `starts[p]` to `starts[p + 1]`.

    A pair with an empty side has no part, and a short pair is one part. For each part of a long
    pair, `cuts` has a row: the number of the part, its first word in the source and in the target,
    and the range of words on each side for which its links count.
    """

    starts: IntArray
    cuts: IntArray

    def __len__(self) -> int:
        return len(self.starts) - 1

    def count_parts(self, start: int, stop: int) -> IntArray:
        """Return the number of parts of some pairs."""
        return np.diff(self.starts[start : stop + 1])

    def merge(self, links: Links, start: int, stop: int) -> Links:
        """Return the links of some pairs, given those of their parts."""
        first, last = int(self.starts[start]), int(self.starts[stop])
        owners = np.repeat(np.arange(stop - start), self.count_parts(start, stop))
        pairs, src, tgt, scores = owners[links.pairs], links.src, links.tgt, links.scores
        low, high = np.searchsorted(self.cuts[:, 0], [first, last])
        if low < high:
            cuts = self.cuts[low:high]
            # The links of a part that is a whole pair count everywhere.
            columns = np.zeros((6, last - first), dtype=np.int64)
            columns[[3, 5]] = np.iinfo(np.int64).max
            columns[:, cuts[:, 0] - first] = cuts[:, 1:].T
            src_begin, tgt_begin, *own = columns[:, links.pairs]
            src, tgt = src + src_begin, tgt + tgt_begin
            is_own = (src >= own[0]) & (src < own[1]) & (tgt >= own[2]) & (tgt < own[3])
            order = np.lexsort((tgt[is_own], src[is_own], pairs[is_own]))
            kept = np.flatnonzero(is_own)[order]
            pairs, src, tgt, scores = pairs[kept], src[kept], tgt[kept], scores[kept]
        return Links(pairs, src, tgt, scores, stop - start)

    def write(self, folder: Path) -> None:
        """Write the arrays into a folder."""
        np.save(folder / "seams.starts.npy", self.starts)
        np.save(folder / "seams.cuts.npy", self.cuts)

    @classmethod
    def read(cls, folder: Path) -> SplitPairs:
        """Read the arrays from a folder."""
        return cls(read_array(folder / "seams.starts.npy"), read_array(folder / "seams.cuts.npy"))


def split_long_pairs(pairs: NumberedPairs) -> tuple[NumberedPairs, SplitPairs]:
    """Split the pairs with too many words on a side, and leave out those with an empty side."""
    n_src, n_tgt = pairs.src.lengths, pairs.tgt.lengths
    is_filled = (n_src > 0) & (n_tgt > 0)
    is_long = is_filled & (np.maximum(n_src, n_tgt) > MAX_WORDS)
    whole = np.flatnonzero(is_filled & ~is_long)
    zeros = np.zeros_like(whole)
    rows = [np.stack([whole, zeros, n_src[whole], zeros, n_tgt[whole]], axis=1)]
    n_parts, own = is_filled.astype(np.int64), [np.zeros((0, 4), dtype=np.int64)]
    for number in np.flatnonzero(is_long).tolist():
        ranges, own_ranges = _split_pair(int(n_src[number]), int(n_tgt[number]))
        rows.append(np.insert(ranges, 0, number, axis=1))
        own.append(own_ranges)
        n_parts[number] = len(ranges)
    table = np.concatenate(rows)
    owners, s0, s1, t0, t1 = table[np.argsort(table[:, 0], kind="stable")].T
    parts = NumberedPairs(pairs.src.select(owners, s0, s1), pairs.tgt.select(owners, t0, t1))
    long_parts = np.flatnonzero(is_long[owners])
    begins = np.stack([long_parts, s0[long_parts], t0[long_parts]], axis=1)
    cuts = np.concatenate([begins, np.concatenate(own)], axis=1)
    return parts, SplitPairs(to_offsets(n_parts), cuts)


def _split_pair(n_src: int, n_tgt: int) -> tuple[IntArray, IntArray]:
    """Split both sides in step; return the words of each part, and those whose links count.

    Each side is cut into segments. A part is two neighboring segments, so that parts overlap. The
    links of a word count in the part that has it nearer to its middle, judged by the longer side:
    the other one may have fewer words than there are parts.
    """
    # Rounding may add a word at each end of the two segments of a part.
    n_segments = -(-max(n_src, n_tgt) // ((MAX_WORDS - 2) // 2))
    src, own_src = _split_side(n_src, n_segments)
    tgt, own_tgt = _split_side(n_tgt, n_segments)
    if n_src < n_tgt:
        own_src = src
    else:
        own_tgt = tgt
    return np.concatenate([src, tgt], axis=1), np.concatenate([own_src, own_tgt], axis=1)


def _split_side(n_words: int, n_segments: int) -> tuple[IntArray, IntArray]:
    """Return the range of words of every part, and that of its middle."""
    cuts = np.linspace(0, n_words, n_segments + 1)
    first, stop = np.floor(cuts[:-2]).astype(np.int64), np.ceil(cuts[2:]).astype(np.int64)
    middles = ((cuts[:-1] + cuts[1:]) / 2).astype(np.int64)
    middles[0], middles[-1] = 0, n_words
    return np.stack([first, stop], axis=1), np.stack([middles[:-1], middles[1:]], axis=1)


class _Numbers(dict[str, int]):
    """Numbers of word forms; looking up an unknown form adds it.

    The original forms are keys too, so that most words need not be shortened again.
    """

    def __init__(self, words: list[str], lowercase: bool, stem: int) -> None:
        super().__init__((word, number) for number, word in enumerate(words))
        self.words, self.lowercase, self.stem = words, lowercase, stem

    def shorten(self, form: str) -> str:
        """Return what words with the same number have in common."""
        word = form.lower() if self.lowercase else form
        return word[: self.stem] if self.stem else word

    def __missing__(self, form: str) -> int:
        word = self.shorten(form)
        number = self.get(word)
        if number is None:
            number = self[word] = len(self.words)
            self.words.append(word)
        self[form] = number
        return number


def _to_text(sides: list[Sequence[str]], numbers: Iterable[int]) -> NumberedText:
    lengths = np.array(list(map(len, sides)), dtype=np.int64)
    return NumberedText(np.array(list(numbers), dtype=np.int32), to_offsets(lengths))


def _join(texts: Iterable[NumberedText]) -> NumberedText:
    parts = list(texts)
    ids = [np.zeros(0, dtype=np.int32), *(part.ids for part in parts)]
    lengths = [np.zeros(0, dtype=np.int64), *(part.lengths for part in parts)]
    return NumberedText(np.concatenate(ids), to_offsets(np.concatenate(lengths)))
