"""Masked language modeling on sentences (MLM) and on translation pairs (TLM).

Devlin et al., 2019; Conneau and Lample, 2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from pydantic import Field
from torch.nn import functional as F

from calque.models.heads import NO_LABEL
from calque.objectives.base import Objective, ObjectiveSettings
from calque.tokens.layout import add_pair_special_tokens, join_sides, swap_sides
from calque.tokens.masking import MaskingRules, find_maskable, mask_tokens
from calque.tokens.ragged import BatchShape, Ragged, add_special_tokens, pack
from calque.tokens.tokenizer import SpecialTokens
from calque.types import LossTerms, MaskedBatch, TokenBatch

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from calque.models.encoder import Encoder
    from calque.objectives.base import Collate


class MaskedLMSettings(ObjectiveSettings):
    """Settings of MLM in a recipe."""

    kind: Literal["masked_lm"] = "masked_lm"
    probability: float = Field(0.15, gt=0, lt=1)


class TranslationLMSettings(ObjectiveSettings):
    """Settings of TLM in a recipe."""

    kind: Literal["translation_lm"] = "translation_lm"
    probability: float = Field(0.15, gt=0, lt=1)
    # "reset": positions of the second sentence start at 0 again (Conneau and Lample, 2019);
    # "continue": the pair is one long sequence (InfoXLM, XLM-Align).
    positions: Literal["reset", "continue"] = "reset"


def masked_lm_loss(
    features: Float[Tensor, "masked hidden"],
    weight: Float[Tensor, "vocabulary hidden"],
    bias: Float[Tensor, "vocabulary"] | None,
    labels: Int[Tensor, "masked"],
    reduction: Literal["mean", "none"] = "mean",
) -> Float[Tensor, "*masked"]:
    """Return the mean cross-entropy of the masked tokens, or that of each token.

    Labels of `NO_LABEL` are ignored.
    """
    logits = vocabulary_logits(features, weight, bias)
    return F.cross_entropy(logits, labels, ignore_index=NO_LABEL, reduction=reduction)


def vocabulary_logits(
    features: Float[Tensor, "masked hidden"],
    weight: Float[Tensor, "vocabulary hidden"],
    bias: Float[Tensor, "vocabulary"] | None,
    padding: float = -torch.inf,
) -> Float[Tensor, "masked _"]:
    """Return logits in single precision at least.

    On a GPU an odd vocabulary size (XLM-R has 250,002 entries) is padded to a multiple of 64 with
    entries whose logit is `padding`: matrix units are far slower at odd sizes.
    """
    n_missing = -len(weight) % 64
    if weight.is_cuda and n_missing:
        bias = weight.new_zeros(len(weight)) if bias is None else bias
        weight = F.pad(weight, (0, 0, 0, n_missing))
        bias = F.pad(bias, (0, n_missing), value=padding)
    logits = F.linear(features, weight, bias)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


class MaskedLM(Objective):
    """Predict masked tokens from the rest of their sentence."""

    n_sides: ClassVar[int] = 1
    n_special_tokens: ClassVar[int] = 2  # <s> and </s>

    def build_collator(self, special_tokens: SpecialTokens, shape: BatchShape | None) -> Collate:
        """Return a collator of single sentences."""
        rules = masking_rules(special_tokens, self.settings.probability)
        return SentenceCollator(special_tokens, rules, shape)

    def forward(self, encoder: Encoder, batch: MaskedBatch) -> LossTerms:
        """Return the loss; the language-modeling head runs on masked positions only."""
        (hidden_states,) = encoder(batch.tokens)
        features = encoder.lm_features(hidden_states[batch.masked])
        loss = masked_lm_loss(features, *encoder.output_layer(), batch.labels)
        return LossTerms(loss, {})


class TranslationLM(MaskedLM):
    """Predict masked tokens from their sentence and its translation, side by side.

    The order of the two sentences is random.
    """

    n_sides: ClassVar[int] = 2

    def count_special_tokens(self, special_tokens: SpecialTokens) -> int:
        """Return the number of special tokens around and between the two sentences."""
        return 2 + special_tokens.n_between

    def start(self, encoder: Encoder, languages: Sequence[str]) -> None:
        """Store with the model how positions are counted in a pair."""
        store_positions(encoder, self.settings.positions)

    def build_collator(self, special_tokens: SpecialTokens, shape: BatchShape | None) -> Collate:
        """Return a collator of sentence pairs."""
        rules = masking_rules(special_tokens, self.settings.probability)
        return PairCollator(special_tokens, rules, shape, self.settings.positions == "reset")


def store_positions(encoder: Encoder, positions: str) -> None:
    """Store in the model's settings how positions are counted in a pair, for later inference."""
    stored = encoder.settings.get("alignment") or {}
    encoder.config.calque = encoder.settings | {"alignment": stored | {"positions": positions}}


@dataclass(frozen=True, slots=True)
class SentenceCollator:
    """Builds MLM batches: special tokens, packing, masking."""

    special_tokens: SpecialTokens
    rules: MaskingRules
    shape: BatchShape | None

    def __call__(self, sides: tuple[Ragged, ...], generator: torch.Generator) -> MaskedBatch:
        """Return one batch."""
        special = self.special_tokens
        text = add_special_tokens(sides[0], special.cls_id, special.sep_id)
        tokens = pack(text, shape=self.shape, pad_id=special.pad_id)
        return mask_batch(tokens, self.rules, generator, self.shape)


@dataclass(frozen=True, slots=True)
class PairCollator:
    """Builds TLM batches `<s> a </s></s> b </s>`, where a is randomly the source or the target."""

    special_tokens: SpecialTokens
    rules: MaskingRules
    shape: BatchShape | None
    reset: bool

    def __call__(self, sides: tuple[Ragged, ...], generator: torch.Generator) -> MaskedBatch:
        """Return one batch."""
        left, right = swap_sides(sides[0], sides[1], generator)
        left, right = add_pair_special_tokens(left, right, self.special_tokens)
        pairs, positions = join_sides(left, right, reset=self.reset)
        pad_id = self.special_tokens.pad_id
        tokens = pack(pairs, positions=positions, shape=self.shape, pad_id=pad_id)
        return mask_batch(tokens, self.rules, generator, self.shape)


def masking_rules(special_tokens: SpecialTokens, probability: float) -> MaskingRules:
    """Return rules that mask ordinary tokens with a probability."""
    return MaskingRules(
        special_tokens.mask_id, special_tokens.vocab_size, special_tokens.all_ids, probability
    )


def mask_batch(
    tokens: TokenBatch,
    rules: MaskingRules,
    generator: torch.Generator,
    shape: BatchShape | None,
) -> MaskedBatch:
    """Return the batch with masked tokens and their labels.

    With a fixed shape, the list of masked positions is padded to a fixed length.
    """
    maskable = find_maskable(tokens.ids, rules.special_ids)
    ids, masked, labels = mask_tokens(tokens.ids, maskable, rules, generator)
    if shape is not None:
        n_fill = max(0, round(rules.probability * shape.budget) + 1 - len(masked))
        masked = F.pad(masked, (0, n_fill))
        labels = F.pad(labels, (0, n_fill), value=NO_LABEL)
    return MaskedBatch(replace(tokens, ids=ids), masked, labels)
