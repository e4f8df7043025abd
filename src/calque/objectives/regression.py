"""L2 alignment: linked words of two languages get the same states, and the encoder stays near.

Cao et al., 2020, and the regulariser that Wu and Dredze, 2020, put in the place of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from pydantic import Field

from calque.objectives.base import Marks, Objective, ObjectiveSettings
from calque.objectives.gathering import n_processes, total_over_processes
from calque.objectives.pretrained import PretrainedWeights
from calque.objectives.self_labels import LEFT
from calque.objectives.word_pairs import WordPairBatch, WordPairCollator
from calque.types import LossTerms

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from calque.models.encoder import Encoder
    from calque.objectives.base import Collate
    from calque.text.batching import BatchShape


class L2Settings(ObjectiveSettings):
    """L2 alignment and its two regularisers as the recipe describes them."""

    kind: Literal["l2"] = "l2"
    # The layer whose states are brought together; by default the last.
    layer: int | None = None
    # A word is its first subword, or the mean of all.
    words: Literal["first", "mean"] = "first"
    # λ of λ · ‖θ − θ_pretrained‖² (the paper's Eq. 5).
    parameter_weight: float = Field(1.0, ge=0)
    # The weight of keeping the states of the source sentences (Eq. 4): a forward pass more.
    hidden_weight: float = Field(0.0, ge=0)
    # Where the pre-trained weights are held.
    reference: Literal["device", "host"] = "device"


@dataclass(frozen=True, slots=True)
class RegressionBatch:
    """Linked words, and the states that all tokens had before training, if they are wanted."""

    pairs: WordPairBatch
    before: Float[Tensor, "tokens hidden"] | None


def l2_loss(
    src: Float[Tensor, "rows hidden"],
    tgt: Float[Tensor, "rows hidden"],
    weights: Float[Tensor, "rows"],
    total: Float[Tensor, ""] | None = None,
) -> Float[Tensor, ""]:
    """Give Σ w‖s − t‖² / Σ w, squares summed over the dimensions (Eq. 3); 0 if no row counts.

    `total` stands in for Σ w where the rows are but a part of those that the mean is over.

    >>> src, tgt = torch.tensor([[1.0, 2.0], [5.0, 5.0]]), torch.tensor([[0.0, 0.0], [5.0, 6.0]])
    >>> l2_loss(src, tgt, torch.tensor([1.0, 1.0])).item()  # the mean of 5 and 1
    3.0
    """
    total = weights.sum() if total is None else total
    summed = (weights * (src - tgt).square().sum(dim=-1)).sum()
    return summed / torch.where(total > 0, total, 1.0)


class Regression(Objective):
    """Bring linked words together without leaving what the encoder was."""

    n_sides: ClassVar[int] = 2
    reads_apart: ClassVar[bool] = True
    needs_links: ClassVar[bool] = True
    uses_all_weights: ClassVar[bool] = False

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self.pretrained: PretrainedWeights | None = None

    def n_marks(self, marks: Marks) -> int:
        """Count `<s>` and `</s>` of both sentences."""
        return 4

    def make_collate(self, marks: Marks, shape: BatchShape | None) -> Collate:
        """Batches of linked words."""
        return WordPairCollator(marks, shape)

    def start(self, encoder: Encoder, languages: Sequence[str]) -> None:
        """Keep the weights to stay near to, one copy for both regularisers."""
        self._layer(encoder)  # an impossible one is told before anything is compiled
        if self.settings.parameter_weight > 0 or self.settings.hidden_weight > 0:
            self.pretrained = PretrainedWeights.of(encoder, self.settings.reference)

    def compile(self, *arguments: Any, **options: Any) -> None:
        """Compile the losses, and apart from them the pass that has no dropout."""
        super().compile(*arguments, **options)
        if self.pretrained is not None:
            self.pretrained.compile(*arguments, **options)

    def prepare(self, encoder: Encoder, batch: WordPairBatch) -> RegressionBatch:
        """Find the states to stay near to, if that is asked for."""
        if self.settings.hidden_weight == 0:
            return RegressionBatch(batch, None)
        assert self.pretrained is not None, "start comes first"
        (before,) = self.pretrained.encode(encoder, batch.tokens, [self._layer(encoder)])
        return RegressionBatch(batch, before)

    def forward(self, encoder: Encoder, batch: RegressionBatch) -> LossTerms:
        """Encode the sentences apart and measure how far apart their linked words are."""
        settings, pairs = self.settings, batch.pairs
        (states,) = encoder(pairs.tokens, [self._layer(encoder)])
        linked = pairs.linked_states(states, settings.words)
        figures = {"l2": mean_over_processes(*linked, pairs.weights)}
        loss = figures["l2"]
        if batch.before is not None:
            # Paper: Eq. 4 prints the norm of the whole matrix, which grows with the batch; like the
            # release, this is the mean over the tokens of the sources, marks included.
            is_source = (pairs.sides == LEFT).to(pairs.weights.dtype)
            wide = states.to(pairs.weights.dtype), batch.before.to(pairs.weights.dtype)
            figures["hidden"] = mean_over_processes(*wide, is_source)
            loss = loss + settings.hidden_weight * figures["hidden"]
        if settings.parameter_weight > 0:
            assert self.pretrained is not None, "start comes first"
            figures["parameters"] = self.pretrained.distance(encoder)
            loss = loss + settings.parameter_weight * figures["parameters"]
        return LossTerms(loss, figures)

    def _layer(self, encoder: Encoder) -> int:
        asked = self.settings.layer
        return encoder.n_layers if asked is None else encoder.check_layer(asked)


def mean_over_processes(
    src: Float[Tensor, "rows hidden"],
    tgt: Float[Tensor, "rows hidden"],
    weights: Float[Tensor, "rows"],
) -> Float[Tensor, ""]:
    """Give this process's share of the mean over the rows of all, times their number.

    DDP takes the mean of these over the processes: that of all rows, however they are spread.
    """
    total = total_over_processes(weights.sum()) / n_processes()
    return l2_loss(src, tgt, weights, total)
