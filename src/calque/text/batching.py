"""From token sequences to batches: token budgets, length buckets, packing without padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from calque.types import InputError, TokenBatch

if TYPE_CHECKING:
    import numpy.typing as npt

    IntArray = npt.NDArray[np.int64]


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
    """A fixed size that batches are filled up to, so that a compiled step sees one shape."""

    tokens: int
    sequences: int
    longest: int

    @staticmethod
    def fit(tokens: int, mean_length: float, longest: int) -> BatchShape:
        """Choose how many sequences a batch can hold, from their mean length.

        A tenth more than expected, and enough to cover a batch of nothing but padding.
        """
        if tokens < longest:
            raise InputError(
                f"a batch of {tokens} tokens cannot hold a sequence of {longest}",
                fix="raise batch_tokens or lower max_length",
            )
        return BatchShape(tokens, int(1.1 * tokens / mean_length) + 8, longest)


def ranges(starts: IntArray, lengths: IntArray) -> IntArray:
    """Concatenate `start, start + 1, …` of every (start, length).

    >>> ranges(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(starts - (ends - lengths), lengths)


def fill_batches(
    lengths: IntArray, max_tokens: int, max_sequences: int | None = None
) -> Iterator[IntArray]:
    """Cut a sequence order into batches that stay within a budget of real tokens.

    >>> [batch.tolist() for batch in fill_batches(np.array([3, 3, 2, 4]), max_tokens=6)]
    [[0, 1], [2, 3]]
    """
    ends = np.cumsum(lengths)
    start, base = 0, 0
    while start < len(lengths):
        stop = int(np.searchsorted(ends, base + max_tokens, side="right"))
        stop = min(max(stop, start + 1), start + (max_sequences or len(lengths)))
        yield np.arange(start, stop)
        start, base = stop, int(ends[stop - 1])


def bucket_batches(lengths: IntArray, max_tokens: int) -> list[IntArray]:
    """Batch sequences of similar length: longest first, within a budget of padded tokens.

    Longest first, so that a batch too large for memory fails at once rather than at the end.
    """
    order = np.argsort(-lengths, kind="stable")
    batches, start = [], 0
    while start < len(order):
        n_fit = max(1, max_tokens // max(1, int(lengths[order[start]])))
        batches.append(order[start : start + n_fit])
        start += n_fit
    return batches


def pack(
    ragged: Ragged, *, positions: IntArray | None = None, shape: BatchShape | None = None, pad_id: int
) -> TokenBatch:
    """Lay sequences end to end; with a shape, fill the rest with sequences of padding.

    Every token lies in some sequence: attention kernels leave the others unwritten.
    """
    if positions is None:
        positions = ranges(np.zeros_like(ragged.lengths), ragged.lengths)
    ids, lengths, n_real = ragged.ids, ragged.lengths, len(ragged.ids)
    longest = int(lengths.max(initial=1))
    if shape is not None:
        if len(ids) > shape.tokens or len(lengths) > shape.sequences:
            raise ValueError(f"{len(ids)} tokens in {len(lengths)} sequences exceed {shape}")
        padding = _padding_lengths(shape.tokens - len(ids), shape.longest)
        ids = np.concatenate([ids, np.full(int(padding.sum()), pad_id)])
        positions = np.concatenate([positions, ranges(np.zeros_like(padding), padding)])
        n_empty = capacity(shape) - len(lengths) - len(padding)
        lengths = np.concatenate([lengths, padding, np.zeros(n_empty, dtype=np.int64)])
        longest = shape.longest
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return TokenBatch(
        torch.from_numpy(ids),
        torch.from_numpy(positions),
        torch.from_numpy(offsets),
        longest,
        n_real,
    )


def capacity(shape: BatchShape) -> int:
    """Count the sequence slots of a fixed shape: real ones, then room for padding."""
    return shape.sequences + -(-shape.tokens // shape.longest)


def add_marks(ragged: Ragged, first: int | None, last: int | None) -> Ragged:
    """Put `<s>` before and `</s>` after every sequence."""
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
    """Join sequence k of the left with sequence k of the right; also return the left lengths."""
    lengths = left.lengths + right.lengths
    starts = np.cumsum(lengths) - lengths
    ids = np.empty(int(lengths.sum()), dtype=np.int64)
    ids[ranges(starts, left.lengths)] = left.ids
    ids[ranges(starts + left.lengths, right.lengths)] = right.ids
    return Ragged(ids, lengths), left.lengths


def reorder(ragged: Ragged, index: IntArray) -> Ragged:
    """Put sequences into another order."""
    starts = np.cumsum(ragged.lengths) - ragged.lengths
    lengths = ragged.lengths[index]
    return Ragged(ragged.ids[ranges(starts[index], lengths)], lengths)


def _padding_lengths(n_tokens: int, longest: int) -> IntArray:
    """Cut a stretch of padding into sequences of at most `longest` tokens."""
    full, rest = divmod(n_tokens, longest)
    return np.array([longest] * full + [rest] * (rest > 0), dtype=np.int64)
