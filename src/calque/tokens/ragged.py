"""Token sequences of different lengths: batches within a token budget, packing, special tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from calque.errors import InputError
from calque.types import TokenBatch

if TYPE_CHECKING:
    import numpy.typing as npt

    IntArray = npt.NDArray[np.int64]

# Row lengths are multiples of this, for the matrix units of GPUs.
ROW_STEP = 16
# Safety factor on how full rows are planned to be, compared with a sample of the lengths.
FILL = 0.99


@dataclass(frozen=True, slots=True)
class Ragged:
    """Sequences of different lengths in one flat array."""

    ids: IntArray
    lengths: IntArray

    @staticmethod
    def of(sequences: Sequence[Sequence[int] | IntArray]) -> Ragged:
        """Flatten a list of sequences."""
        lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
        arrays = [np.asarray(sequence, dtype=np.int64) for sequence in sequences]
        return Ragged(np.concatenate([np.zeros(0, dtype=np.int64), *arrays]), lengths)


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The fixed shape to which batches are padded, so that a training step is compiled only once.

    A batch of `tokens` tokens consists of rows of `row` tokens; no sequence crosses a row.
    `budget` is the number of real tokens to plan for, such that they probably fit into the rows.
    """

    tokens: int
    row: int
    sequences: int
    budget: int

    @staticmethod
    def fit(tokens: int, lengths: IntArray, longest: int) -> BatchShape:
        """Choose a shape, given the lengths of a representative sample of the sequences."""
        row = -(-longest // ROW_STEP) * ROW_STEP
        n_rows = tokens // row
        if n_rows == 0:
            raise InputError(
                f"a batch of {tokens} tokens cannot hold a row of {row}",
                fix="raise batch_tokens or lower max_length",
            )
        trials = [lengths[batch] for batch in islice(batch_in_order(lengths, n_rows * row), 8)]
        filled = min(part.sum() / (row * (assign_rows(part, row).max() + 1)) for part in trials)
        sequences = int(1.1 * n_rows * row / lengths.mean()) + 8
        budget = max(longest, int(FILL * filled * n_rows * row))
        return BatchShape(n_rows * row, row, sequences, budget)


def ranges(starts: IntArray, lengths: IntArray) -> IntArray:
    """Concatenate the ranges [start, start + length) of all starts and lengths.

    >>> ranges(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    shifts: IntArray = np.repeat(starts - (ends - lengths), lengths)
    return np.arange(total) + shifts


def batch_in_order(
    lengths: IntArray, max_tokens: int, max_sequences: int | None = None
) -> Iterator[IntArray]:
    """Yield batches of consecutive sequences within a budget of real tokens.

    >>> [batch.tolist() for batch in batch_in_order(np.array([3, 3, 2, 4]), max_tokens=6)]
    [[0, 1], [2, 3]]
    """
    ends = np.cumsum(lengths)
    start, base = 0, 0
    while start < len(lengths):
        stop = int(np.searchsorted(ends, base + max_tokens, side="right"))
        stop = min(max(stop, start + 1), start + (max_sequences or len(lengths)))
        yield np.arange(start, stop)
        start, base = stop, int(ends[stop - 1])


def batch_by_length(lengths: IntArray, max_tokens: int) -> list[IntArray]:
    """Return batches of sequences of similar length within a budget of padded tokens.

    The longest come first, so that a batch too large for memory fails at the start.
    """
    order = np.argsort(-lengths, kind="stable")
    batches, start = [], 0
    while start < len(order):
        n_fit = max(1, max_tokens // max(1, int(lengths[order[start]])))
        batches.append(order[start : start + n_fit])
        start += n_fit
    return batches


def pack(
    ragged: Ragged,
    *,
    positions: IntArray | None = None,
    shape: BatchShape | None = None,
    pad_id: int,
) -> TokenBatch:
    """Concatenate sequences into one batch; with a shape, arrange them in padded rows."""
    if positions is None:
        plain = ranges(np.zeros_like(ragged.lengths), ragged.lengths)
        return replace(
            pack(ragged, positions=plain, shape=shape, pad_id=pad_id), has_default_positions=True
        )
    if shape is not None:
        return _pack_rows(ragged, positions, shape, pad_id)
    offsets = np.concatenate([[0], np.cumsum(ragged.lengths)])
    longest = int(ragged.lengths.max(initial=1))
    return _to_batch(ragged.ids, positions, offsets, longest, len(ragged.ids))


def assign_rows(lengths: IntArray, row: int) -> IntArray:
    """Return the row of every sequence by best-fit decreasing: the fullest row that has room.

    >>> assign_rows(np.array([3, 5, 4, 4]), row=8).tolist()
    [0, 0, 1, 1]
    """
    if lengths.max(initial=0) > row:
        raise ValueError(f"a sequence of {lengths.max()} tokens exceeds a row of {row}")
    rows = np.empty(len(lengths), dtype=np.int64)
    by_room: list[list[int]] = [[] for _ in range(row + 1)]
    free = 0  # bit r is set while some row has room for exactly r more tokens
    n_rows = 0
    for k in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[k])
        fitting = free >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            here = by_room[room].pop()
            if not by_room[room]:
                free &= ~(1 << room)
        else:
            here, room = n_rows, row
            n_rows += 1
        rows[k] = here
        by_room[room - length].append(here)
        free |= 1 << (room - length)
    return rows


def _pack_rows(ragged: Ragged, positions: IntArray, shape: BatchShape, pad_id: int) -> TokenBatch:
    """Arrange sequences in rows; the rest of a row is a sequence of padding.

    If the rows of the shape do not suffice, rows are added; the shape changes, nothing is lost.
    """
    rows = assign_rows(ragged.lengths, shape.row)
    order = np.argsort(rows, kind="stable")
    lengths, n_rows = ragged.lengths[order], shape.tokens // shape.row
    missing = max(0, int(rows.max(initial=0)) + 1 - n_rows)
    n_rows += -(-missing // ROW_STEP) * ROW_STEP
    used = np.bincount(rows, weights=ragged.lengths, minlength=n_rows).astype(np.int64)
    ends = np.cumsum(lengths)
    first_of_row = np.concatenate([[0], np.cumsum(used)])[rows[order]]
    starts = rows[order] * shape.row + (ends - lengths) - first_of_row
    ids = np.full(n_rows * shape.row, pad_id, dtype=np.int64)
    packed_positions = np.zeros(len(ids), dtype=np.int64)
    targets = ranges(starts, lengths)
    ids[targets] = reorder(ragged, order).ids
    packed_positions[targets] = reorder(Ragged(positions, ragged.lengths), order).ids
    padding = (np.arange(n_rows) * shape.row + used)[used < shape.row]
    bounds = np.sort(np.concatenate([starts, padding]))
    capacity = max(shape.sequences, len(starts)) + n_rows
    offsets = np.full(capacity + 1, len(ids), dtype=np.int64)
    offsets[: len(bounds)] = bounds
    return _to_batch(ids, packed_positions, offsets, shape.row, len(ragged.ids), shape.row)


def _to_batch(
    ids: IntArray, positions: IntArray, offsets: IntArray, longest: int, n_real: int, row: int = 0
) -> TokenBatch:
    import torch  # here, so that preparing text does not import it

    return TokenBatch(
        torch.from_numpy(ids),
        torch.from_numpy(positions),
        torch.from_numpy(offsets.astype(np.int32)),
        longest,
        n_real,
        row,
    )


def add_special_tokens(ragged: Ragged, first: int | None, last: int | None) -> Ragged:
    """Put the special tokens `first` before and `last` after every sequence, unless None."""
    head, tail = int(first is not None), int(last is not None)
    lengths = ragged.lengths + head + tail
    ids = np.empty(int(lengths.sum()), dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    ids[ranges(starts + head, ragged.lengths)] = ragged.ids
    if first is not None:
        ids[starts] = first
    if last is not None:
        ids[starts + lengths - 1] = last
    return Ragged(ids, lengths)


def interleave(left: Ragged, right: Ragged) -> tuple[Ragged, IntArray]:
    """Append sequence k of `right` to sequence k of `left`; also return the lengths of `left`."""
    lengths = left.lengths + right.lengths
    starts = np.cumsum(lengths) - lengths
    ids = np.empty(int(lengths.sum()), dtype=np.int64)
    ids[ranges(starts, left.lengths)] = left.ids
    ids[ranges(starts + left.lengths, right.lengths)] = right.ids
    return Ragged(ids, lengths), left.lengths


def reorder(ragged: Ragged, index: IntArray) -> Ragged:
    """Return the sequences with the given indices, in that order."""
    starts = np.cumsum(ragged.lengths) - ragged.lengths
    lengths = ragged.lengths[index]
    return Ragged(ragged.ids[ranges(starts[index], lengths)], lengths)


# The multiplier of a polynomial hash: 2^64 divided by the golden ratio, an odd number.
HASH_BASE = np.uint64(0x9E3779B97F4A7C15)


def hash_sequences(ids: IntArray, lengths: IntArray) -> IntArray:
    """Return a hash of every sequence; no sequence may be empty.

    >>> a, b, c = hash_sequences(np.array([7, 8, 8, 7, 7, 8]), np.array([2, 2, 2])).tolist()
    >>> a == c, a == b
    (True, False)
    """
    starts = np.cumsum(lengths) - lengths
    indices = np.arange(len(ids)) - np.repeat(starts, lengths)
    with np.errstate(over="ignore"):
        powers = np.cumprod(np.full(int(lengths.max(initial=1)), HASH_BASE))
        mixed = (ids.astype(np.uint64) + np.uint64(1)) * powers[indices]
        sums = np.add.reduceat(mixed, starts) if len(lengths) else mixed
        return sums.view(np.int64)
