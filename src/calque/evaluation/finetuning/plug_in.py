"""Plug-in fine-tuning of VECO: examples and their translations, each reading the other.

Luo et al. (2021), section 3.1: x is predicted from [H_x ; S_x], its translation y from [H_y ; S_y].
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
class TranslatedExample(Generic[T]):
    """An example and its translation, if there is one; the translation may be trained on too."""

    example: T
    other: T | None = None
    learns_other: bool = False


@dataclass(frozen=True, slots=True)
class PlugInTokens(TensorBatch):
    """Pairs of sequences, and which of their tokens have a translation."""

    pairs: PairedTokens
    is_paired: Bool[Tensor, "tokens"]

    @property
    def ids(self) -> Tensor:
        """The token ids of all pairs."""
        return self.pairs.tokens.ids


@dataclass(frozen=True, slots=True)
class PairRows:
    """Pairs of sequences by number; −1 on the right if there is no translation.

    `counts_left` and `counts_right` say whose labels count in the loss.
    """

    left: IntArray
    right: IntArray
    counts_left: BoolArray
    counts_right: BoolArray

    def sequences(self, rows: IntArray) -> IntArray:
        """Return the sequences of some pairs, all left ones first; −1 if there is none."""
        return np.concatenate([self.left[rows], self.right[rows]])

    def counted(self, rows: IntArray) -> BoolArray:
        """Return whether the labels of the same sequences count."""
        return np.concatenate([self.counts_left[rows], self.counts_right[rows]])

    def count_tokens(self, text: Ragged) -> IntArray:
        """Return the number of tokens of every pair."""
        return text.lengths[self.left] + np.where(self.right < 0, 0, text.lengths[self.right])

    def collate(
        self, text: Ragged, rows: IntArray, *, pad_id: int, shape: BatchShape | None
    ) -> tuple[PlugInTokens, PackedPairLayout]:
        """Return a batch of some pairs, and the positions of their tokens."""
        right = self.right[rows]
        has_translation = right >= 0
        lengths = np.zeros(len(rows), dtype=np.int64)
        lengths[has_translation] = text.lengths[right[has_translation]]
        others = Ragged(reorder(text, right[has_translation]).ids, lengths)
        own = reorder(text, self.left[rows])
        layout = build_packed_pair_layout(own, others, pad_id=pad_id, shape=shape)
        is_paired = np.zeros(len(layout.pairs.tokens.ids), dtype=np.bool_)
        owners = np.concatenate(
            [np.repeat(has_translation, own.lengths), np.repeat(has_translation, lengths)]
        )
        is_paired[layout.slots[owners]] = True
        return PlugInTokens(layout.pairs, torch.from_numpy(is_paired)), layout


def encode_plug_in(encoder: Encoder, tokens: PlugInTokens) -> Float[Tensor, "tokens both"]:
    """Return [H ; S] of all tokens, or [H ; H] for a text without a translation.

    Paper: a missing translation is not discussed; [H ; H] uses the same head without the
    cross-attention, as in plug-out.
    """
    alone, paired = encode_alone_and_paired(encoder, tokens.pairs)
    return torch.cat([alone, torch.where(tokens.is_paired[:, None], paired, alone)], dim=-1)


def check_plug_in(encoder: Encoder, *, supports_plug_in: bool) -> None:
    """Raise InputError if the task or the model does not support plug-in fine-tuning."""
    if not supports_plug_in:
        fix = "set plug=out, or choose pos, ner, xnli, pawsx or reviews"
        raise InputError("this task does not support plug=in", fix=fix)
    if not isinstance(encoder, Veco):
        fix = "use a model trained with cross_attention_lm (RUN/model), or set plug=out"
        raise InputError("plug=in needs a model with cross-attention", fix=fix)
