"""Windows over the words of a sentence that is longer than a model reads at once.

Lines cut to what a translator can read at once: whole, by sentence, or in windows of words.

Sentences cut to what a model can read at once, and their vectors put together again.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from calque.io.segmentation import split_sentences
from calque.tokens.tokenizer import encode_sentences

if TYPE_CHECKING:
    import numpy.typing as npt
    from transformers import PreTrainedTokenizerFast

    IntArray = npt.NDArray[np.int64]


class WordWindow(NamedTuple):
    """Words `start` to `stop` are read; those from `first` to `last` are taken from here."""

    start: int
    stop: int
    first: int
    last: int


def cut_words(n_pieces: npt.NDArray[np.int64], room: int, overlap: float) -> list[WordWindow]:
    """Cut a sentence, given the subwords of every word, into windows of at most `room` subwords.

    Windows break between words and have up to a share `overlap` of their subwords in common; of
    words in two windows, each is taken from the one in which it lies further from the edge.

    >>> cut_words(np.array([2, 2, 2, 2, 2]), room=6, overlap=0.4)
    [WordWindow(start=0, stop=3, first=0, last=3), WordWindow(start=2, stop=5, first=3, last=5)]
    """
    if n_pieces.max(initial=0) > room:
        raise ValueError(f"a word of {n_pieces.max()} subwords exceeds a window of {room}")
    ends = np.concatenate([[0], np.cumsum(n_pieces)])
    spans = [(0, _last_fitting(ends, 0, room))]
    while spans[-1][1] < len(n_pieces):
        start, stop = spans[-1]
        shared = int(np.searchsorted(ends, ends[stop] - overlap * room, "left"))
        # The next window must reach further than this one did.
        least = int(np.searchsorted(ends, ends[stop + 1] - room, "left"))
        begin = min(stop, max(shared, least, start + 1))
        spans.append((begin, _last_fitting(ends, begin, room)))
    cuts = [0, *((a[1] + b[0] + 1) // 2 for a, b in itertools.pairwise(spans))]
    cuts.append(len(n_pieces))
    return [
        WordWindow(*span, first, last)
        for span, first, last in zip(spans, cuts, cuts[1:], strict=False)
    ]


def _last_fitting(ends: npt.NDArray[np.int64], start: int, room: int) -> int:
    return int(np.searchsorted(ends, ends[start] + room, "right")) - 1


# How pieces that begin a word look in SentencePiece and byte-level vocabularies; WordPiece marks
# the others.
WORD_STARTS, INSIDE = ("▁", "Ġ"), "##"


@dataclass(frozen=True, slots=True)
class Segments:
    """Token sequences short enough, in order, and the line that each is a part of.

    `n_long` lines were cut, `n_cut` of their sentences even inside.
    """

    ids: list[IntArray]
    owners: IntArray
    n_lines: int
    n_empty: int
    n_long: int
    n_cut: int

    @property
    def lengths(self) -> IntArray:
        """Count the tokens of every segment."""
        return np.array([len(ids) for ids in self.ids], dtype=np.int64)


def cut_segments(
    tokenizer: PreTrainedTokenizerFast, lines: list[str], longest: int, language: str
) -> Segments:
    """Tokenise lines; those longer than allowed are split by sentence, nothing is left out."""
    texts = ["" if line.isspace() else line for line in lines]
    pieces: list[IntArray] = []
    owners: list[int] = []
    n_empty = n_long = n_cut = 0
    for number, ids in enumerate(encode_sentences(tokenizer, texts)):
        parts = [ids] if len(ids) else []
        if len(ids) > longest:
            n_long += 1
            parts, n_windows = _cut_line(tokenizer, texts[number], longest, language)
            n_cut += n_windows
        n_empty += not parts
        pieces += parts
        owners += [number] * len(parts)
    return Segments(pieces, np.array(owners, dtype=np.int64), len(lines), n_empty, n_long, n_cut)


def _cut_line(
    tokenizer: PreTrainedTokenizerFast, line: str, longest: int, language: str
) -> tuple[list[IntArray], int]:
    """Cut a line into sentences, and sentences that are still too long into windows."""
    parts, n_cut = [], 0
    sentences = split_sentences(line, language)
    for sentence, ids in zip(sentences, encode_sentences(tokenizer, sentences), strict=True):
        if len(ids) > longest:
            n_cut += 1
            parts += cut_windows(ids, longest, _rank_starts(tokenizer, sentence))
        elif len(ids):
            parts.append(ids)
    return parts, n_cut


def cut_windows(
    ids: IntArray, longest: int, ranks: npt.NDArray[np.integer[Any] | np.bool_]
) -> list[IntArray]:
    """Cut tokens into windows, each before the last token of the highest rank in reach.

    >>> starts = np.array([1, 1, 0, 0, 1, 0], dtype=bool)
    >>> [part.tolist() for part in cut_windows(np.arange(6), 3, starts)]
    [[0], [1, 2, 3], [4, 5]]
    """
    windows, first = [], 0
    while len(ids) - first > longest:
        reach = ranks[first + 1 : first + longest + 1]
        end = first + 1 + int(np.flatnonzero(reach == reach.max())[-1])
        windows.append(ids[first:end])
        first = end
    return [*windows, ids[first:]]


def _rank_starts(tokenizer: PreTrainedTokenizerFast, sentence: str) -> IntArray:
    """Give tokens that start a word 2, others that start a character 1.

    Where pieces are made of bytes, a character may have several.
    """
    encoding = tokenizer.backend_tokenizer.encode(sentence, add_special_tokens=False)
    spaced = any(piece.startswith(WORD_STARTS) for piece in encoding.tokens)
    starts_word = [
        piece.startswith(WORD_STARTS) if spaced else not piece.startswith(INSIDE)
        for piece in encoding.tokens
    ]
    begins, ends = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
    starts_character = np.append(True, begins[1:] >= ends[:-1])
    return np.where(starts_character, 1 + np.array(starts_word), 0)
