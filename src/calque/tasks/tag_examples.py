"""Sentences with tags, laid out for an encoder in windows, each word's tag at its first subword."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch

from calque.models.heads import NO_LABEL
from calque.text.batching import BatchShape, Ragged, add_marks, ranges, reorder
from calque.text.placing import place_sequences
from calque.text.tagged import NO_TAG, TaggedSentence
from calque.text.word_pieces import PieceCounts, WordEncoder
from calque.text.word_windows import cut_words

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Bool, Int
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

    from calque.tasks.plugging import PluggedTokens
    from calque.types import TokenBatch

    IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TagBatch:
    """Windows and the tag of every token: `NO_LABEL` but at first subwords of tagged words.

    For whole sequences, `grid` holds the places of a window's tagged words, one window a row.
    """

    tokens: TokenBatch | PluggedTokens
    labels: Int[Tensor, "tokens"]
    grid: Int[Tensor, "windows words"]
    inside: Bool[Tensor, "windows words"]

    def to(self, device: torch.device | str) -> TagBatch:
        """Copy the tensors to a device, without waiting for the copy."""
        return TagBatch(
            self.tokens.to(device),
            self.labels.to(device, non_blocking=True),
            self.grid.to(device, non_blocking=True),
            self.inside.to(device, non_blocking=True),
        )


@dataclass(frozen=True, slots=True)
class TagExamples:
    """Windows of subwords; words `first_words[k]:first_words[k + 1]` are tagged in window k.

    `places` say where in its window such a word's first subword is, `words` which word of the
    text it is. `tags` and `has_pieces` are of all words of the text, sentence by sentence.
    """

    windows: Ragged
    first_words: IntArray
    places: IntArray
    words: IntArray
    tags: IntArray
    has_pieces: npt.NDArray[np.bool_]
    n_words: IntArray  # of every sentence
    sentences: IntArray  # of which a window is, by number
    names: Sequence[str]  # of the tags by number, those that a tagger knows first
    pad_id: int
    counts: Mapping[str, int]

    @property
    def lengths(self) -> IntArray:
        """Give the number of tokens of every window."""
        return self.windows.lengths

    def find_words(self, rows: IntArray) -> tuple[IntArray, IntArray]:
        """Number the tagged words of some windows, and say how many each window has."""
        n_words = np.diff(self.first_words)[rows]
        return ranges(self.first_words[:-1][rows], n_words), n_words

    def collate(self, rows: IntArray, shape: BatchShape | None = None) -> TagBatch:
        """Lay out some windows, without padding or up to a fixed shape."""
        text = reorder(self.windows, rows)
        placed = place_sequences(text, pad_id=self.pad_id, shape=shape)
        words, n_words = self.find_words(rows)
        begins = np.repeat(np.cumsum(text.lengths) - text.lengths, n_words)
        slots = placed.slots[begins + self.places[words]]
        n_rows = len(rows) if shape is None else max(len(rows), shape.sequences)
        n_most = n_words if shape is None else np.diff(self.first_words)
        size = n_rows, int(n_most.max(initial=1))
        return lay_tags(placed.tokens, slots, self.tags[self.words[words]], n_words, size)


def lay_tags(
    tokens: TokenBatch | PluggedTokens,
    slots: IntArray,
    tags: IntArray,
    n_words: IntArray,
    size: tuple[int, int],
) -> TagBatch:
    """Put the tags of words where their first subwords stand, window by window."""
    labels = np.full(len(tokens.ids), NO_LABEL, dtype=np.int64)
    labels[slots] = tags
    grid, inside = np.zeros(size, np.int64), np.zeros(size, np.bool_)
    where = np.repeat(np.arange(len(n_words)), n_words), ranges(np.zeros_like(n_words), n_words)
    grid[where], inside[where] = slots, True
    return TagBatch(tokens, *map(torch.from_numpy, (labels, grid, inside)))


def encode_tagged(
    tokenizer: PreTrainedTokenizerFast,
    sentences: Sequence[TaggedSentence],
    names: Sequence[str],
    *,
    longest: int,
    overlap: float,
) -> TagExamples:
    """Encode the words of sentences apart, and cut sentences that are too long into windows.

    A window has words around those it is asked about, so that each is seen in its context. Tags
    that are not among the `names` a tagger knows get numbers after those, words without a tag
    `NO_LABEL`; `counts` says how many there are.
    """
    marks = tokenizer.cls_token_id, tokenizer.sep_token_id
    head = int(marks[0] is not None)
    room = longest - head - int(marks[1] is not None)
    # A word's first subword is all that is used of it, so that no word need be cut in two.
    pieces, n_shortened = WordEncoder(tokenizer).encode([s.words for s in sentences]).shorten(room)
    spans, n_long = _cut_sentences(pieces, room, overlap)
    start, stop, first, last = spans.T
    begins = pieces.first_pieces[start]
    lengths = pieces.first_pieces[stop] - begins
    windows = Ragged(pieces.ids[ranges(begins, lengths)], lengths)
    given = list(chain.from_iterable(sentence.tags for sentence in sentences))
    every = [*names, *sorted({*given} - {*names, NO_TAG})]
    numbers = {NO_TAG: NO_LABEL} | {name: number for number, name in enumerate(every)}
    tags = np.fromiter(map(numbers.__getitem__, given), np.int64, len(given))
    has_pieces = pieces.n_pieces > 0
    words = ranges(first, last - first)
    owners = np.repeat(np.arange(len(spans)), last - first)
    kept = has_pieces[words] & (tags[words] != NO_LABEL)
    words, owners = words[kept], owners[kept]
    n_tagged = np.bincount(owners, minlength=len(spans))
    counts = {
        "sentences_in_windows": n_long,
        "words_shortened": n_shortened,
        "words_without_subwords": int((~has_pieces).sum()),
        "words_without_tag": int((tags == NO_LABEL).sum()),
        "words_of_unknown_tag": int((tags >= len(names)).sum()),
    }
    return TagExamples(
        add_marks(windows, *marks),
        np.concatenate([[0], np.cumsum(n_tagged)]),
        pieces.first_pieces[:-1][words] - begins[owners] + head,
        words,
        tags,
        has_pieces,
        pieces.n_words,
        np.searchsorted(pieces.first_words, start, side="right") - 1,
        every,
        tokenizer.pad_token_id or 0,
        {name: count for name, count in counts.items() if count},
    )


def _cut_sentences(pieces: PieceCounts, room: int, overlap: float) -> tuple[IntArray, int]:
    """List start, stop, first and last word of every window, and count the sentences cut."""
    bounds = pieces.first_words
    lengths = np.diff(pieces.first_pieces[bounds])
    whole = np.stack([bounds[:-1], bounds[1:], bounds[:-1], bounds[1:]], axis=1)
    long = np.flatnonzero(lengths > room).tolist()
    if not long:
        return whole, 0
    parts: list[IntArray] = []
    done = 0
    for row in long:
        parts.append(whole[done:row])
        n_pieces = pieces.n_pieces[bounds[row] : bounds[row + 1]]
        parts.append(np.array(cut_words(n_pieces, room, overlap), dtype=np.int64) + bounds[row])
        done = row + 1
    return np.concatenate([*parts, whole[done:]]), len(long)
