"""Sentences with trees as examples of a parser: words by their first subwords, arcs as numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from calque.models.heads import NO_LABEL
from calque.text.batching import BatchShape, Ragged, add_marks, ranges, reorder
from calque.text.placing import place_sequences
from calque.text.word_pieces import WordEncoder
from calque.text.word_windows import WordWindow, cut_words

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Bool, Int
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

    from calque.text.treebanks import ParsedSentence
    from calque.types import TokenBatch

    IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ParseBatch:
    """Words of some sentences in one list, and each sentence's row of a table that points to them.

    `places` are the tokens of the words; `heads` count within the sentence, 0 being the root,
    `head_rows` in the list of words, behind whose end the root stands.
    """

    tokens: TokenBatch
    places: Int[Tensor, "words"]
    has_state: Bool[Tensor, "words"]
    table: Int[Tensor, "sentences longest"]
    is_word: Bool[Tensor, "sentences longest"]
    heads: Int[Tensor, "sentences longest"]
    head_rows: Int[Tensor, "words"]
    relations: Int[Tensor, "words"]

    def to(self, device: torch.device | str) -> ParseBatch:
        """Copy the tensors to a device, without waiting for the copy."""
        names = ("places", "has_state", "table", "is_word", "heads", "head_rows", "relations")
        moved = (getattr(self, name).to(device, non_blocking=True) for name in names)
        return ParseBatch(self.tokens.to(device), *moved)


@dataclass(frozen=True, slots=True)
class ParseExamples:
    """Encoded sentences: the windows of each, its words, and what is known of its tree.

    Word k stands at token `offsets[k]` of window `word_windows[k]`, marks counted, or nowhere where
    it has no subword. A head of −100 is not learnt: it is none of the words that are read.
    """

    windows: Ragged
    n_windows: IntArray  # of every sentence
    n_words: IntArray  # of every sentence
    word_windows: IntArray
    offsets: IntArray
    has_state: npt.NDArray[np.bool_]
    heads: IntArray
    relations: IntArray
    pad_id: int
    n_cut: int  # words that were left out

    @property
    def lengths(self) -> IntArray:
        """Give the number of tokens of every sentence, in all of its windows."""
        ends = np.concatenate([[0], np.cumsum(self.windows.lengths)])
        return np.diff(ends[np.concatenate([[0], np.cumsum(self.n_windows)])])

    def collate(self, rows: IntArray, shape: BatchShape | None = None) -> ParseBatch:
        """Lay out some sentences, without padding or up to a fixed shape."""
        n_windows, n_words = self.n_windows[rows], self.n_words[rows]
        first_windows = (np.cumsum(self.n_windows) - self.n_windows)[rows]
        chosen = reorder(self.windows, ranges(first_windows, n_windows))
        placed = place_sequences(chosen, pad_id=self.pad_id, shape=shape)
        words = ranges((np.cumsum(self.n_words) - self.n_words)[rows], n_words)
        owners = np.repeat(np.arange(len(rows)), n_words)
        shift = np.cumsum(n_windows) - n_windows - first_windows
        starts = placed.starts[self.word_windows[words] + shift[owners]]
        n_rows, size, longest = len(rows), len(words), int(n_words.max(initial=1))
        if shape is not None:
            n_rows, size = max(shape.sequences, n_rows), len(placed.tokens.ids)
            longest = max(shape.row, longest)
        first_words = np.cumsum(n_words) - n_words
        columns = np.arange(len(words)) - first_words[owners]
        table = np.full((n_rows, longest), size)
        table[owners, columns] = np.arange(len(words))
        heads = np.full((n_rows, longest), NO_LABEL)
        heads[owners, columns] = self.heads[words]
        head_rows = first_words[owners] + self.heads[words] - 1
        return ParseBatch(
            placed.tokens,
            _fill(starts + self.offsets[words], size, 0),
            _fill(self.has_state[words], size, False),
            torch.from_numpy(table),
            torch.from_numpy(table < size),
            torch.from_numpy(heads),
            _fill(np.where(self.heads[words] > 0, head_rows, size), size, size),
            _fill(np.where(self.heads[words] < 0, NO_LABEL, self.relations[words]), size, NO_LABEL),
        )


def _fill(values: npt.NDArray[np.generic], size: int, filler: int) -> Tensor:
    """Make a tensor of a certain length out of a shorter array."""
    filled = np.full(size, filler, dtype=values.dtype)
    filled[: len(values)] = values
    return torch.from_numpy(filled)


def encode_trees(
    tokenizer: PreTrainedTokenizerFast,
    sentences: Sequence[ParsedSentence],
    relations: Mapping[str, int],
    longest: int,
    *,
    max_words: int | None,
    overlap: float,
    one_window: bool,
) -> ParseExamples:
    """Encode sentences; one longer than `longest` tokens is read in windows, as a whole.

    With `one_window`, as a batch of fixed shape needs, it is cut to what the first of them holds.
    `relations` without a number are −100: they cannot be learnt, nor be right.
    """
    marks = tokenizer.cls_token_id, tokenizer.sep_token_id
    head_mark, room = int(marks[0] is not None), longest - sum(m is not None for m in marks)
    texts = [sentence.words[:max_words] for sentence in sentences]
    # Of a word only the first subword's state is used, so that no word need be cut in two.
    pieces, _ = WordEncoder(tokenizer).encode(texts).shorten(room)
    first_words, first_pieces = pieces.first_words, pieces.first_pieces
    lists: list[list[IntArray]] = [[], [], [], []]  # ids, windows of words, offsets, words
    n_windows, n_words, total = [], [], 0
    for start, stop in zip(first_words[:-1].tolist(), first_words[1:].tolist(), strict=True):
        windows = cut_words(pieces.n_pieces[start:stop], room, overlap)
        if one_window and (len(windows) > 1 or windows[0].stop > room):
            end = min(windows[0].stop, room)
            windows = [WordWindow(0, end, 0, end)]
        for window in windows:
            begin = first_pieces[start + window.start]
            taken = np.arange(start + window.first, start + window.last)
            lists[0].append(pieces.ids[begin : first_pieces[start + window.stop]])
            lists[1].append(np.full(len(taken), total))
            lists[2].append(first_pieces[taken] - begin + head_mark)
            lists[3].append(taken)
            total += 1
        n_windows.append(len(windows))
        n_words.append(windows[-1].last)
    words = np.concatenate(lists[3])
    kept = np.array(n_words)
    heads, kinds = _number_arcs(sentences, kept, relations)
    return ParseExamples(
        windows=add_marks(Ragged.of(lists[0]), *marks),
        n_windows=np.array(n_windows),
        n_words=kept,
        word_windows=np.concatenate(lists[1]),
        offsets=np.where(pieces.n_pieces[words] > 0, np.concatenate(lists[2]), 0),
        has_state=pieces.n_pieces[words] > 0,
        heads=heads,
        relations=kinds,
        pad_id=tokenizer.pad_token_id or 0,
        n_cut=sum(len(sentence.words) for sentence in sentences) - len(words),
    )


def _number_arcs(
    sentences: Sequence[ParsedSentence], n_words: IntArray, relations: Mapping[str, int]
) -> tuple[IntArray, IntArray]:
    heads: list[int] = []
    kinds: list[int] = []
    for sentence, n in zip(sentences, n_words.tolist(), strict=True):
        heads += [head if head <= n else NO_LABEL for head in sentence.heads[:n]]
        kinds += [relations.get(name, NO_LABEL) for name in sentence.deprels[:n]]
    return np.array(heads, dtype=np.int64), np.array(kinds, dtype=np.int64)
