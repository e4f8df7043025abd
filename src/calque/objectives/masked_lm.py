"""Masked language modelling on sentences (MLM) and on translation pairs (TLM).

Devlin et al., 2019; Conneau and Lample, 2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch.nn import functional as F

from calque.objectives.base import Marks, Objective, ObjectiveSettings
from calque.tokens.masking import MaskingRules, find_maskable, mask_tokens
from calque.tokens.ragged import BatchShape, Ragged, add_marks, interleave, pack, ranges, reorder
from calque.types import LossTerms, MaskedBatch, TokenBatch

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Float, Int
    from torch import Tensor

    from calque.models.encoder import Encoder
    from calque.objectives.base import Collate

    IntArray = npt.NDArray[np.int64]

IGNORED = -100


class MaskedLMSettings(ObjectiveSettings):
    """MLM as the recipe describes it."""

    kind: Literal["masked_lm"] = "masked_lm"
    probability: float = Field(0.15, gt=0, lt=1)


class TranslationLMSettings(ObjectiveSettings):
    """TLM as the recipe describes it."""

    kind: Literal["translation_lm"] = "translation_lm"
    probability: float = Field(0.15, gt=0, lt=1)
    # "reset": the second sentence counts from 0 again (Conneau and Lample, 2019), so that words
    # at like places meet; "continue": one long sequence (InfoXLM, XLM-Align).
    positions: Literal["reset", "continue"] = "reset"


def masked_lm_loss(
    features: Float[Tensor, "masked hidden"],
    weight: Float[Tensor, "vocabulary hidden"],
    bias: Float[Tensor, "vocabulary"] | None,
    labels: Int[Tensor, "masked"],
) -> Float[Tensor, ""]:
    """Mean cross-entropy of the hidden tokens; labels of −100 do not count."""
    logits = predict_tokens(features, weight, bias)
    return F.cross_entropy(logits, labels, ignore_index=IGNORED)


def masked_lm_losses(
    features: Float[Tensor, "masked hidden"],
    weight: Float[Tensor, "vocabulary hidden"],
    bias: Float[Tensor, "vocabulary"] | None,
    labels: Int[Tensor, "masked"],
) -> Float[Tensor, "masked"]:
    """Cross-entropy of every hidden token; labels of −100 have none."""
    logits = predict_tokens(features, weight, bias)
    return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")


def predict_tokens(
    features: Float[Tensor, "masked hidden"],
    weight: Float[Tensor, "vocabulary hidden"],
    bias: Float[Tensor, "vocabulary"] | None,
) -> Float[Tensor, "masked _"]:
    """Give logits in single precision at least.

    On a GPU an odd vocabulary (XLM-R has 250,002 entries) is widened by entries that cannot
    win: matrix units are far slower at sizes that are not multiples of a few bytes.
    """
    n_missing = -len(weight) % 64
    if weight.is_cuda and n_missing and bias is not None:
        weight = F.pad(weight, (0, 0, 0, n_missing))
        bias = F.pad(bias, (0, n_missing), value=-torch.inf)
    logits = F.linear(features, weight, bias)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def note_positions(encoder: Encoder, positions: str) -> None:
    """Let the model say how positions count in a pair: whoever reads one must count alike."""
    carried = encoder.settings.get("alignment") or {}
    encoder.config.calque = encoder.settings | {"alignment": carried | {"positions": positions}}


class MaskedLM(Objective):
    """Guess hidden tokens from the rest of their sentence."""

    n_sides: ClassVar[int] = 1

    def n_marks(self, marks: Marks) -> int:
        """Count `<s>` and `</s>`."""
        return 2

    def make_collate(self, marks: Marks, shape: BatchShape | None) -> Collate:
        """Batches of single sentences."""
        return SentenceCollator(marks, masking_rules(marks, self.settings.probability), shape)

    def forward(self, encoder: Encoder, batch: MaskedBatch) -> LossTerms:
        """Encode, keep the hidden places alone, and predict their tokens."""
        (states,) = encoder(batch.tokens)
        features = encoder.predict_features(states[batch.masked])
        loss = masked_lm_loss(features, *encoder.output_layer(), batch.labels)
        return LossTerms(loss, {})


class TranslationLM(MaskedLM):
    """Guess hidden tokens from their sentence and its translation, set side by side.

    Each pair comes in either order, by a coin.
    """

    n_sides: ClassVar[int] = 2

    def n_marks(self, marks: Marks) -> int:
        """Count the marks around and between the two sentences."""
        return 2 + marks.between

    def start(self, encoder: Encoder, languages: Sequence[str]) -> None:
        """Let the model say how positions count in a pair."""
        note_positions(encoder, self.settings.positions)

    def make_collate(self, marks: Marks, shape: BatchShape | None) -> Collate:
        """Batches of sentence pairs."""
        rules = masking_rules(marks, self.settings.probability)
        return PairCollator(marks, rules, shape, self.settings.positions == "reset")


@dataclass(frozen=True, slots=True)
class SentenceCollator:
    """Builds MLM batches: marks, packing, masking."""

    marks: Marks
    rules: MaskingRules
    shape: BatchShape | None

    def __call__(self, sides: tuple[Ragged, ...], generator: torch.Generator) -> MaskedBatch:
        """Build one batch."""
        marked = add_marks(sides[0], self.marks.first, self.marks.last)
        tokens = pack(marked, shape=self.shape, pad_id=self.marks.pad)
        return mask_batch(tokens, self.rules, generator, self.shape)


@dataclass(frozen=True, slots=True)
class PairCollator:
    """Builds TLM batches: `<s> a </s></s> b </s>`, a coin deciding which side is a."""

    marks: Marks
    rules: MaskingRules
    shape: BatchShape | None
    reset: bool

    def __call__(self, sides: tuple[Ragged, ...], generator: torch.Generator) -> MaskedBatch:
        """Build one batch."""
        left, right = mark_sides(*swap_sides(sides[0], sides[1], generator), self.marks)
        pairs, positions = join_sides(left, right, reset=self.reset)
        tokens = pack(pairs, positions=positions, shape=self.shape, pad_id=self.marks.pad)
        return mask_batch(tokens, self.rules, generator, self.shape)


def masking_rules(marks: Marks, probability: float) -> MaskingRules:
    """Hide ordinary tokens with a probability."""
    return MaskingRules(marks.mask, marks.vocab_size, marks.special, probability)


def swap_sides(src: Ragged, tgt: Ragged, generator: torch.Generator) -> tuple[Ragged, Ragged]:
    """Exchange source and target of every second pair or so."""
    n_pairs = len(src.lengths)
    both = Ragged(np.concatenate([src.ids, tgt.ids]), np.concatenate([src.lengths, tgt.lengths]))
    swapped = torch.randint(2, (n_pairs,), generator=generator).numpy() * n_pairs
    places = np.arange(n_pairs)
    return reorder(both, places + swapped), reorder(both, places + n_pairs - swapped)


def mark_sides(left: Ragged, right: Ragged, marks: Marks) -> tuple[Ragged, Ragged]:
    """Put marks around both sides, as the tokenizer does around the sentences of a pair."""
    opening = marks.last if marks.between == 2 else None
    return add_marks(left, marks.first, marks.last), add_marks(right, opening, marks.last)


def join_sides(left: Ragged, right: Ragged, *, reset: bool) -> tuple[Ragged, IntArray]:
    """Join marked sides into pairs; give their positions too, from 0 in every side if reset."""
    pairs, n_left = interleave(left, right)
    if reset:
        return pairs, reset_positions(n_left, pairs.lengths - n_left)
    return pairs, ranges(np.zeros_like(pairs.lengths), pairs.lengths)


def reset_positions(n_left: IntArray, n_right: IntArray) -> IntArray:
    """Count each sentence of a pair from 0.

    >>> reset_positions(np.array([2, 1]), np.array([3, 1])).tolist()
    [0, 1, 0, 1, 2, 0, 0]
    """
    lengths = np.stack([n_left, n_right], axis=1).ravel()
    return ranges(np.zeros_like(lengths), lengths)


def mask_batch(
    tokens: TokenBatch,
    rules: MaskingRules,
    generator: torch.Generator,
    shape: BatchShape | None,
) -> MaskedBatch:
    """Hide tokens; with a fixed shape, fill the list of hidden places up to a fixed length."""
    maskable = find_maskable(tokens.ids, rules.special_ids)
    ids, masked, labels = mask_tokens(tokens.ids, maskable, rules, generator)
    if shape is not None:
        n_fill = max(0, round(rules.probability * shape.budget) + 1 - len(masked))
        masked = F.pad(masked, (0, n_fill))
        labels = F.pad(labels, (0, n_fill), value=IGNORED)
    return MaskedBatch(replace(tokens, ids=ids), masked, labels)
