"""Batches of what an encoder reads beside what a decoder writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from calque.models.seq2seq import Seq2Seq
from calque.objectives.apart import BatchOfArrays
from calque.objectives.masked_lm import IGNORED
from calque.text.batching import Ragged, add_marks, interleave, pack, ranges
from calque.types import InputError, TokenBatch

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Int
    from torch import Tensor

    from calque.models.encoder import Encoder
    from calque.objectives.base import Marks
    from calque.text.batching import BatchShape

    IntArray = npt.NDArray[np.int64]

# Sizes of a fixed shape are odd sixteenths of the budget: halves, and whole, have room to vary.
STEPS = 16


@dataclass(frozen=True, slots=True)
class Seq2SeqBatch(BatchOfArrays):
    """Sequence k of `tgt` is written from sequence k of `src`; labels are its next tokens.

    A label of −100 marks what only fills the shape.
    """

    src: TokenBatch
    tgt: TokenBatch
    labels: Int[Tensor, "tgt_tokens"]

    @property
    def tokens(self) -> TokenBatch:
        """Give the source, with the tokens of both sides counted."""
        return replace(self.src, n_real=self.src.n_real + self.tgt.n_real)


class Beginnings:
    """The token that the decoder begins with, by the number of the language to write.

    A collator has it before the languages are known, which `meet` tells.
    """

    def __init__(self, marks: Marks) -> None:
        self.default = marks.first
        self.ids: IntArray = np.zeros(0, dtype=np.int64)

    def meet(self, encoder: Encoder, languages: Sequence[str]) -> None:
        """Learn the tokens of languages, in the order of their numbers."""
        model = check_decoder(encoder)
        different = sorted({*languages, *model.taught})
        if not model.targets and len(different) > 1:
            raise InputError(
                f"{', '.join(different)}: the decoder cannot tell which language to write",
                fix=f"set model.decoder.languages=[{', '.join(different)}]",
            )
        self.default = model.default_start
        self.ids = np.array([model.start_token(name) for name in languages], dtype=np.int64)

    def find(self, numbers: IntArray) -> IntArray:
        """Give the token for each example."""
        return self.ids[numbers] if len(self.ids) else np.full(len(numbers), self.default)


def check_decoder(encoder: Encoder) -> Seq2Seq:
    """Refuse an encoder that cannot write."""
    if not isinstance(encoder, Seq2Seq):
        raise InputError(
            "this objective writes text, and the model has no decoder",
            fix="add model.decoder to the recipe, if only {}",
        )
    return encoder


def lay_seq2seq(
    src: Ragged,
    tgt: Ragged,
    first: IntArray,
    marks: Marks,
    shape: BatchShape | None,
    least: tuple[int, int],
) -> Seq2SeqBatch:
    """Lay out sources, with marks, and targets, each after the token it begins with.

    A shape is filled up: to at least so many sixteenths of the budget on either side.
    """
    marked = add_marks(src, marks.first, marks.last)
    ones = np.ones(len(first), dtype=np.int64)
    begun, _ = interleave(Ragged(first, ones), tgt)
    labels = add_marks(tgt, None, marks.last)
    if shape is None:
        read, written = (pack(side, pad_id=marks.pad) for side in (marked, begun))
        return Seq2SeqBatch(read, written, torch.from_numpy(labels.ids))
    n_tail = -(-max(least) * shape.budget // (STEPS * shape.row)) + 1
    read = _fill_up(marked, shape, least[0], n_tail, marks.pad)
    written = _fill_up(begun, shape, least[1], n_tail, marks.pad)
    n_fill = len(written.ids) - len(labels.ids)
    return Seq2SeqBatch(
        read, written, torch.from_numpy(np.pad(labels.ids, (0, n_fill), constant_values=IGNORED))
    )


def _fill_up(ragged: Ragged, shape: BatchShape, least: int, n_tail: int, pad_id: int) -> TokenBatch:
    """Fill a batch up to a fixed size with padding, cut into sequences that both sides have."""
    step, size = 2 * shape.budget // STEPS, least * shape.budget // STEPS
    needed = len(ragged.ids) + n_tail
    size += max(0, -(-(needed - size) // step)) * step
    n_empty = max(0, shape.sequences - len(ragged.lengths))
    tail = np.full(n_tail, (size - len(ragged.ids)) // n_tail, dtype=np.int64)
    tail[: (size - len(ragged.ids)) % n_tail] += 1
    lengths = np.concatenate([ragged.lengths, np.zeros(n_empty, dtype=np.int64), tail])
    ids = np.pad(ragged.ids, (0, size - len(ragged.ids)), constant_values=pad_id)
    positions = ranges(np.zeros_like(lengths), lengths)
    positions[len(ragged.ids) :] = 0
    packed = pack(Ragged(ids, lengths), positions=positions, pad_id=pad_id)
    return replace(packed, longest=max(shape.row, int(tail.max())), n_real=len(ragged.ids))
