"""Small networks on top of states: classifiers of sentences and of words."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from calque.models.layer_mixture import make_linear

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

NO_LABEL = -100


class SentenceClassifier(nn.Module):
    """Scores classes from one state a sentence: a layer of tanh, then a linear one, as RoBERTa."""

    def __init__(
        self, hidden_size: int, n_classes: int, dropout: float, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.dense = make_linear(hidden_size, hidden_size, generator)
        self.output = make_linear(hidden_size, n_classes, generator)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, states: Float[Tensor, "sentences hidden"]
    ) -> Float[Tensor, "sentences classes"]:
        """Give every class its score."""
        scores: Tensor = self.output(self.dropout(torch.tanh(self.dense(states))))
        return scores


def mean_cross_entropy(scores: Tensor, labels: Tensor) -> Float[Tensor, ""]:
    """Average −log p(label) over the rows that have a label, in single precision at least.

    Rows labelled `NO_LABEL` only fill a shape; without any other the loss is 0, not undefined.
    """
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    total = nn.functional.cross_entropy(wide, labels, ignore_index=NO_LABEL, reduction="sum")
    return total / (labels != NO_LABEL).sum().clamp(min=1)
