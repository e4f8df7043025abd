"""Plug-in fine-tuning of VECO: examples beside their translations, each reading the other.

Luo et al., 2021, section 3.1: x is predicted from [H_x ; S_x], its translation y from [H_y ; S_y].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
import torch

from calque.errors import InputError
from calque.models.veco import Veco
from calque.objectives.base import TensorBatch
from calque.objectives.cross_attention_lm import encode_alone_and_paired
from calque.tokens.layout import PackedPairLayout, PairedTokens, build_packed_pair_layout
from calque.tokens.ragged import BatchShape, Ragged, reorder

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Bool, Float
    from torch import Tensor

    from calque.models.encoder import Encoder

    IntArray = npt.NDArray[np.int64]
    BoolArray = npt.NDArray[np.bool_]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Paired(Generic[T]):
    """An example and its translation, if there is one, which may be learnt from as well."""

    example: T
    other: T | None = None
    learns_other: bool = False


@dataclass(frozen=True, slots=True)
class PluggedTokens(TensorBatch):
    """Pairs to read, and which of their tokens have a partner."""

    pairs: PairedTokens
    is_paired: Bool[Tensor, "tokens"]

    @property
    def ids(self) -> Tensor:
        """Give the tokens of all pairs."""
        return self.pairs.tokens.ids


@dataclass(frozen=True, slots=True)
class PairRows:
    """Pairs of sequences by their numbers; −1 on the right where there is no translation.

    `asks_left` and `asks_right` say whose labels count.
    """

    left: IntArray
    right: IntArray
    asks_left: BoolArray
    asks_right: BoolArray

    def sequences(self, rows: IntArray) -> IntArray:
        """List the sequences of some pairs, all left ones first; −1 where there is none."""
        return np.concatenate([self.left[rows], self.right[rows]])

    def asked(self, rows: IntArray) -> BoolArray:
        """Tell of the same sequences whether their labels count."""
        return np.concatenate([self.asks_left[rows], self.asks_right[rows]])

    def count_tokens(self, text: Ragged) -> IntArray:
        """Count the tokens of every pair."""
        return text.lengths[self.left] + np.where(self.right < 0, 0, text.lengths[self.right])

    def place(
        self, text: Ragged, rows: IntArray, *, pad_id: int, shape: BatchShape | None
    ) -> tuple[PluggedTokens, PackedPairLayout]:
        """Lay out some pairs, and say where their tokens are."""
        right = self.right[rows]
        is_there = right >= 0
        lengths = np.zeros(len(rows), dtype=np.int64)
        lengths[is_there] = text.lengths[right[is_there]]
        others = Ragged(reorder(text, right[is_there]).ids, lengths)
        own = reorder(text, self.left[rows])
        placed = build_packed_pair_layout(own, others, pad_id=pad_id, shape=shape)
        is_paired = np.zeros(len(placed.pairs.tokens.ids), dtype=np.bool_)
        owners = np.concatenate([np.repeat(is_there, own.lengths), np.repeat(is_there, lengths)])
        is_paired[placed.slots[owners]] = True
        return PluggedTokens(placed.pairs, torch.from_numpy(is_paired)), placed


def read_plugged(encoder: Encoder, tokens: PluggedTokens) -> Float[Tensor, "tokens both"]:
    """Give [H ; S] of all tokens, or [H ; H] of a text without a translation.

    So a missing translation is plug-out: the same head, and nothing that the cross-attention says.
    """
    alone, paired = encode_alone_and_paired(encoder, tokens.pairs)
    return torch.cat([alone, torch.where(tokens.is_paired[:, None], paired, alone)], dim=-1)


def check_plug(encoder: Encoder, *, can_plug: bool) -> None:
    """Refuse to plug in what is not there."""
    if not can_plug:
        fix = "set plug=out, or choose pos, ner, xnli, pawsx or reviews"
        raise InputError("plug=in: this task has no plug-in fine-tuning", fix=fix)
    if not isinstance(encoder, Veco):
        fix = "give a model trained with cross_attention_lm (RUN/model), or set plug=out"
        raise InputError("plug=in: this model has no cross-attention", fix=fix)
