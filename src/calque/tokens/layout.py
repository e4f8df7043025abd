"""Layouts of sentence pairs and packed batches, with the slot of every token in the batch.

Pairs are read in three ways: as one sequence `<s> a </s></s> b </s>` (`join_sides`), as two
sequences that attend to each other (`pack_pairs`), or as independent sequences
(`pack_separately`).
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


def add_pair_special_tokens(
    left: Ragged, right: Ragged, special_tokens: SpecialTokens
) -> tuple[Ragged, Ragged]:
    """Add the special tokens that the tokenizer puts around the two sentences of a pair."""
    cls_id, sep_id = special_tokens.cls_id, special_tokens.sep_id
    opening = sep_id if special_tokens.n_between == 2 else None
    return add_special_tokens(left, cls_id, sep_id), add_special_tokens(right, opening, sep_id)


def join_sides(left: Ragged, right: Ragged, *, reset: bool) -> tuple[Ragged, IntArray]:
    """Join pairs into one sequence each; return the sequences and their position numbers.

    With `reset` the positions of the right side start at 0 again (Conneau and Lample, 2019).
    """
    pairs, n_left = interleave(left, right)
    if reset:
        return pairs, reset_positions(n_left, pairs.lengths - n_left)
    return pairs, ranges(np.zeros_like(pairs.lengths), pairs.lengths)


def reset_positions(n_left: IntArray, n_right: IntArray) -> IntArray:
    """Return position numbers that start at 0 in each sentence of a pair.

    >>> reset_positions(np.array([2, 1]), np.array([3, 1])).tolist()
    [0, 1, 0, 1, 2, 0, 0]
    """
    lengths = _alternate(n_left, n_right)
    return ranges(np.zeros_like(lengths), lengths)


def swap_sides(src: Ragged, tgt: Ragged, generator: torch.Generator) -> tuple[Ragged, Ragged]:
    """Exchange source and target of a random half of the pairs."""
    import torch  # here, so that preparing text does not import it

    n_pairs = len(src.lengths)
    both = Ragged(np.concatenate([src.ids, tgt.ids]), np.concatenate([src.lengths, tgt.lengths]))
    swapped = torch.randint(2, (n_pairs,), generator=generator).numpy() * n_pairs
    numbers = np.arange(n_pairs)
    return reorder(both, numbers + swapped), reorder(both, numbers + n_pairs - swapped)


def pack_separately(
    sides: tuple[Ragged, ...],
    special_tokens: SpecialTokens,
    shape: BatchShape | None,
    *,
    own_special_tokens: bool = True,
) -> tuple[TokenBatch, IntArray]:
    """Pack the sentences of all sides as independent sequences, first side first.

    Also return the sequence number of every token. Padding has the number of sequences instead,
    and so have special tokens unless `own_special_tokens`.
    """
    ids, lengths = (
        np.concatenate([getattr(side, name) for side in sides]) for name in ("ids", "lengths")
    )
    cls_id, sep_id, pad_id = special_tokens.cls_id, special_tokens.sep_id, special_tokens.pad_id
    with_special = add_special_tokens(Ragged(ids, lengths), cls_id, sep_id)
    tokens = pack(with_special, shape=shape, pad_id=pad_id)
    n_sequences = len(lengths)
    numbers = np.arange(n_sequences)
    if own_special_tokens:
        owners = Ragged(np.repeat(numbers, with_special.lengths), with_special.lengths)
    else:
        owners = Ragged(np.repeat(numbers, lengths), lengths)
        owners = add_special_tokens(owners, n_sequences, n_sequences)
    return tokens, pack(owners, shape=shape, pad_id=n_sequences).ids.numpy()


@dataclass(frozen=True, slots=True)
class PairedTokens:
    """A batch in which sequences 2k and 2k + 1 are the left and right side of pair k.

    `order` lists the tokens with the sides of every pair exchanged, and `read_offsets` are the
    boundaries of the sequences in that order: there, sequence j is the partner of sequence j here.
    Padding is its own partner.
    """

    tokens: TokenBatch
    order: Int[Tensor, "tokens"]
    read_offsets: Int[Tensor, "boundaries"]
    is_right: Bool[Tensor, "tokens"]

    @property
    def read(self) -> TokenBatch:
        """Return the batch in exchanged order; only its layout is valid, not its ids."""
        return replace(self.tokens, offsets=self.read_offsets)


def pack_pairs(
    left: Ragged, right: Ragged, *, shape: BatchShape | None = None, pad_id: int
) -> PairedTokens:
    """Pack pairs of sequences that attend to each other; positions start at 0 in each sequence.

    >>> pairs = pack_pairs(Ragged.of([[5, 6], [7]]), Ragged.of([[8], [9, 4]]), pad_id=1)
    >>> pairs.tokens.ids.tolist(), pairs.tokens.offsets.tolist()
    ([5, 6, 8, 7, 9, 4], [0, 2, 3, 4, 6])
    >>> pairs.tokens.ids[pairs.order].tolist(), pairs.read_offsets.tolist()
    ([8, 5, 6, 9, 4, 7], [0, 1, 3, 5, 6])
    """
    import torch  # here, so that preparing text does not import it

    pairs, n_left = interleave(left, right)
    lengths = _alternate(n_left, pairs.lengths - n_left)
    sides = np.repeat(np.arange(len(lengths)) % 2, lengths)
    # The side is packed in the lowest bit of the position; padding counts as left.
    both = 2 * ranges(np.zeros_like(lengths), lengths) + sides
    packed = pack(pairs, positions=both, shape=shape, pad_id=pad_id)
    is_right = packed.positions % 2 == 1
    bounds = packed.offsets.numpy().astype(np.int64)
    starts, ends = bounds[:-1], bounds[1:]
    counts = np.concatenate([[0], np.cumsum(is_right.numpy())])
    n_right = counts[ends] - counts[starts]
    n_left = ends - starts - n_right
    order = ranges(_alternate(ends - n_right, starts), _alternate(n_right, n_left))
    offsets = np.append(_alternate(starts, ends - n_right), bounds[-1])
    middles = np.where(n_right > 0, starts + n_right, ends)
    read_offsets = np.append(_alternate(starts, middles), bounds[-1])
    tokens = replace(
        packed,
        positions=packed.positions // 2,
        offsets=torch.from_numpy(offsets.astype(np.int32)),
        longest=shape.row if shape else int(lengths.max(initial=1)),
    )
    return PairedTokens(
        tokens,
        torch.from_numpy(order),
        torch.from_numpy(read_offsets.astype(np.int32)),
        is_right,
    )


def _alternate(first: IntArray, second: IntArray) -> IntArray:
    """Return the elements of two arrays in turn."""
    return np.stack([first, second], axis=1).ravel()


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """A batch of sequences; token k of the concatenated sequences is at `slots[k]` of the batch.

    Packing in rows changes the order of sequences, so that labels must be placed by slot.
    `starts[j]` is the slot of the first token of sequence j.
    """

    tokens: TokenBatch
    slots: IntArray
    starts: IntArray


def build_packed_layout(
    ragged: Ragged,
    *,
    pad_id: int,
    shape: BatchShape | None = None,
    positions: IntArray | None = None,
) -> PackedLayout:
    """Pack sequences, none of them empty, and return the slot of every token."""
    if ragged.lengths.min(initial=1) < 1:
        raise ValueError("a sequence without tokens cannot be packed")
    firsts = np.cumsum(ragged.lengths) - ragged.lengths
    if shape is None:
        tokens = pack(ragged, positions=positions, pad_id=pad_id)
        return PackedLayout(tokens, np.arange(len(ragged.ids)), firsts)
    numbered = Ragged(np.arange(len(ragged.ids)), ragged.lengths)
    tokens = pack(numbered, positions=positions, shape=shape, pad_id=-1)
    ids, slots = _replace_numbers(tokens, ragged.ids, pad_id)
    return PackedLayout(replace(tokens, ids=ids), slots, slots[firsts])


@dataclass(frozen=True, slots=True)
class PackedPairLayout:
    """Packed pairs; token k is at `slots[k]`, counting all left tokens before the right ones.

    `starts` are the slots of the first tokens of all left and then all right sequences; 0 for an
    empty sequence.
    """

    pairs: PairedTokens
    slots: IntArray
    starts: IntArray


def build_packed_pair_layout(
    left: Ragged, right: Ragged, *, pad_id: int, shape: BatchShape | None = None
) -> PackedPairLayout:
    """Pack pairs and return the slot of every token; a right sequence may be empty."""
    n_left, n_all = len(left.ids), len(left.ids) + len(right.ids)
    numbered = (
        Ragged(np.arange(n_left), left.lengths),
        Ragged(np.arange(n_left, n_all), right.lengths),
    )
    packed = pack_pairs(*numbered, shape=shape, pad_id=-1)
    ids, slots = _replace_numbers(packed.tokens, np.concatenate([left.ids, right.ids]), pad_id)
    lengths = np.concatenate([left.lengths, right.lengths])
    starts = np.zeros(len(lengths), dtype=np.int64)
    is_filled = lengths > 0
    starts[is_filled] = slots[(np.cumsum(lengths) - lengths)[is_filled]]
    pairs = replace(packed, tokens=replace(packed.tokens, ids=ids))
    return PackedPairLayout(pairs, slots, starts)


def _replace_numbers(
    numbered: TokenBatch, ids: IntArray, pad_id: int
) -> tuple[Int[Tensor, "tokens"], IntArray]:
    """Replace the token numbers of a batch by ids (−1 by padding); also return their slots."""
    import torch  # here, so that preparing text does not import it

    numbers = numbered.ids.numpy()
    filled = np.flatnonzero(numbers >= 0)
    slots = np.empty(len(ids), dtype=np.int64)
    slots[numbers[filled]] = filled
    result = np.full(len(numbers), pad_id, dtype=np.int64)
    result[slots] = ids
    return torch.from_numpy(result), slots


def fit_batch_shape(lengths: IntArray, batches: list[IntArray]) -> BatchShape:
    """Return the smallest shape that every one of the given batches fits into."""
    row = -(-int(lengths.max(initial=1)) // ROW_STEP) * ROW_STEP
    n_rows = max(int(assign_rows(lengths[batch], row).max()) + 1 for batch in batches)
    max_sequences = max(len(batch) for batch in batches)
    budget = max(int(lengths[batch].sum()) for batch in batches)
    return BatchShape(n_rows * row, row, max_sequences, budget)
