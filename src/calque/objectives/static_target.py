"""Continued pretraining toward static word vectors: an isolated word resembles its vector.

Hämmerl et al., 2022, with mean squared error or deep CCA (Andrew et al., 2013).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch.nn import functional as F

from calque.algorithms.cca import RIDGE, SimilarityTransform, deep_cca_loss
from calque.errors import InputError
from calque.models.pooling import pool_words
from calque.objectives.base import (
    Objective,
    ObjectiveSettings,
    TensorBatch,
    choose_layer,
    evaluation_mode,
    gather_rows,
    n_processes,
)
from calque.objectives.regression import l2_loss_over_processes
from calque.tokens.layout import pack_separately
from calque.tokens.tokenizer import SpecialTokens
from calque.types import LossTerms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Float, Int
    from torch import Tensor

    from calque.models.encoder import Encoder
    from calque.objectives.base import Collate
    from calque.tokens.ragged import BatchShape, Ragged
    from calque.types import TokenBatch


# Number of words that the map of the vectors is fitted on.
N_FITTED = 8192


class StaticTargetSettings(ObjectiveSettings):
    """Settings of the loss between words and their vectors in a recipe."""

    kind: Literal["static_target"] = "static_target"
    # "mse" needs vectors of the encoder's hidden size; "dcca" correlates vectors of any size.
    loss: Literal["mse", "dcca"] = "dcca"
    # The layer whose states represent words. Default: the last.
    layer: int | None = None
    # Whether vectors are scaled to unit length, as in the authors' code.
    unit: bool = True
    # Not in the paper, for "mse": shift, scale and rotate the vectors once to fit the initial
    # states of their words. Then their size may differ from the hidden size.
    fit: bool = False
    # Number of the largest correlations that are summed. Default: all.
    components: int | None = Field(None, gt=0)
    # Added to the variances: as it is, or multiplied by the mean variance of each side.
    ridge: float = Field(RIDGE, ge=0)
    ridge_unit: Literal["one", "variance"] = "one"

    @model_validator(mode="after")
    def _check_fit(self) -> StaticTargetSettings:
        if self.fit and self.loss == "dcca":
            raise ValueError("fit=true has no effect with loss=dcca, which ignores linear maps")
        return self


@dataclass(frozen=True, slots=True)
class WordVectorBatch(TensorBatch):
    """Words, each a sequence of its own, and their vectors.

    `words` is the word of every token, −1 for special tokens and padding. A word of weight 0 only
    fills the shape.
    """

    tokens: TokenBatch
    words: Int[Tensor, "tokens"]
    vectors: Float[Tensor, "words width"]
    weights: Float[Tensor, "words"]


@dataclass(frozen=True, slots=True)
class WordVectorCollator:
    """Builds batches of words; with a shape, the number of words is fixed."""

    special_tokens: SpecialTokens
    shape: BatchShape | None
    unit: bool

    def __call__(self, arrays: tuple[Ragged, ...], generator: torch.Generator) -> WordVectorBatch:
        """Return one batch of words and vectors."""
        text, numbers = arrays
        n_words = len(text.lengths)
        tokens, owners = pack_separately(
            (text,), self.special_tokens, self.shape, own_special_tokens=False
        )
        capacity = n_words if self.shape is None else max(n_words, self.shape.sequences)
        vectors = torch.from_numpy(numbers.ids.reshape(n_words, -1)).float()
        vectors = F.normalize(vectors, dim=1) if self.unit else vectors
        return WordVectorBatch(
            tokens,
            torch.from_numpy(np.where(owners == n_words, -1, owners)),
            F.pad(vectors, (0, 0, 0, capacity - n_words)),
            F.pad(torch.ones(n_words), (0, capacity - n_words)),
        )


class StaticTarget(Objective):
    """Make isolated words resemble their static vectors; only the encoder gets a gradient."""

    n_sides: ClassVar[int] = 1
    n_special_tokens: ClassVar[int] = 2  # <s> and </s>
    needs_vectors: ClassVar[bool] = True
    uses_all_weights: ClassVar[bool] = False

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self.fitted: SimilarityTransform | None = None

    def build_collator(self, special_tokens: SpecialTokens, shape: BatchShape | None) -> Collate:
        """Return a collator of words with their vectors."""
        return WordVectorCollator(special_tokens, shape, self.settings.unit)

    def start(self, encoder: Encoder, languages: Sequence[str]) -> None:
        """Check the layer before anything is compiled."""
        self._layer(encoder)

    @torch.no_grad()
    def fit(
        self,
        encoder: Encoder,
        special_tokens: SpecialTokens,
        examples: Iterator[tuple[Ragged, ...]],
    ) -> None:
        """Fit the vectors to the initial states, if `fit` is set; identically in all processes."""
        if not self.settings.fit:
            return
        collate, generator = self.build_collator(special_tokens, None), torch.Generator()
        device = next(encoder.parameters()).device
        pairs, n_words = [], 0
        with evaluation_mode(encoder):
            while n_words < N_FITTED:
                batch = collate(next(examples), generator).to(device)
                pairs.append((batch.vectors, self._pool(encoder, batch)))
                n_words += len(batch.vectors)
        vectors, states = (torch.cat(side) for side in zip(*pairs, strict=True))
        self.fitted = SimilarityTransform.of(vectors, states)

    def find_problem(
        self,
        encoder: Encoder,
        special_tokens: SpecialTokens,
        examples: Iterator[tuple[Ragged, ...]],
    ) -> str | None:
        """Check the size of the vectors; return a warning if batches are too small to correlate."""
        words, vectors = next(examples)
        width, hidden = int(vectors.lengths[0]), encoder.hidden_size
        self._check_widths(width, hidden)
        n_free = len(words.lengths) * n_processes() - 1
        if self.settings.loss == "mse" or n_free >= width + hidden:
            return None
        # Two subspaces of so many dimensions must intersect: there the correlation is 1.
        n_trivial = min(width, n_free) + min(hidden, n_free) - n_free
        return (
            f"batches of {len(words.lengths)} words are too small for {hidden} + {width} "
            f"dimensions: without the ridge, {n_trivial} correlations are 1 for any vectors "
            "(raise batch_examples)"
        )

    def forward(self, encoder: Encoder, batch: WordVectorBatch) -> LossTerms:
        """Return the distance of the mean-pooled words to their vectors."""
        pooled = self._pool(encoder, batch)
        with torch.autocast(pooled.device.type, enabled=False):
            if self.settings.loss == "mse":
                targets = batch.vectors if self.fitted is None else self.fitted.apply(batch.vectors)
                distance = l2_loss_over_processes(pooled, targets.to(pooled), batch.weights)
                return LossTerms(distance / pooled.shape[1], {})
            terms: LossTerms = self._correlate(pooled, batch)
            return terms

    def _pool(self, encoder: Encoder, batch: WordVectorBatch) -> Float[Tensor, "words hidden"]:
        (states,) = encoder(batch.tokens, [self._layer(encoder)])
        return pool_words(states, batch.words, len(batch.weights))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _correlate(self, words: Float[Tensor, "words hidden"], batch: WordVectorBatch) -> LossTerms:
        """Return the negative sum of correlations over the words of all processes."""
        columns: tuple[Tensor, ...] = (words, batch.vectors.to(words), batch.weights)
        if self.training:  # validation reads the same batches in every process
            columns = gather_rows(*columns)
        settings = self.settings
        loss = deep_cca_loss(
            *columns,
            ridges=(settings.ridge, settings.ridge),
            relative=settings.ridge_unit == "variance",
            k=settings.components,
        )
        n_counted = settings.components or min(words.shape[1], batch.vectors.shape[1])
        return LossTerms(loss, {"correlation": -loss / n_counted})

    def _check_widths(self, width: int, hidden: int) -> None:
        settings = self.settings
        if settings.loss == "mse" and width != hidden and not settings.fit:
            raise InputError(
                f"static_target: the vectors have {width} dimensions, but the encoder {hidden}",
                fix="set fit: true or loss: dcca, or use other vectors",
            )
        most = min(width, hidden)
        if settings.loss == "dcca" and (settings.components or 0) > most:
            raise InputError(
                f"static_target: components={settings.components}, but there are only {most}",
                fix="lower components",
            )

    def _layer(self, encoder: Encoder) -> int:
        return choose_layer(encoder, self.settings.layer)
