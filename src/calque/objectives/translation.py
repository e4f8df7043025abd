"""Translation by an encoder–decoder: label-smoothed cross-entropy of the target, forced by itself.

Vaswani et al., 2017; Szegedy et al., 2016 (label smoothing).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field

from calque.objectives.base import Marks, Objective, ObjectiveSettings
from calque.objectives.masked_lm import IGNORED, predict_tokens
from calque.objectives.seq2seq_batches import (
    Beginnings,
    Seq2SeqBatch,
    check_decoder,
    lay_seq2seq,
)
from calque.text.batching import BatchShape, Ragged, reorder
from calque.types import LossTerms

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from calque.models.encoder import Encoder
    from calque.objectives.base import Collate

# The share of a batch, in sixteenths, that either side of a pair may take before shapes change.
HALF = (9, 9)


class TranslationSettings(ObjectiveSettings):
    """Translation as the recipe describes it."""

    kind: Literal["translation"] = "translation"
    # Of bitext en-de: forward is from en to de. "both": each pair in either direction, by a coin.
    direction: Literal["forward", "backward", "both"] = "forward"
    smoothing: float = Field(0.1, ge=0, lt=1)


def smoothed_cross_entropy(
    features: Float[Tensor, "tokens hidden"],
    weight: Float[Tensor, "vocabulary hidden"],
    bias: Float[Tensor, "vocabulary"],
    labels: Int[Tensor, "tokens"],
    smoothing: float,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Mean of (1 − ε)·(−log p(y)) + ε·mean over v of (−log p(v)); and of −log p(y) alone.

    The mean logit is that of the mean row of the output layer, so that smoothing costs no second
    pass over the vocabulary. Labels of −100 do not count.
    """
    logits = predict_tokens(features, weight, bias)
    dtype = logits.dtype
    normalizer = logits.logsumexp(-1)
    is_real = labels != IGNORED
    hit = logits.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    mean = (features.to(dtype) * weight.to(dtype).mean(0)).sum(-1) + bias.to(dtype).mean()
    surprise, spread = normalizer - hit, normalizer - mean
    n_real = is_real.sum().clamp(min=1)
    smoothed = (1 - smoothing) * surprise + smoothing * spread
    zero = torch.zeros_like(surprise)
    loss, plain = (torch.where(is_real, x, zero).sum() / n_real for x in (smoothed, surprise))
    return loss, plain


class Writing(Objective):
    """What objectives share that read with the encoder and write with the decoder."""

    needs_languages: ClassVar[bool] = True

    def __init__(self, settings: ObjectiveSettings) -> None:
        super().__init__(settings)
        self.beginnings: Beginnings | None = None

    def begin(self, marks: Marks) -> Beginnings:
        """Give what collators look up first tokens in."""
        self.beginnings = self.beginnings or Beginnings(marks)
        return self.beginnings

    def find_written(self, languages: Sequence[str]) -> list[str]:
        """Name the language that is written, by the numbers that collators ask for."""
        return list(languages)

    def start(self, encoder: Encoder, languages: Sequence[str]) -> None:
        """Look up the tokens that the languages begin with."""
        assert self.beginnings is not None
        self.beginnings.meet(encoder, self.find_written(languages))

    def forward(self, encoder: Encoder, batch: Seq2SeqBatch) -> LossTerms:
        """Read, write what is to be written, and predict its every next token."""
        model = check_decoder(encoder)
        (memory,) = model(batch.src)
        states = model.decode(batch.tgt, batch.src, memory)
        weight, bias = model.output_layer()
        if bias is None:
            bias = weight.new_zeros(len(weight))
        loss, plain = smoothed_cross_entropy(
            model.predict_features(states), weight, bias, batch.labels, self.settings.smoothing
        )
        return LossTerms(loss, {"nll": plain})


class Translation(Writing):
    """Write the translation of a sentence."""

    n_sides: ClassVar[int] = 2
    reads_apart: ClassVar[bool] = True

    def n_marks(self, marks: Marks) -> int:
        """Count two marks of either side: the target has one before and one after it."""
        return 4

    def make_collate(self, marks: Marks, shape: BatchShape | None) -> Collate:
        """Batches of sentence pairs."""
        return TranslationCollator(marks, shape, self.begin(marks), self.settings.direction)

    def start(self, encoder: Encoder, languages: Sequence[str]) -> None:
        """Look up the tokens that the languages begin with; the model remembers its directions."""
        super().start(encoder, languages)
        pairs = [(pair[0], pair[-1]) for pair in (name.split("-") for name in languages)]
        there = pairs if self.settings.direction != "backward" else []
        back = pairs if self.settings.direction != "forward" else []
        check_decoder(encoder).learn_directions([*there, *((tgt, src) for src, tgt in back)])

    def find_written(self, languages: Sequence[str]) -> list[str]:
        """Name the second language of every pair, then the first: as far as they are written."""
        pairs = [name.split("-") for name in languages]
        if self.settings.direction == "both":
            return [pair[-1] for pair in pairs] + [pair[0] for pair in pairs]
        return [pair[0 if self.settings.direction == "backward" else -1] for pair in pairs]


@dataclass(frozen=True, slots=True)
class TranslationCollator:
    """Builds batches of sources and targets in the direction asked for."""

    marks: Marks
    shape: BatchShape | None
    beginnings: Beginnings
    direction: str

    def __call__(self, arrays: tuple[Ragged, ...], generator: torch.Generator) -> Seq2SeqBatch:
        """Build one batch."""
        src, tgt, pairs = arrays
        numbers = pairs.ids
        if self.direction == "backward":
            src, tgt = tgt, src
        if self.direction == "both":
            n_pairs = len(src.lengths)
            turned = torch.randint(2, (n_pairs,), generator=generator).numpy()
            both = Ragged(*map(np.concatenate, ((src.ids, tgt.ids), (src.lengths, tgt.lengths))))
            places = np.arange(n_pairs)
            src = reorder(both, places + turned * n_pairs)
            tgt = reorder(both, places + (1 - turned) * n_pairs)
            # The tokens of the first languages follow those of the second ones.
            numbers = numbers + turned * (len(self.beginnings.ids) // 2)
        first = self.beginnings.find(numbers)
        return lay_seq2seq(src, tgt, first, self.marks, self.shape, HALF)
