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
from calque.text.word_pieces import PieceCounts, WordEncoder
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
    """Tokens, and for the first one of every word what is known of it.

    `cells` are words' places among sentences × words, counted row by row; other tokens have the one
    beyond. `heads` count within the sentence, 0 being the root; `head_rows` are tokens, and the
    root is the one beyond. `places` are the tokens of the words, one sentence after the other.
    """

    tokens: TokenBatch
    cells: Int[Tensor, "tokens"]
    is_word: Bool[Tensor, "sentences longest"]
    heads: Int[Tensor, "sentences longest"]
    head_rows: Int[Tensor, "tokens"]
    relations: Int[Tensor, "tokens"]
    places: Int[Tensor, "tokens"]

    def to(self, device: torch.device | str) -> ParseBatch:
        """Copy the tensors to a device, without waiting for the copy."""
        names = ("cells", "is_word", "heads", "head_rows", "relations", "places")
        moved = (getattr(self, name).to(device, non_blocking=True) for name in names)
        return ParseBatch(self.tokens.to(device), *moved)


@dataclass(frozen=True, slots=True)
class ParseExamples:
    """Encoded sentences: the windows of each, its words, and what is known of its tree.

    Word k stands at token `offsets[k]` of window `word_windows[k]`, marks counted. A head of −100
    is not learnt: it is none of the words that are read.
    """

    windows: Ragged
    n_windows: IntArray  # of every sentence
    n_words: IntArray  # of every sentence
    word_windows: IntArray
    offsets: IntArray
    heads: IntArray
    relations: IntArray
    pad_id: int
    n_cut: int  # words that were left out
    n_bare: int  # words without a subword, which are read as unknown

    @property
    def lengths(self) -> IntArray:
        """Give the number of tokens of every sentence, in all of its windows."""
        ends = np.concatenate([[0], np.cumsum(self.windows.lengths)])
        lengths: IntArray = np.diff(ends[np.concatenate([[0], np.cumsum(self.n_windows)])])
        return lengths

    def collate(self, rows: IntArray, shape: BatchShape | None = None) -> ParseBatch:
        """Lay out some sentences, without padding or up to a fixed shape."""
        n_windows, n_words = self.n_windows[rows], self.n_words[rows]
        first_windows = (np.cumsum(self.n_windows) - self.n_windows)[rows]
        chosen = reorder(self.windows, ranges(first_windows, n_windows))
        placed = place_sequences(chosen, pad_id=self.pad_id, shape=shape)
        words = ranges((np.cumsum(self.n_words) - self.n_words)[rows], n_words)
        owners = np.repeat(np.arange(len(rows)), n_words)
        shift = np.cumsum(n_windows) - n_windows - first_windows
        places = placed.starts[self.word_windows[words] + shift[owners]] + self.offsets[words]
        n_rows, n_tokens = len(rows), len(placed.tokens.ids)
        longest = int(n_words.max(initial=1))
        if shape is not None:
            n_rows, longest = max(shape.sequences, n_rows), shape.row
        first_words = np.cumsum(n_words) - n_words
        cells = owners * longest + np.arange(len(words)) - first_words[owners]
        heads, relations = self.heads[words], self.relations[words]
        table = np.full(n_rows * longest, NO_LABEL)
        table[cells] = heads
        is_word = np.zeros(n_rows * longest, dtype=bool)
        is_word[cells] = True
        above = np.where(heads > 0, first_words[owners] + heads - 1, 0)
        everywhere = np.arange(len(words))
        return ParseBatch(
            placed.tokens,
            _fill(cells, places, n_tokens, n_rows * longest),
            torch.from_numpy(is_word.reshape(n_rows, longest)),
            torch.from_numpy(table.reshape(n_rows, longest)),
            _fill(np.where(heads > 0, places[above], n_tokens), places, n_tokens, n_tokens),
            _fill(np.where(heads < 0, NO_LABEL, relations), places, n_tokens, NO_LABEL),
            _fill(places, everywhere, n_tokens, 0),
        )


def _fill(values: IntArray, places: IntArray, size: int, filler: int) -> Tensor:
    """Put values at their places, and something else everywhere else."""
    filled = np.full(size, filler)
    filled[places] = values
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
    n_bare = int((pieces.n_pieces == 0).sum())
    pieces = _name_unknown(pieces, _unknown_id(tokenizer))
    first_words, first_pieces = pieces.first_words, pieces.first_pieces
    lists: list[list[IntArray]] = [[], [], [], []]  # ids, windows of words, offsets, words
    n_windows, n_words, total = [], [], 0
    for start, stop in zip(first_words[:-1].tolist(), first_words[1:].tolist(), strict=True):
        windows = cut_words(pieces.n_pieces[start:stop], room, overlap)
        if one_window:
            end = windows[0].stop
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
        offsets=np.concatenate(lists[2]),
        heads=heads,
        relations=kinds,
        pad_id=tokenizer.pad_token_id or 0,
        n_cut=sum(len(sentence.words) for sentence in sentences) - len(words),
        n_bare=n_bare,
    )


def _name_unknown(pieces: PieceCounts, unknown: int) -> PieceCounts:
    """Give words that the tokenizer deletes whole the subword of unknown text."""
    bare = np.flatnonzero(pieces.n_pieces == 0)
    ids = np.insert(pieces.ids, pieces.first_pieces[bare], unknown)
    return PieceCounts(ids, np.maximum(pieces.n_pieces, 1), pieces.n_words)


def _unknown_id(tokenizer: PreTrainedTokenizerFast) -> int:
    known = (tokenizer.unk_token_id, tokenizer.mask_token_id, tokenizer.sep_token_id)
    return next((int(number) for number in known if number is not None), 0)


def _number_arcs(
    sentences: Sequence[ParsedSentence], n_words: IntArray, relations: Mapping[str, int]
) -> tuple[IntArray, IntArray]:
    heads: list[int] = []
    kinds: list[int] = []
    for sentence, n in zip(sentences, n_words.tolist(), strict=True):
        heads += [head if head <= n else NO_LABEL for head in sentence.heads[:n]]
        kinds += [relations.get(name, NO_LABEL) for name in sentence.deprels[:n]]
    return np.array(heads, dtype=np.int64), np.array(kinds, dtype=np.int64)
