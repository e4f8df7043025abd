"""Batches of sentence pairs whose sentences are encoded apart and averaged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from calque.objectives.apart import BatchOfArrays, hash_sequences, lay_apart

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from calque.objectives.base import Marks
    from calque.text.batching import BatchShape, Ragged
    from calque.types import TokenBatch


@dataclass(frozen=True, slots=True)
class SentencePairBatch(BatchOfArrays):
    """Sentence pairs, each sentence a sequence of its own.

    `owners` tell the sentence of every token: a source by the number of its pair, a target by
    that plus the number of pairs; marks and padding are of none, twice the number of pairs. A
    pair of weight 0 only fills the shape. Pairs with equal `src_keys` have equal sources.
    """

    tokens: TokenBatch
    owners: Int[Tensor, "tokens"]
    weights: Float[Tensor, "pairs"]
    src_keys: Int[Tensor, "pairs"]
    tgt_keys: Int[Tensor, "pairs"]

    def pool(
        self, states: Float[Tensor, "tokens hidden"]
    ) -> tuple[Float[Tensor, "pairs hidden"], Float[Tensor, "pairs hidden"]]:
        """Average the tokens of every sentence, marks excepted; one without tokens is zero."""
        n_pairs = len(self.weights)
        wide = states.to(torch.promote_types(states.dtype, torch.float32))
        sums = wide.new_zeros(2 * n_pairs + 1, wide.shape[1]).index_add(0, self.owners, wide)
        ones = torch.ones_like(self.owners, dtype=wide.dtype)
        counts = wide.new_zeros(2 * n_pairs + 1).index_add(0, self.owners, ones)
        means = sums / counts.clamp(min=1)[:, None]
        return means[:n_pairs], means[n_pairs : 2 * n_pairs]


@dataclass(frozen=True, slots=True)
class SentencePairCollator:
    """Builds batches; with a shape, of always the same number of pairs, some of weight 0."""

    marks: Marks
    shape: BatchShape | None

    def __call__(self, arrays: tuple[Ragged, ...], generator: torch.Generator) -> SentencePairBatch:
        """Build one batch of sources and targets."""
        src, tgt = arrays[:2]
        tokens, owners = lay_apart((src, tgt), self.marks, self.shape, own_marks=False)
        n_pairs = len(src.lengths)
        room = n_pairs if self.shape is None else max(n_pairs, self.shape.sequences // 2)
        shifted = owners + (room - n_pairs) * (owners >= n_pairs)  # targets begin after the room
        owners = np.where(owners == 2 * n_pairs, 2 * room, shifted)
        fill = (0, room - n_pairs)
        weights = np.pad(np.ones(n_pairs, dtype=np.float32), fill)
        keys = (np.pad(hash_sequences(side.ids, side.lengths), fill) for side in (src, tgt))
        arrays_of_pairs = (torch.from_numpy(column) for column in (weights, *keys))
        return SentencePairBatch(tokens, torch.from_numpy(owners), *arrays_of_pairs)
