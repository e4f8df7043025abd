"""Static vectors taught back to the encoder: a word read alone resembles its vector.

Hämmerl et al., 2022, by mean squared error or by deep CCA (Andrew et al., 2013).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch.nn import functional as F

from calque.algorithms.cca import RIDGE, RigidFit, deep_cca_loss
from calque.errors import InputError
from calque.models.pooling import pool_words
from calque.objectives.base import (
    BatchOfArrays,
    Marks,
    Objective,
    ObjectiveSettings,
    gather_rows,
    lay_apart,
    n_processes,
)
from calque.objectives.regression import mean_over_processes
from calque.types import LossTerms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Float, Int
    from torch import Tensor

    from calque.models.encoder import Encoder
    from calque.objectives.base import Collate
    from calque.tokens.ragged import BatchShape, Ragged
    from calque.types import TokenBatch


# Words that vectors are fitted by.
N_FITTED = 8192


class StaticTargetSettings(ObjectiveSettings):
    """The loss between words and their vectors as the recipe describes it."""

    kind: Literal["static_target"] = "static_target"
    # "mse" compares number by number, so that both must have as many; "dcca" correlates.
    loss: Literal["mse", "dcca"] = "dcca"
    # The layer whose states make the words; by default the last.
    layer: int | None = None
    # Whether vectors are scaled to length 1, as the authors' code does.
    unit: bool = True
    # Beyond the paper, for "mse": whether vectors are moved, scaled and turned, once, to where the
    # encoder's states of their words lie. Then the widths may differ.
    fit: bool = False
    # How many of the largest correlations count; by default all.
    components: int | None = Field(None, gt=0)
    # What is added to the variances: as it is, or times the mean variance of either side.
    ridge: float = Field(RIDGE, ge=0)
    ridge_unit: Literal["one", "variance"] = "one"

    @model_validator(mode="after")
    def _correlations_need_no_fit(self) -> StaticTargetSettings:
        if self.fit and self.loss == "dcca":
            raise ValueError("fit=true, but correlations are the same wherever vectors lie")
        return self


@dataclass(frozen=True, slots=True)
class WordVectorBatch(BatchOfArrays):
    """Words, each a sequence of its own, and their vectors.

    `words` tell the word of every token, −1 for marks and padding. A word of weight 0 only fills
    the shape.
    """

    tokens: TokenBatch
    words: Int[Tensor, "tokens"]
    vectors: Float[Tensor, "words width"]
    weights: Float[Tensor, "words"]


@dataclass(frozen=True, slots=True)
class WordVectorCollator:
    """Builds batches; with a shape, of always the same number of words, some of weight 0."""

    marks: Marks
    shape: BatchShape | None
    unit: bool

    def __call__(self, arrays: tuple[Ragged, ...], generator: torch.Generator) -> WordVectorBatch:
        """Build one batch of words and vectors."""
        text, numbers = arrays
        n_words = len(text.lengths)
        tokens, owners = lay_apart((text,), self.marks, self.shape, own_marks=False)
        room = n_words if self.shape is None else max(n_words, self.shape.sequences)
        vectors = torch.from_numpy(numbers.ids.reshape(n_words, -1)).float()
        vectors = F.normalize(vectors, dim=1) if self.unit else vectors
        return WordVectorBatch(
            tokens,
            torch.from_numpy(np.where(owners == n_words, -1, owners)),
            F.pad(vectors, (0, 0, 0, room - n_words)),
            F.pad(torch.ones(n_words), (0, room - n_words)),
        )


class StaticTarget(Objective):
    """Bring words, each read alone, to their static vectors; the encoder alone learns."""

    n_sides: ClassVar[int] = 1
    needs_vectors: ClassVar[bool] = True
    uses_all_weights: ClassVar[bool] = False

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self.fitted: RigidFit | None = None

    def n_marks(self, marks: Marks) -> int:
        """Count `<s>` and `</s>`."""
        return 2

    def make_collate(self, marks: Marks, shape: BatchShape | None) -> Collate:
        """Batches of words with their vectors."""
        return WordVectorCollator(marks, shape, self.settings.unit)

    def start(self, encoder: Encoder, languages: Sequence[str]) -> None:
        """Look at the layer: an impossible one is told before anything is compiled."""
        self._layer(encoder)

    @torch.no_grad()
    def fit(self, encoder: Encoder, marks: Marks, examples: Iterator[tuple[Ragged, ...]]) -> None:
        """Find where vectors are to lie, if that is asked for: the same in all processes."""
        if not self.settings.fit:
            return
        collate, generator = self.make_collate(marks, None), torch.Generator()
        device = next(encoder.parameters()).device
        was_training, pairs, n_words = encoder.training, [], 0
        encoder.eval()
        while n_words < N_FITTED:
            batch = collate(next(examples), generator).to(device)
            pairs.append((batch.vectors, self._pool(encoder, batch)))
            n_words += len(batch.vectors)
        encoder.train(was_training)
        vectors, states = (torch.cat(side) for side in zip(*pairs, strict=True))
        self.fitted = RigidFit.of(vectors, states)

    def find_fault(
        self, encoder: Encoder, marks: Marks, examples: Iterator[tuple[Ragged, ...]]
    ) -> str | None:
        """Refuse vectors that the loss cannot use; warn where words are too few to correlate."""
        words, vectors = next(examples)
        width, hidden = int(vectors.lengths[0]), encoder.hidden_size
        self._check_widths(width, hidden)
        n_free = len(words.lengths) * n_processes() - 1
        if self.settings.loss == "mse" or n_free >= width + hidden:
            return None
        # Two spaces of so many dimensions must meet, and where they meet the correlation is 1.
        n_sure = min(width, n_free) + min(hidden, n_free) - n_free
        return (
            f"{len(words.lengths)} words a batch for {hidden} + {width} dimensions: but for the "
            f"ridge, {n_sure} correlations are 1 whatever the vectors; raise batch_examples"
        )

    def forward(self, encoder: Encoder, batch: WordVectorBatch) -> LossTerms:
        """Encode the words, average the subwords of each, and compare them with the vectors."""
        pooled = self._pool(encoder, batch)
        with torch.autocast(pooled.device.type, enabled=False):
            if self.settings.loss == "mse":
                targets = batch.vectors if self.fitted is None else self.fitted.apply(batch.vectors)
                distance = mean_over_processes(pooled, targets.to(pooled), batch.weights)
                return LossTerms(distance / pooled.shape[1], {})
            terms: LossTerms = self._correlate(pooled, batch)
            return terms

    def _pool(self, encoder: Encoder, batch: WordVectorBatch) -> Float[Tensor, "words hidden"]:
        (states,) = encoder(batch.tokens, [self._layer(encoder)])
        return pool_words(states, batch.words, len(batch.weights))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _correlate(self, words: Float[Tensor, "words hidden"], batch: WordVectorBatch) -> LossTerms:
        """Correlate the words of all processes, as one batch, with their vectors."""
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
                f"static_target: vectors of {width} dimensions, but the encoder has {hidden}",
                fix="set fit: true or loss: dcca, which compare any, or give other vectors",
            )
        most = min(width, hidden)
        if settings.loss == "dcca" and (settings.components or 0) > most:
            raise InputError(
                f"static_target: components={settings.components} of {most}", fix="lower it"
            )

    def _layer(self, encoder: Encoder) -> int:
        asked = self.settings.layer
        return encoder.n_layers if asked is None else encoder.check_layer(asked)
