"""L2 alignment: linked words of two languages get equal states, and the encoder stays close.

Cao et al., 2020, with the regularizer of Wu and Dredze, 2020.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from pydantic import Field

from calque.objectives.base import (
    Objective,
    ObjectiveSettings,
    choose_layer,
    n_processes,
    total_over_processes,
)
from calque.objectives.linked_words import WordPairBatch, WordPairCollator
from calque.objectives.regularization import ParameterNorm, PretrainedWeights
from calque.objectives.self_labels import LEFT
from calque.tokens.tokenizer import SpecialTokens
from calque.types import LossTerms

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from calque.models.encoder import Encoder
    from calque.objectives.base import Collate
    from calque.tokens.ragged import BatchShape


class L2Settings(ObjectiveSettings):
    """Settings of L2 alignment and its two regularizers in a recipe."""

    kind: Literal["l2"] = "l2"
    # The layer whose states are aligned. Default: the last.
    layer: int | None = None
    # A word is represented by its first subword, or by the mean of its subwords.
    words: Literal["first", "mean"] = "first"
    # λ in λ · ‖θ − θ_pretrained‖² (Wu and Dredze, Eq. 5).
    parameter_weight: float = Field(1.0, ge=0)
    # plain: λ · ‖θ − θ_pretrained‖, as in the authors' code.
    parameter_norm: ParameterNorm = "squared"
    # Weight of the distance to the initial states of source sentences (Eq. 4): one more forward.
    hidden_weight: float = Field(0.0, ge=0)
    # Where the copy of the pretrained weights is stored.
    reference: Literal["device", "host"] = "device"

    newer_keys: ClassVar[tuple[str, ...]] = (*ObjectiveSettings.newer_keys, "parameter_norm")


def l2_loss(
    src: Float[Tensor, "rows hidden"],
    tgt: Float[Tensor, "rows hidden"],
    weights: Float[Tensor, "rows"],
    total: Float[Tensor, ""] | None = None,
) -> Float[Tensor, ""]:
    """Return Σ w‖s − t‖² / Σ w (Wu and Dredze, Eq. 3); 0 if all weights are 0.

    `total` replaces Σ w if the rows are only a part of those that the mean is over.

    >>> src, tgt = torch.tensor([[1.0, 2.0], [5.0, 5.0]]), torch.tensor([[0.0, 0.0], [5.0, 6.0]])
    >>> l2_loss(src, tgt, torch.tensor([1.0, 1.0])).item()  # the mean of 5 and 1
    3.0
    """
    total = weights.sum() if total is None else total
    summed = (weights * (src - tgt).square().sum(dim=-1)).sum()
    return summed / torch.where(total > 0, total, 1.0)


def l2_loss_over_processes(
    src: Float[Tensor, "rows hidden"],
    tgt: Float[Tensor, "rows hidden"],
    weights: Float[Tensor, "rows"],
) -> Float[Tensor, ""]:
    """Return the part of this process in the mean over all rows, times the number of processes.

    DDP averages these over the processes: the result is the mean over all rows.
    """
    total = total_over_processes(weights.sum()) / n_processes()
    return l2_loss(src, tgt, weights, total)


@dataclass(frozen=True, slots=True)
class RegressionBatch:
    """Linked words, and the states of all tokens before training if they are needed."""

    pairs: WordPairBatch
    initial_states: Float[Tensor, "tokens hidden"] | None


class Regression(Objective):
    """Make the states of linked words equal without moving far from the initial encoder."""

    n_sides: ClassVar[int] = 2
    n_special_tokens: ClassVar[int] = 4  # <s> and </s> of both sentences
    encodes_separately: ClassVar[bool] = True
    needs_links: ClassVar[bool] = True
    uses_all_weights: ClassVar[bool] = False

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self.pretrained: PretrainedWeights | None = None

    def build_collator(self, special_tokens: SpecialTokens, shape: BatchShape | None) -> Collate:
        """Return a collator of linked words."""
        return WordPairCollator(special_tokens, shape)

    def start(self, encoder: Encoder, languages: Sequence[str]) -> None:
        """Copy the initial weights, once for both regularizers."""
        self._layer(encoder)  # raises an error before anything is compiled
        if self.settings.parameter_weight > 0 or self.settings.hidden_weight > 0:
            self.pretrained = PretrainedWeights.of(encoder, self.settings.reference)

    def compile(self, *arguments: Any, **options: Any) -> None:
        """Compile the losses, and separately the pass without dropout."""
        super().compile(*arguments, **options)
        if self.pretrained is not None:
            self.pretrained.compile(*arguments, **options)

    def prepare(self, encoder: Encoder, batch: WordPairBatch) -> RegressionBatch:
        """Add the states before training if the hidden-state regularizer is used."""
        if self.settings.hidden_weight == 0:
            return RegressionBatch(batch, None)
        assert self.pretrained is not None, "start comes first"
        (states,) = self.pretrained.encode(encoder, batch.tokens, [self._layer(encoder)])
        return RegressionBatch(batch, states)

    def forward(self, encoder: Encoder, batch: RegressionBatch) -> LossTerms:
        """Return the mean squared distance of linked words, plus the regularizers."""
        settings, pairs = self.settings, batch.pairs
        (states,) = encoder(pairs.tokens, [self._layer(encoder)])
        linked = pairs.linked_states(states, settings.words)
        metrics = {"l2": l2_loss_over_processes(*linked, pairs.weights)}
        loss = metrics["l2"]
        if batch.initial_states is not None:
            # Paper: Eq. 4 is the norm of the whole matrix, which grows with the batch; as in the
            # release, this is the mean over the source tokens, special tokens included.
            dtype = pairs.weights.dtype
            is_source = (pairs.sides == LEFT).to(dtype)
            metrics["hidden"] = l2_loss_over_processes(
                states.to(dtype), batch.initial_states.to(dtype), is_source
            )
            loss = loss + settings.hidden_weight * metrics["hidden"]
        if settings.parameter_weight > 0:
            assert self.pretrained is not None, "start comes first"
            metrics["parameters"] = self.pretrained.distance(encoder, settings.parameter_norm)
            loss = loss + settings.parameter_weight * metrics["parameters"]
        return LossTerms(loss, metrics)

    def _layer(self, encoder: Encoder) -> int:
        return choose_layer(encoder, self.settings.layer)
