"""Split texts that are longer than a model can read at once into windows.

Three kinds of text are split: plain sentences for embedding (`split_long_sentences`), lines for
translation (`split_lines_for_translation`), and sentences given as words, whose windows may overlap
(`split_encoded_words`, `split_into_word_windows`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from calque.io.segmentation import split_sentences
from calque.tokens.tokenizer import boundary_ids, encode_sentences

if TYPE_CHECKING:
    import numpy.typing as npt
    from transformers import PreTrainedTokenizerFast

    from calque.tokens.words import EncodedWords

    IntArray = npt.NDArray[np.int64]

# Subwords that begin a word start with one of these in SentencePiece and byte-level vocabularies;
# WordPiece marks the subwords that continue a word instead.
WORD_START_PREFIXES, CONTINUATION_PREFIX = ("▁", "Ġ"), "##"


@dataclass(frozen=True, slots=True)
class TextWindows:
    """Token sequences that fit the model, and the line of text each belongs to.

    A line that fits is one window, an empty line none. `n_long` lines did not fit;
    `n_long_sentences` of their sentences did not fit either (only when splitting by sentence).
    """

    ids: list[IntArray]
    line_numbers: IntArray
    n_lines: int
    n_empty: int
    n_long: int
    n_long_sentences: int = 0

    @property
    def lengths(self) -> IntArray:
        """Return the number of tokens of every window."""
        return np.array([len(ids) for ids in self.ids], dtype=np.int64)

    @property
    def n_long_windows(self) -> int:
        """Return the number of windows into which the long lines were split."""
        return len(self.ids) - (self.n_lines - self.n_empty - self.n_long)


def split_long_sentences(
    tokenizer: PreTrainedTokenizerFast, sentences: Sequence[str], max_tokens: int
) -> TextWindows:
    """Tokenize sentences; split long ones into consecutive windows of about equal size.

    A window has at most `max_tokens` tokens, special tokens included.
    """
    max_subwords = max_tokens - sum(token is not None for token in boundary_ids(tokenizer))
    windows: list[IntArray] = []
    line_numbers: list[int] = []
    n_long = n_empty = 0
    for number, ids in enumerate(encode_sentences(tokenizer, _blank_to_empty(sentences))):
        parts = np.array_split(ids, -(-len(ids) // max_subwords)) if len(ids) else []
        n_empty += not parts
        n_long += len(parts) > 1
        windows += parts
        line_numbers += [number] * len(parts)
    numbers = np.array(line_numbers, dtype=np.int64)
    return TextWindows(windows, numbers, len(sentences), n_empty, n_long)


def split_lines_for_translation(
    tokenizer: PreTrainedTokenizerFast, lines: Sequence[str], max_subwords: int, language: str
) -> TextWindows:
    """Tokenize lines; split long ones by sentence, and long sentences between words."""
    texts = _blank_to_empty(lines)
    windows: list[IntArray] = []
    line_numbers: list[int] = []
    n_empty = n_long = n_long_sentences = 0
    for number, ids in enumerate(encode_sentences(tokenizer, texts)):
        parts = [ids] if len(ids) else []
        if len(ids) > max_subwords:
            n_long += 1
            parts, n_split = _split_line(tokenizer, texts[number], max_subwords, language)
            n_long_sentences += n_split
        n_empty += not parts
        windows += parts
        line_numbers += [number] * len(parts)
    numbers = np.array(line_numbers, dtype=np.int64)
    return TextWindows(windows, numbers, len(lines), n_empty, n_long, n_long_sentences)


def _split_line(
    tokenizer: PreTrainedTokenizerFast, line: str, max_subwords: int, language: str
) -> tuple[list[IntArray], int]:
    """Return the windows of one long line and how many of its sentences had to be split."""
    parts, n_split = [], 0
    sentences = split_sentences(line, language)
    for sentence, ids in zip(sentences, encode_sentences(tokenizer, sentences), strict=True):
        if len(ids) > max_subwords:
            n_split += 1
            parts += split_tokens(ids, max_subwords, _rank_boundaries(tokenizer, sentence))
        elif len(ids):
            parts.append(ids)
    return parts, n_split


def split_tokens(
    ids: IntArray, max_tokens: int, ranks: npt.NDArray[np.integer[Any] | np.bool_]
) -> list[IntArray]:
    """Split tokens into windows, each before the last token with the highest rank within reach.

    >>> starts_word = np.array([1, 1, 0, 0, 1, 0], dtype=bool)
    >>> [window.tolist() for window in split_tokens(np.arange(6), 3, starts_word)]
    [[0], [1, 2, 3], [4, 5]]
    """
    windows, start = [], 0
    while len(ids) - start > max_tokens:
        reach = ranks[start + 1 : start + max_tokens + 1]
        end = start + 1 + int(np.flatnonzero(reach == reach.max())[-1])
        windows.append(ids[start:end])
        start = end
    return [*windows, ids[start:]]


def _rank_boundaries(tokenizer: PreTrainedTokenizerFast, sentence: str) -> IntArray:
    """Return 2 for tokens that start a word, 1 for others that start a character, else 0.

    In byte-level vocabularies one character may have several tokens.
    """
    encoding = tokenizer.backend_tokenizer.encode(sentence, add_special_tokens=False)
    has_prefixes = any(token.startswith(WORD_START_PREFIXES) for token in encoding.tokens)
    starts_word = [
        token.startswith(WORD_START_PREFIXES)
        if has_prefixes
        else not token.startswith(CONTINUATION_PREFIX)
        for token in encoding.tokens
    ]
    starts, ends = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
    starts_character = np.append(True, starts[1:] >= ends[:-1])
    return np.where(starts_character, 1 + np.array(starts_word), 0)


def _blank_to_empty(lines: Sequence[str]) -> list[str]:
    """Replace lines of white space, from which some tokenizers make a token, by empty ones."""
    return ["" if line.isspace() else line for line in lines]


def split_encoded_words(
    text: EncodedWords, max_subwords: int, overlap: float
) -> tuple[IntArray, int]:
    """Split the long ones of many sentences between words; also return how many were split.

    The windows are rows of (start, stop, first, last) as in `WordWindow`, counted over all words.
    A sentence that fits, even an empty one, is one window.
    """
    bounds = text.first_words
    windows = np.stack([bounds[:-1], bounds[1:], bounds[:-1], bounds[1:]], axis=1)
    long = np.flatnonzero(text.lengths > max_subwords).tolist()
    parts: list[IntArray] = []
    done = 0
    for row in long:
        n_pieces = text.n_pieces[bounds[row] : bounds[row + 1]]
        split = split_into_word_windows(n_pieces, max_subwords, overlap)
        parts += [windows[done:row], np.array(split, dtype=np.int64) + bounds[row]]
        done = row + 1
    return np.concatenate([*parts, windows[done:]]), len(long)


class WordWindow(NamedTuple):
    """The model reads words `start` to `stop`; the results of words `first` to `last` are used."""

    start: int
    stop: int
    first: int
    last: int


def split_into_word_windows(
    n_subwords: IntArray, max_subwords: int, overlap: float
) -> list[WordWindow]:
    """Split a sentence, given the number of subwords of each word, into overlapping windows.

    Neighboring windows share up to a fraction `overlap` of `max_subwords`. The results of a word
    in two windows are taken from the window in which the word is farther from the edge.

    >>> split_into_word_windows(np.array([2, 2, 2, 2, 2]), max_subwords=6, overlap=0.4)
    [WordWindow(start=0, stop=3, first=0, last=3), WordWindow(start=2, stop=5, first=3, last=5)]
    """
    if n_subwords.max(initial=0) > max_subwords:
        raise ValueError(
            f"a word of {n_subwords.max()} subwords exceeds a window of {max_subwords}"
        )
    ends = np.concatenate([[0], np.cumsum(n_subwords)])

    def find_stop(start: int) -> int:
        return int(np.searchsorted(ends, ends[start] + max_subwords, "right")) - 1

    spans = [(0, find_stop(0))]
    while spans[-1][1] < len(n_subwords):
        start, stop = spans[-1]
        shared = int(np.searchsorted(ends, ends[stop] - overlap * max_subwords, "left"))
        # The next window must reach at least one word farther than this one.
        earliest = int(np.searchsorted(ends, ends[stop + 1] - max_subwords, "left"))
        next_start = min(stop, max(shared, earliest, start + 1))
        spans.append((next_start, find_stop(next_start)))
    cuts = [0, *((a[1] + b[0] + 1) // 2 for a, b in itertools.pairwise(spans)), len(n_subwords)]
    return [
        WordWindow(*span, *cut) for span, cut in zip(spans, itertools.pairwise(cuts), strict=True)
    ]
