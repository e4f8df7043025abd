"""The alignment pointer network: from a token to its partners in the other sentence."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

# As the encoders' own matrices begin.
INITIAL_SPREAD = 0.02


class PointerNetwork(nn.Module):
    """Scores every state as a partner of another: qᵀk / √d (Chi et al., 2021, Eq. 11 to 13).

    One linear map makes queries, another keys, whichever of two sentences asks. Paper: keys have
    a bias; it would add the same to all scores of a query, which no softmax can see.
    """

    def __init__(self, hidden_size: int, generator: torch.Generator | None = None) -> None:
        super().__init__()
        # On no device at first: torch would draw weights from the global generator.
        size = (hidden_size, hidden_size)
        self.query = nn.Linear(*size, device="meta").to_empty(device="cpu")
        self.key = nn.Linear(*size, bias=False, device="meta").to_empty(device="cpu")
        with torch.no_grad():
            for part in (self.query, self.key):
                part.weight.normal_(0.0, INITIAL_SPREAD, generator=generator)
            self.query.bias.zero_()

    def seek(self, states: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch hidden"]:
        """Give the vectors whose products with states are the scores.

        The key matrix is applied here, since few tokens ask and all may answer: qᵀ(Wh) = (Wᵀq)ᵀh.
        """
        queries: Tensor = self.query(states)
        return queries @ self.key.weight / math.sqrt(states.shape[-1])

    def forward(
        self,
        asking: Float[Tensor, "*batch queries hidden"],
        answering: Float[Tensor, "*batch keys hidden"],
    ) -> Float[Tensor, "*batch queries keys"]:
        """Score the answering states for each of the asking ones."""
        return self.seek(asking) @ answering.mT
