"""Sentence pairs as windows that fit the encoder, as batches, and back: links of windows to pairs.

A pair that is too long is split into overlapping windows that move along both sentences in step.
Each window is responsible for the words in its middle, on the longer side; the words around them
are context. A link is taken from the window that is responsible for its words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
import torch

from calque.tokens.layout import add_pair_special_tokens, join_sides
from calque.tokens.ragged import Ragged, add_special_tokens, interleave, pack, ranges
from calque.tokens.tokenizer import SpecialTokens
from calque.tokens.words import EncodedWords
from calque.types import Links, TokenBatch

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from calque.models.encoder import Encoder
    from calque.tokens.words import WordEncoder
    from calque.word_alignment.protocol import WordPair

    IntArray = npt.NDArray[np.int64]

# A word is cut after this fraction of a side: a window must hold it and its context.
MAX_WORD_FRACTION = 6


@dataclass(frozen=True, slots=True)
class SubwordLimits:
    """How many subwords of a pair the encoder can read: of either side, and of both together."""

    side: int
    both: int

    @property
    def word(self) -> int:
        """Maximum number of subwords of one word."""
        return max(1, self.side // MAX_WORD_FRACTION)

    def divide(self, n_src: int, n_tgt: int) -> tuple[int, int]:
        """Divide the limit between two sides by their lengths, with at least 3/8 for each."""
        least = 3 * self.both // 8
        src = round(self.both * n_src / max(1, n_src + n_tgt))
        src = min(max(src, least), self.both - least)
        return min(src, self.side), min(self.both - src, self.side)


@dataclass(frozen=True, slots=True)
class PairLayout:
    """How the two sides become token sequences, and how many subwords fit.

    With `joint`, both sides are in one sequence; with `reset`, the positions of its second
    sentence start again from 0.
    """

    special_tokens: SpecialTokens
    joint: bool
    reset: bool
    limits: SubwordLimits

    @classmethod
    def of(
        cls,
        encoder: Encoder,
        encode: Literal["joint", "separate"],
        positions: Literal["reset", "continue"],
    ) -> Self:
        """Return the layout for an encoder and its tokenizer."""
        special_tokens, most = SpecialTokens.of(encoder.tokenizer), encoder.max_tokens
        joint, reset = encode == "joint", positions == "reset"
        if joint and not reset:  # both sides share the positions
            most -= 2 + special_tokens.n_between
            return cls(special_tokens, joint, reset, SubwordLimits(most, most))
        return cls(special_tokens, joint, reset, SubwordLimits(most - 2, 2 * (most - 2)))

    def count_tokens(self, windows: PairWindows) -> IntArray:
        """Count the tokens of every window, special tokens included."""
        n_special = 2 + self.special_tokens.n_between if self.joint else 4
        return windows.src.n_pieces() + windows.tgt.n_pieces() + n_special


@dataclass(frozen=True, slots=True)
class WindowSide:
    """One side of all windows: from which to which word of the flat text each window extends.

    The window is responsible for the words from `own_first` to `own_stop`.
    """

    pieces: EncodedWords
    first: IntArray
    stop: IntArray
    own_first: IntArray
    own_stop: IntArray

    @property
    def n_words(self) -> IntArray:
        """Number of words of every window."""
        return self.stop - self.first

    def n_pieces(self, rows: IntArray | slice = slice(None)) -> IntArray:
        """Return the number of subwords of windows."""
        bounds = self.pieces.first_pieces
        return bounds[self.stop[rows]] - bounds[self.first[rows]]

    def word_range(self, rows: IntArray, owners: IntArray) -> tuple[IntArray, IntArray]:
        """Return the first and last word of some windows, counted within their pairs."""
        begin = self.pieces.first_words[owners]
        return self.first[rows] - begin, self.stop[rows] - begin

    def gather(self, rows: IntArray, width: int) -> tuple[Ragged, IntArray]:
        """Return the subwords of some windows, and the slot of the word that each belongs to.

        Word k of the n-th of these windows has slot n · width + k.
        """
        bounds = self.pieces.first_pieces
        n_ids, n_words = self.n_pieces(rows), self.n_words[rows]
        ids = self.pieces.ids[ranges(bounds[self.first[rows]], n_ids)]
        slots = ranges(np.arange(len(rows)) * width, n_words)
        n_pieces = self.pieces.n_pieces[ranges(self.first[rows], n_words)]
        return Ragged(ids, n_ids), np.repeat(slots, n_pieces)

    def owns(self, windows: IntArray, words: IntArray) -> npt.NDArray[np.bool_]:
        """Return whether each of these windows is responsible for the word at the same index."""
        owned: npt.NDArray[np.bool_] = (self.own_first[windows] <= words) & (
            words < self.own_stop[windows]
        )
        return owned


@dataclass(frozen=True, slots=True)
class PairWindows:
    """Windows of sentence pairs; `owners` has the number of the pair of every window."""

    src: WindowSide
    tgt: WindowSide
    owners: IntArray
    n_empty: int
    n_long: int
    n_cut: int

    def __len__(self) -> int:
        return len(self.owners)

    @property
    def n_windows(self) -> int:
        """Number of windows of the pairs that were split."""
        return len(self.owners) - len(np.unique(self.owners)) + self.n_long


def split_pairs(
    encoder: WordEncoder, pairs: Sequence[WordPair], limits: SubwordLimits
) -> PairWindows:
    """Tokenize pairs of word lists and split the long ones; an empty side means no window."""
    src, n_cut_src = encoder.encode([pair[0] for pair in pairs]).truncate_words(limits.word)
    tgt, n_cut_tgt = encoder.encode([pair[1] for pair in pairs]).truncate_words(limits.word)
    n_src, n_tgt = src.lengths, tgt.lengths
    filled = (n_src > 0) & (n_tgt > 0)
    fits = (n_src <= limits.side) & (n_tgt <= limits.side) & (n_src + n_tgt <= limits.both)
    whole, long = np.flatnonzero(filled & fits), np.flatnonzero(filled & ~fits)
    s, t = src.first_words, tgt.first_words
    bounds = [s[whole], s[whole + 1], t[whole], t[whole + 1]]
    parts = [np.stack([whole, *bounds, *bounds], axis=1)]
    parts += [_split_pair(src, tgt, number, limits) for number in long.tolist()]
    table = np.concatenate(parts)
    table = table[np.argsort(table[:, 0], kind="stable")]
    owners, s0, s1, t0, t1, own_s0, own_s1, own_t0, own_t1 = table.T
    return PairWindows(
        WindowSide(src, s0, s1, own_s0, own_s1),
        WindowSide(tgt, t0, t1, own_t0, own_t1),
        owners,
        int((~filled).sum()),
        len(long),
        n_cut_src + n_cut_tgt,
    )


@dataclass(frozen=True, slots=True)
class PairBatch:
    """Some windows as packed sequences.

    Subword k of a side is token `positions[k]` and belongs to the word with slot `slots[k]`; word k
    of window n has slot n · width + k.
    """

    tokens: TokenBatch
    src_positions: Int[Tensor, "src_pieces"]
    tgt_positions: Int[Tensor, "tgt_pieces"]
    src_slots: Int[Tensor, "src_pieces"]
    tgt_slots: Int[Tensor, "tgt_pieces"]
    n_windows: int
    src_width: int
    tgt_width: int

    def to(self, device: torch.device) -> PairBatch:
        """Copy the arrays to a device."""
        if device.type == "cpu":
            return self
        return replace(
            self,
            tokens=self.tokens.to(device),
            src_positions=self.src_positions.to(device, non_blocking=True),
            tgt_positions=self.tgt_positions.to(device, non_blocking=True),
            src_slots=self.src_slots.to(device, non_blocking=True),
            tgt_slots=self.tgt_slots.to(device, non_blocking=True),
        )

    def split_words(self) -> PairBatch:
        """Return the same windows with every subword as a word of its own."""
        src_slots, src_width = _number_pieces(self.src_slots, self.n_windows, self.src_width)
        tgt_slots, tgt_width = _number_pieces(self.tgt_slots, self.n_windows, self.tgt_width)
        return replace(
            self,
            src_slots=src_slots,
            tgt_slots=tgt_slots,
            src_width=src_width,
            tgt_width=tgt_width,
        )

    def max_by_word(
        self, values: Float[Tensor, "windows src tgt"], words: PairBatch
    ) -> Float[Tensor, "windows words_src words_tgt"]:
        """Return the highest value among the subword pairs of every word pair.

        `values` belong to this batch, which is `words.split_words()`. Word pairs without subwords
        get −1.
        """
        src = self._find_words(self.src_slots, words.src_slots, self.src_width, words.src_width)
        tgt = self._find_words(self.tgt_slots, words.tgt_slots, self.tgt_width, words.tgt_width)
        by_tgt = _max_of_rows(values.mT, tgt, words.tgt_width).mT
        return _max_of_rows(by_tgt, src, words.src_width)

    def _find_words(
        self,
        piece_slots: Int[Tensor, "pieces"],
        word_slots: Int[Tensor, "pieces"],
        n_pieces: int,
        n_words: int,
    ) -> Int[Tensor, "windows width"]:
        """Return the word of every subword within its window; padding gets `n_words`."""
        found = word_slots.new_full((self.n_windows * n_pieces,), n_words)
        found[piece_slots] = word_slots % n_words
        return found.view(self.n_windows, n_pieces)


def _max_of_rows(
    values: Float[Tensor, "windows pieces others"], words: Int[Tensor, "windows pieces"], n: int
) -> Float[Tensor, "windows n others"]:
    """Return the highest row of every word, elementwise; −1 for words without rows."""
    highest = values.new_full((len(values), n + 1, values.shape[2]), -1.0)
    index = words[:, :, None].expand_as(values)
    return highest.scatter_reduce(1, index, values, "amax", include_self=False)[:, :n]


def _number_pieces(
    slots: Int[Tensor, "pieces"], n_windows: int, width: int
) -> tuple[Int[Tensor, "pieces"], int]:
    """Return a slot for every subword, and the most subwords of a window."""
    owners = slots // width
    counts = torch.bincount(owners, minlength=n_windows)
    most = int(counts.max())
    starts = counts.cumsum(0) - counts
    places = torch.arange(len(slots), device=slots.device) - starts[owners]
    return owners * most + places, most


def build_pair_batch(windows: PairWindows, rows: IntArray, layout: PairLayout) -> PairBatch:
    """Pack some windows into one batch."""
    src_width = int(windows.src.n_words[rows].max())
    tgt_width = int(windows.tgt.n_words[rows].max())
    src, src_slots = windows.src.gather(rows, src_width)
    tgt, tgt_slots = windows.tgt.gather(rows, tgt_width)
    special = layout.special_tokens
    if layout.joint:
        left, right = add_pair_special_tokens(src, tgt, special)
        pairs, positions = join_sides(left, right, reset=layout.reset)
        tokens = pack(pairs, positions=positions, pad_id=special.pad_id)
        n_opening = right.lengths - tgt.lengths - 1
    else:
        left, right = (add_special_tokens(s, special.cls_id, special.sep_id) for s in (src, tgt))
        pairs, _ = interleave(left, right)
        lengths = np.stack([left.lengths, right.lengths], axis=1).ravel()
        tokens = pack(Ragged(pairs.ids, lengths), pad_id=special.pad_id)
        n_opening = np.ones_like(right.lengths)
    starts = np.cumsum(pairs.lengths) - pairs.lengths
    return PairBatch(
        tokens,
        torch.from_numpy(ranges(starts + 1, src.lengths)),
        torch.from_numpy(ranges(starts + left.lengths + n_opening, tgt.lengths)),
        torch.from_numpy(src_slots),
        torch.from_numpy(tgt_slots),
        len(rows),
        src_width,
        tgt_width,
    )


@dataclass(frozen=True, slots=True)
class WindowLinks:
    """Links within windows; words are counted from the first word of the window."""

    windows: IntArray
    src: IntArray
    tgt: IntArray
    scores: npt.NDArray[np.float32]

    @classmethod
    def of(
        cls,
        rows: IntArray,
        links: Bool[Tensor, "windows src tgt"],
        scores: Float[Tensor, "windows src tgt"],
    ) -> Self:
        """List the links of a batch of windows."""
        windows, src, tgt = links.nonzero().cpu().numpy().T
        return cls(rows[windows], src, tgt, scores[links].float().cpu().numpy())


def gather_links(windows: PairWindows, parts: Sequence[WindowLinks], n_pairs: int) -> Links:
    """Return the links of all pairs, each from the window that is responsible for its words."""
    none = np.zeros(0, dtype=np.int64)
    parts = [WindowLinks(none, none, none, np.zeros(0, dtype=np.float32)), *parts]
    number, src, tgt, scores = (
        np.concatenate([getattr(part, field.name) for part in parts])
        for field in fields(WindowLinks)
    )
    src, tgt = src + windows.src.first[number], tgt + windows.tgt.first[number]
    owned = windows.src.owns(number, src) & windows.tgt.owns(number, tgt)
    number, src, tgt, scores = number[owned], src[owned], tgt[owned], scores[owned]
    pairs = windows.owners[number]
    src = src - windows.src.pieces.first_words[pairs]
    tgt = tgt - windows.tgt.pieces.first_words[pairs]
    order = np.lexsort((tgt, src, pairs))
    return Links(pairs[order], src[order], tgt[order], scores[order], n_pairs)


def _split_pair(
    src: EncodedWords, tgt: EncodedWords, number: int, limits: SubwordLimits
) -> IntArray:
    """Return the windows of one long pair: its number, then the columns of both sides."""
    src_starts, tgt_starts = _word_starts(src, number), _word_starts(tgt, number)
    n_src, n_tgt = int(src_starts[-1]), int(tgt_starts[-1])
    # The last word of a window's middle may extend beyond it by all but one of its subwords.
    src_size, tgt_size = (share - limits.word for share in limits.divide(n_src, n_tgt))
    # The middle of a window is at most half of it.
    n_windows = max(-(-2 * n_src // src_size), -(-2 * n_tgt // tgt_size))
    src_ranges, src_own = _choose_windows(src_starts, n_windows, src_size)
    tgt_ranges, tgt_own = _choose_windows(tgt_starts, n_windows, tgt_size)
    if len(src_starts) >= len(tgt_starts):  # on the other side, all words of the window count
        tgt_own = tgt_ranges
    else:
        src_own = src_ranges
    src_shift, tgt_shift = src.first_words[number], tgt.first_words[number]
    columns = [src_ranges + src_shift, tgt_ranges + tgt_shift]
    columns += [src_own + src_shift, tgt_own + tgt_shift]
    return np.concatenate([np.full((n_windows, 1), number), *columns], axis=1)


def _word_starts(text: EncodedWords, number: int) -> IntArray:
    """Return the first subword of every word of a sentence, and the end of the last word."""
    first, stop = text.first_words[number : number + 2]
    starts: IntArray = np.concatenate([[0], np.cumsum(text.n_pieces[first:stop])])
    return starts


def _choose_windows(starts: IntArray, n_windows: int, size: int) -> tuple[IntArray, IntArray]:
    """Return the first and last word of evenly placed windows, and of their middles."""
    cuts = np.linspace(0, int(starts[-1]), n_windows + 1)
    margin = (size - np.diff(cuts)) / 2
    low, high = cuts[:-1] - margin, cuts[1:] + margin
    own = np.searchsorted(starts[:-1], np.floor(cuts), side="left")
    own[-1] = len(starts) - 1
    first = np.searchsorted(starts[:-1], np.ceil(low), side="left")
    stop = np.searchsorted(starts[1:], np.floor(high), side="right")
    first = np.minimum(np.minimum(first, own[:-1]), len(starts) - 2)
    stop = np.maximum(np.maximum(stop, own[1:]), first + 1)  # never empty
    return np.stack([first, stop], axis=1), np.stack([own[:-1], own[1:]], axis=1)
