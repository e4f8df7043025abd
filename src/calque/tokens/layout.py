"""Pairs of sequences laid out so that each can read the other: side by side, in one row.

Sequences laid out for an encoder, with the place that each of their tokens got.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from calque.tokens.ragged import (
    ROW_STEP,
    BatchShape,
    Ragged,
    add_special_tokens,
    assign_rows,
    interleave,
    pack,
    ranges,
    reorder,
)
from calque.types import TokenBatch

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch
    from jaxtyping import Bool, Int
    from torch import Tensor

    from calque.tokens.tokenizer import SpecialTokens

    IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PairedTokens:
    """A batch whose sequences 2k and 2k + 1 are a pair, left and right.

    `order` lists its tokens with left and right exchanged, and `read_offsets` bound the sequences
    in that order: sequence j there is the partner of sequence j here. Padding is its own partner.
    """

    tokens: TokenBatch
    order: Int[Tensor, "tokens"]
    read_offsets: Int[Tensor, "boundaries"]
    is_right: Bool[Tensor, "tokens"]

    @property
    def read(self) -> TokenBatch:
        """Describe the exchanged order as a batch; its ids are not to be used."""
        return replace(self.tokens, offsets=self.read_offsets)


def pack_pairs(
    left: Ragged, right: Ragged, *, shape: BatchShape | None = None, pad_id: int
) -> PairedTokens:
    """Lay pairs end to end, each of their sequences counting positions from 0.

    >>> pairs = pack_pairs(Ragged.of([[5, 6], [7]]), Ragged.of([[8], [9, 4]]), pad_id=1)
    >>> pairs.tokens.ids.tolist(), pairs.tokens.offsets.tolist()
    ([5, 6, 8, 7, 9, 4], [0, 2, 3, 4, 6])
    >>> pairs.tokens.ids[pairs.order].tolist(), pairs.read_offsets.tolist()
    ([8, 5, 6, 9, 4, 7], [0, 1, 3, 5, 6])
    """
    import torch  # here, for those who read and write text without it

    pairs, n_left = interleave(left, right)
    lengths = np.stack([n_left, pairs.lengths - n_left], axis=1).ravel()
    sides = np.repeat(np.arange(len(lengths)) % 2, lengths)
    # A token's side travels along with its position; padding is on the left.
    both = 2 * ranges(np.zeros_like(lengths), lengths) + sides
    laid = pack(pairs, positions=both, shape=shape, pad_id=pad_id)
    is_right = laid.positions % 2 == 1
    bounds = laid.offsets.numpy().astype(np.int64)
    starts, ends = bounds[:-1], bounds[1:]
    counts = np.concatenate([[0], np.cumsum(is_right.numpy())])
    n_right = counts[ends] - counts[starts]
    n_left = ends - starts - n_right
    order = ranges(_weave(ends - n_right, starts), _weave(n_right, n_left))
    offsets = np.append(_weave(starts, ends - n_right), bounds[-1])
    read = np.append(_weave(starts, np.where(n_right > 0, starts + n_right, ends)), bounds[-1])
    tokens = replace(
        laid,
        positions=laid.positions // 2,
        offsets=torch.from_numpy(offsets.astype(np.int32)),
        longest=shape.row if shape else int(lengths.max(initial=1)),
    )
    read_offsets = torch.from_numpy(read.astype(np.int32))
    return PairedTokens(tokens, torch.from_numpy(order), read_offsets, is_right)


def _weave(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Take from two arrays in turns."""
    return np.stack([first, second], axis=1).ravel()


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """A batch of tokens; `slots[k]` is where token k of the sequences end to end now stands.

    Rows of a fixed shape mix the order of sequences, so that labels go by these.
    """

    tokens: TokenBatch
    slots: IntArray
    starts: IntArray  # where every sequence begins, in their own order


def build_packed_layout(
    ragged: Ragged,
    *,
    pad_id: int,
    shape: BatchShape | None = None,
    positions: IntArray | None = None,
) -> PackedLayout:
    """Lay sequences, none of them empty, end to end or, with a shape, in padded rows."""
    if ragged.lengths.min(initial=1) < 1:
        raise ValueError("a sequence without tokens has no place")
    first = np.cumsum(ragged.lengths) - ragged.lengths
    if shape is None:
        tokens = pack(ragged, positions=positions, pad_id=pad_id)
        return PackedLayout(tokens, np.arange(len(ragged.ids)), first)
    numbered = Ragged(np.arange(len(ragged.ids)), ragged.lengths)
    tokens = pack(numbered, positions=positions, shape=shape, pad_id=-1)
    origin = tokens.ids.numpy()
    filled = np.flatnonzero(origin >= 0)
    slots = np.empty(len(ragged.ids), dtype=np.int64)
    slots[origin[filled]] = filled
    origin[filled] = ragged.ids[origin[filled]]  # in place: these are the ids of the batch
    origin[origin < 0] = pad_id
    return PackedLayout(tokens, slots, slots[first])


@dataclass(frozen=True, slots=True)
class PackedPairLayout:
    """Pairs of sequences; `slots[k]` is where token k now stands, all left ones before the right.

    `starts` are likewise those of every left sequence and then of every right one; one that is
    empty has none, and 0 stands for it.
    """

    pairs: PairedTokens
    slots: IntArray
    starts: IntArray


def build_packed_pair_layout(
    left: Ragged, right: Ragged, *, pad_id: int, shape: BatchShape | None = None
) -> PackedPairLayout:
    """Lay pairs side by side; one whose right sequence is empty only has itself to read."""
    import torch  # here, for those who read and write text without it

    n_left, n_all = len(left.ids), len(left.ids) + len(right.ids)
    numbered = (
        Ragged(np.arange(n_left), left.lengths),
        Ragged(np.arange(n_left, n_all), right.lengths),
    )
    laid = pack_pairs(*numbered, shape=shape, pad_id=-1)
    origin = laid.tokens.ids.numpy()
    filled = np.flatnonzero(origin >= 0)
    slots = np.empty(n_all, dtype=np.int64)
    slots[origin[filled]] = filled
    ids = np.full(len(origin), pad_id, dtype=np.int64)
    ids[filled] = np.concatenate([left.ids, right.ids])[origin[filled]]
    lengths = np.concatenate([left.lengths, right.lengths])
    starts = np.zeros(len(lengths), dtype=np.int64)
    is_there = lengths > 0
    starts[is_there] = slots[(np.cumsum(lengths) - lengths)[is_there]]
    pairs = replace(laid, tokens=replace(laid.tokens, ids=torch.from_numpy(ids)))
    return PackedPairLayout(pairs, slots, starts)


def fit_batch_shape(lengths: IntArray, batches: list[IntArray]) -> BatchShape:
    """Choose the smallest fixed shape that holds all of these batches of sequences."""
    row = -(-int(lengths.max(initial=1)) // ROW_STEP) * ROW_STEP
    n_rows = max(int(assign_rows(lengths[batch], row).max()) + 1 for batch in batches)
    n_most = max(len(batch) for batch in batches)
    budget = max(int(lengths[batch].sum()) for batch in batches)
    return BatchShape(n_rows * row, row, n_most, budget)


def swap_sides(src: Ragged, tgt: Ragged, generator: torch.Generator) -> tuple[Ragged, Ragged]:
    """Exchange source and target of every second pair or so."""
    import torch  # here, for those who read and write text without it

    n_pairs = len(src.lengths)
    both = Ragged(np.concatenate([src.ids, tgt.ids]), np.concatenate([src.lengths, tgt.lengths]))
    swapped = torch.randint(2, (n_pairs,), generator=generator).numpy() * n_pairs
    places = np.arange(n_pairs)
    return reorder(both, places + swapped), reorder(both, places + n_pairs - swapped)


def add_pair_special_tokens(
    left: Ragged, right: Ragged, marks: SpecialTokens
) -> tuple[Ragged, Ragged]:
    """Put marks around both sides, as the tokenizer does around the sentences of a pair."""
    opening = marks.sep_id if marks.n_between == 2 else None
    return add_special_tokens(left, marks.cls_id, marks.sep_id), add_special_tokens(
        right, opening, marks.sep_id
    )


def join_sides(left: Ragged, right: Ragged, *, reset: bool) -> tuple[Ragged, IntArray]:
    """Join marked sides into pairs; give their positions too, from 0 in every side if reset."""
    pairs, n_left = interleave(left, right)
    if reset:
        return pairs, reset_positions(n_left, pairs.lengths - n_left)
    return pairs, ranges(np.zeros_like(pairs.lengths), pairs.lengths)


def reset_positions(n_left: IntArray, n_right: IntArray) -> IntArray:
    """Count each sentence of a pair from 0.

    >>> reset_positions(np.array([2, 1]), np.array([3, 1])).tolist()
    [0, 1, 0, 1, 2, 0, 0]
    """
    lengths = np.stack([n_left, n_right], axis=1).ravel()
    return ranges(np.zeros_like(lengths), lengths)


def pack_separately(
    sides: tuple[Ragged, ...],
    marks: SpecialTokens,
    shape: BatchShape | None,
    *,
    own_marks: bool = True,
) -> tuple[TokenBatch, IntArray]:
    """Pack both sentences of every pair as sequences of their own, sources before targets.

    Also give the sentence of every token: the number of its pair, for targets plus the number of
    pairs. Padding is of none, twice the number of pairs; so are marks unless they are owned. One
    side alone is packed likewise.
    """
    text = Ragged(
        *(np.concatenate([getattr(side, name) for side in sides]) for name in ("ids", "lengths"))
    )
    nobody = len(text.lengths)
    tokens = pack(
        add_special_tokens(text, marks.cls_id, marks.sep_id), shape=shape, pad_id=marks.pad_id
    )
    numbers = np.arange(nobody)
    if own_marks:
        lengths = text.lengths + 2
        owned = Ragged(np.repeat(numbers, lengths), lengths)
    else:
        owned = Ragged(np.repeat(numbers, text.lengths), text.lengths)
        owned = add_special_tokens(owned, nobody, nobody)
    return tokens, pack(owned, shape=shape, pad_id=nobody).ids.numpy()
