"""Sentence pairs laid out for an encoder that reads each sentence alone."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from calque.text.batching import BatchShape, Ragged, add_marks, pack
from calque.types import TokenBatch

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt
    from _typeshed import DataclassInstance

    from calque.objectives.base import Marks

    IntArray = npt.NDArray[np.int64]

RecordT = TypeVar("RecordT", bound="DataclassInstance")

FIELDS = ("ids", "lengths")
# An odd number without structure: equal sequences have equal hashes, others hardly ever.
HASH_BASE = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class BatchOfArrays:
    """A record of arrays that travels to a device as one."""

    def pin_memory(self) -> Self:
        """Move the arrays to page-locked memory, from which copies to a GPU do not wait."""
        return _map_arrays(self, lambda array: array.pin_memory())

    def to(self, device: torch.device | str) -> Self:
        """Copy the arrays to a device, without waiting for the copy."""
        return _map_arrays(self, lambda array: array.to(device, non_blocking=True))


def _map_arrays(record: RecordT, act: Callable[[Tensor], Tensor]) -> RecordT:
    """Do something to every array of a record and of the records in it."""
    changed: dict[str, Any] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, Tensor):
            changed[field.name] = act(value)
        elif is_dataclass(value) and not isinstance(value, type):
            changed[field.name] = _map_arrays(value, act)
    return replace(record, **changed)


def lay_apart(
    sides: tuple[Ragged, ...], marks: Marks, shape: BatchShape | None, *, own_marks: bool = True
) -> tuple[TokenBatch, IntArray]:
    """Pack both sentences of every pair as sequences of their own, sources before targets.

    Also give the sentence of every token: the number of its pair, for targets plus the number of
    pairs. Padding is of none, twice the number of pairs; so are marks unless they are owned. One
    side alone is packed likewise.
    """
    text = Ragged(*(np.concatenate([getattr(side, name) for side in sides]) for name in FIELDS))
    nobody = len(text.lengths)
    tokens = pack(add_marks(text, marks.first, marks.last), shape=shape, pad_id=marks.pad)
    numbers = np.arange(nobody)
    if own_marks:
        lengths = text.lengths + 2
        owned = Ragged(np.repeat(numbers, lengths), lengths)
    else:
        owned = Ragged(np.repeat(numbers, text.lengths), text.lengths)
        owned = add_marks(owned, nobody, nobody)
    return tokens, pack(owned, shape=shape, pad_id=nobody).ids.numpy()


def hash_sequences(ids: IntArray, lengths: IntArray) -> IntArray:
    """Give equal numbers to equal sequences; none of them may be empty.

    >>> a, b, c = hash_sequences(np.array([7, 8, 8, 7, 7, 8]), np.array([2, 2, 2])).tolist()
    >>> a == c, a == b
    (True, False)
    """
    starts = np.cumsum(lengths) - lengths
    places = np.arange(len(ids)) - np.repeat(starts, lengths)
    with np.errstate(over="ignore"):
        powers = np.cumprod(np.full(int(lengths.max(initial=1)), HASH_BASE))
        mixed = (ids.astype(np.uint64) + np.uint64(1)) * powers[places]
        sums = np.add.reduceat(mixed, starts) if len(lengths) else mixed
        return sums.view(np.int64)
