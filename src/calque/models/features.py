"""The feature extractor that contrastive learning looks through, and throws away afterwards."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class FeatureExtractor(nn.Module):
    """f(h) = W₂ · ReLU(W₁ · h), without biases, the same for both languages.

    Wu and Dredze, 2020: it may discard what belongs to one language alone. With `n_features` of
    128 and states of 768 it is their 768-768-128.
    """

    def __init__(self, hidden_size: int, n_features: int, generator: torch.Generator) -> None:
        super().__init__()
        self.hidden = make_linear(hidden_size, hidden_size, generator)
        self.output = make_linear(hidden_size, n_features, generator)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Extract the features of states, in their precision: shards may come in a lower one."""
        hidden = F.linear(states, self.hidden.weight.to(states.dtype)).relu()
        return F.linear(hidden, self.output.weight.to(states.dtype))


def make_linear(n_in: int, n_out: int, generator: torch.Generator) -> nn.Linear:
    """Draw a linear map as PyTorch does, but from this generator and not from the global one."""
    layer = nn.Linear(n_in, n_out, bias=False, device="meta").to_empty(device="cpu")
    nn.init.uniform_(layer.weight, -(n_in**-0.5), n_in**-0.5, generator=generator)
    return layer
