"""Masked language modelling with and without a pair to read (CA-MLM of VECO, Luo et al., 2021).

The paper's objective on bitext is the sum of this and of TLM: a recipe lists both. On plain text, a
sentence is paired with the one before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from pydantic import Field

from calque.errors import InputError
from calque.models.veco import Veco
from calque.objectives.base import BatchOfArrays, Marks, Objective, ObjectiveSettings
from calque.objectives.masked_lm import IGNORED, mask_batch, masked_lm_losses, masking_rules
from calque.tokens.layout import PairedTokens, pack_pairs
from calque.tokens.masking import MaskingRules
from calque.tokens.ragged import BatchShape, Ragged, add_marks
from calque.types import LossTerms, TokenBatch

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from calque.models.encoder import Encoder
    from calque.objectives.base import Collate


TERMS = ("left", "right", "left_with_right", "right_with_left")


class CrossAttentionLMSettings(ObjectiveSettings):
    """CA-MLM as the recipe describes it."""

    kind: Literal["cross_attention_lm"] = "cross_attention_lm"
    # Paper: 0.25 of bitext, 0.15 of plain text.
    probability: float = Field(0.25, gt=0, lt=1)
    # "translations": bitext; "neighbors": a line of plain text and the line before it.
    pairs: Literal["translations", "neighbors"] = "translations"


def cross_attention_lm_terms(
    losses: Float[Tensor, "2 masked"],
    labels: Int[Tensor, "masked"],
    is_right: Bool[Tensor, "masked"],
) -> tuple[Float[Tensor, ""], Float[Tensor, "4"]]:
    """Sum −log P(x|x̂), −log P(y|ŷ), −log P(x|ŷ,x̂), −log P(y|x̂,ŷ) over a batch, per hidden token.

    The rows of `losses` are those of a sentence read alone, and with its pair. Also give the four
    terms, each as a mean over its own tokens; labels of −100 count for nothing.

    >>> labels, is_right = torch.tensor([7, 8, -100]), torch.tensor([False, True, False])
    >>> losses = torch.tensor([[4.0, 3.0, 0.0], [2.0, 1.0, 0.0]])
    >>> loss, terms = cross_attention_lm_terms(losses, labels, is_right)
    >>> loss.item(), terms.tolist()
    (5.0, [4.0, 3.0, 2.0, 1.0])
    """
    is_real = labels != IGNORED
    sides = torch.stack([is_real & ~is_right, is_real & is_right]).to(losses.dtype)
    sums = losses @ sides.T
    return sums.sum() / is_real.sum(), (sums / sides.sum(dim=1).clamp(min=1)).flatten()


class CrossAttentionLM(Objective):
    """Guess hidden tokens twice: from their own sentence alone, and reading the paired one, too.

    Both sentences are corrupted. Through what is read of the pair nothing is learnt.
    """

    n_sides: ClassVar[int] = 2

    @property
    def pairs_neighbors(self) -> bool:
        """Whether pairs are made of plain text."""
        return bool(self.settings.pairs == "neighbors")

    def n_marks(self, marks: Marks) -> int:
        """Count `<s>` and `</s>` of both sentences."""
        return 4

    def make_collate(self, marks: Marks, shape: BatchShape | None) -> Collate:
        """Batches of sentence pairs, each sentence a sequence of its own."""
        return CrossCollator(marks, masking_rules(marks, self.settings.probability), shape)

    def start(self, encoder: Encoder, languages: Sequence[str]) -> None:
        """Refuse an encoder that has nothing to read a pair with."""
        if not isinstance(encoder, Veco):
            raise InputError(
                "cross_attention_lm: this encoder has no cross-attention",
                fix="set model.cross_attention: self",
            )

    def forward(self, encoder: Encoder, batch: CrossBatch) -> LossTerms:
        """Encode alone and reading the pair, and predict hidden tokens from the one and the other.

        The head sees hidden places alone, of both readings at once.
        """
        alone, paired = read_both_ways(encoder, batch.pairs)
        states = torch.cat([alone[batch.masked], paired[batch.masked]])
        features = encoder.predict_features(states)
        losses = masked_lm_losses(features, *encoder.output_layer(), batch.labels.repeat(2))
        is_right = batch.pairs.is_right[batch.masked]
        loss, terms = cross_attention_lm_terms(losses.view(2, -1), batch.labels, is_right)
        return LossTerms(loss, dict(zip(TERMS, terms.unbind(), strict=True)))


def read_both_ways(
    encoder: Encoder, pairs: PairedTokens
) -> tuple[Float[Tensor, "tokens hidden"], Float[Tensor, "tokens hidden"]]:
    """Give H, of every sentence alone, and S, for which it reads the H of its partner."""
    assert isinstance(encoder, Veco)
    (alone,) = encoder(pairs.tokens)
    read = alone.detach()[pairs.order]
    return alone, encoder.cross(pairs.tokens, read, pairs.read)


@dataclass(frozen=True, slots=True)
class CrossBatch(BatchOfArrays):
    """Corrupted pairs, the places of their hidden tokens and what stood there."""

    pairs: PairedTokens
    masked: Int[Tensor, "masked"]
    labels: Int[Tensor, "masked"]

    @property
    def tokens(self) -> TokenBatch:
        """Give the sentences of all pairs."""
        return self.pairs.tokens


@dataclass(frozen=True, slots=True)
class CrossCollator:
    """Builds batches: marks around each sentence, pairs side by side, masking."""

    marks: Marks
    rules: MaskingRules
    shape: BatchShape | None

    def __call__(self, sides: tuple[Ragged, ...], generator: torch.Generator) -> CrossBatch:
        """Build one batch."""
        left, right = (add_marks(side, self.marks.first, self.marks.last) for side in sides[:2])
        pairs = pack_pairs(left, right, shape=self.shape, pad_id=self.marks.pad)
        hidden = mask_batch(pairs.tokens, self.rules, generator, self.shape)
        return CrossBatch(replace(pairs, tokens=hidden.tokens), hidden.masked, hidden.labels)
