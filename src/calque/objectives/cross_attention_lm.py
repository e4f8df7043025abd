"""Cross-attention masked language modeling: CA-MLM of VECO (Luo et al., 2021).

The paper's objective on bitext is the sum of this objective and TLM: a recipe lists both. On plain
text, a sentence is paired with the sentence before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from pydantic import Field

from calque.errors import InputError
from calque.models.heads import NO_LABEL
from calque.models.veco import Veco
from calque.objectives.base import Objective, ObjectiveSettings, TensorBatch
from calque.objectives.masked_lm import mask_batch, masked_lm_loss, masking_rules
from calque.tokens.layout import PairedTokens, pack_pairs
from calque.tokens.masking import MaskingRules
from calque.tokens.ragged import BatchShape, Ragged, add_special_tokens
from calque.tokens.tokenizer import SpecialTokens
from calque.types import LossTerms, TokenBatch

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from calque.models.encoder import Encoder
    from calque.objectives.base import Collate


TERMS = ("left", "right", "left_with_right", "right_with_left")


class CrossAttentionLMSettings(ObjectiveSettings):
    """Settings of CA-MLM in a recipe."""

    kind: Literal["cross_attention_lm"] = "cross_attention_lm"
    # Paper: 0.25 on bitext, 0.15 on plain text.
    probability: float = Field(0.25, gt=0, lt=1)
    # "translations": bitext; "neighbors": a line of plain text and the line before it.
    pairs: Literal["translations", "neighbors"] = "translations"


def cross_attention_lm_terms(
    losses: Float[Tensor, "2 masked"],
    labels: Int[Tensor, "masked"],
    is_right: Bool[Tensor, "masked"],
) -> tuple[Float[Tensor, ""], Float[Tensor, "4"]]:
    """Return −log P(x|x̂) − log P(y|ŷ) − log P(x|ŷ,x̂) − log P(y|x̂,ŷ) per masked token (VECO, Eq. 1).

    The rows of `losses` are those of a sentence encoded alone, and with its pair. The four terms
    are returned too, each as a mean over its own tokens. Labels of `NO_LABEL` are ignored.

    >>> labels, is_right = torch.tensor([7, 8, -100]), torch.tensor([False, True, False])
    >>> losses = torch.tensor([[4.0, 3.0, 0.0], [2.0, 1.0, 0.0]])
    >>> loss, terms = cross_attention_lm_terms(losses, labels, is_right)
    >>> loss.item(), terms.tolist()
    (5.0, [4.0, 3.0, 2.0, 1.0])
    """
    is_real = labels != NO_LABEL
    sides = torch.stack([is_real & ~is_right, is_real & is_right]).to(losses.dtype)
    sums = losses @ sides.T
    return sums.sum() / is_real.sum(), (sums / sides.sum(dim=1).clamp(min=1)).flatten()


class CrossAttentionLM(Objective):
    """Predict masked tokens twice: from their own sentence, and with cross-attention to its pair.

    Both sentences are masked. No gradient flows through the states that cross-attention reads.
    """

    n_sides: ClassVar[int] = 2
    n_special_tokens: ClassVar[int] = 4  # <s> and </s> of both sentences

    @property
    def pairs_neighbors(self) -> bool:
        """Whether pairs are neighboring lines of plain text."""
        return bool(self.settings.pairs == "neighbors")

    def build_collator(self, special_tokens: SpecialTokens, shape: BatchShape | None) -> Collate:
        """Return a collator of sentence pairs, each sentence a sequence of its own."""
        rules = masking_rules(special_tokens, self.settings.probability)
        return CrossAttentionCollator(special_tokens, rules, shape)

    def start(self, encoder: Encoder, languages: Sequence[str]) -> None:
        """Raise an error if the encoder has no cross-attention."""
        if not isinstance(encoder, Veco):
            raise InputError(
                "cross_attention_lm needs an encoder with cross-attention",
                fix="set model.cross_attention: self",
            )

    def forward(self, encoder: Encoder, batch: CrossAttentionBatch) -> LossTerms:
        """Return the loss; the language-modeling head runs on the masked positions of H and S."""
        alone, paired = encode_alone_and_paired(encoder, batch.pairs)
        hidden_states = torch.cat([alone[batch.masked], paired[batch.masked]])
        features = encoder.lm_features(hidden_states)
        losses = masked_lm_loss(
            features, *encoder.output_layer(), batch.labels.repeat(2), reduction="none"
        )
        is_right = batch.pairs.is_right[batch.masked]
        loss, terms = cross_attention_lm_terms(losses.view(2, -1), batch.labels, is_right)
        return LossTerms(loss, dict(zip(TERMS, terms.unbind(), strict=True)))


def encode_alone_and_paired(
    encoder: Encoder, pairs: PairedTokens
) -> tuple[Float[Tensor, "tokens hidden"], Float[Tensor, "tokens hidden"]]:
    """Return H, of every sentence alone, and S, for which it reads the H of its partner."""
    assert isinstance(encoder, Veco)
    (alone,) = encoder(pairs.tokens)
    read = alone.detach()[pairs.order]
    return alone, encoder.cross(pairs.tokens, read, pairs.read)


@dataclass(frozen=True, slots=True)
class CrossAttentionBatch(TensorBatch):
    """Masked pairs, the positions of their masked tokens and the original tokens."""

    pairs: PairedTokens
    masked: Int[Tensor, "masked"]
    labels: Int[Tensor, "masked"]

    @property
    def tokens(self) -> TokenBatch:
        """The sentences of all pairs."""
        return self.pairs.tokens


@dataclass(frozen=True, slots=True)
class CrossAttentionCollator:
    """Builds batches: special tokens around each sentence, pairs side by side, masking."""

    special_tokens: SpecialTokens
    rules: MaskingRules
    shape: BatchShape | None

    def __call__(
        self, sides: tuple[Ragged, ...], generator: torch.Generator
    ) -> CrossAttentionBatch:
        """Return one batch."""
        special = self.special_tokens
        left, right = (
            add_special_tokens(side, special.cls_id, special.sep_id) for side in sides[:2]
        )
        pairs = pack_pairs(left, right, shape=self.shape, pad_id=special.pad_id)
        masked = mask_batch(pairs.tokens, self.rules, generator, self.shape)
        pairs = replace(pairs, tokens=masked.tokens)
        return CrossAttentionBatch(pairs, masked.masked, masked.labels)
