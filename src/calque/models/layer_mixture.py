"""Two ways to read an encoder: its last layer, or a learnt mixture of all layers, frozen.

The second is the feature-based setting of Wu and Dredze (2020): a softmax-weighted mean of the
layers, and a few Transformer layers that are trained on top of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

from calque.models.attention import plan_attention

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from calque.models.attention import Attend
    from calque.models.encoder import Encoder
    from calque.types import TokenBatch

HEAD_SIZE = 64
# As wide inside as BERT, for the size of its states.
WIDENING = 4
DEVIATION = 0.02


class LastLayer(nn.Module):
    """Reads the last layer of an encoder that is fine-tuned."""

    def forward(self, encoder: Encoder, tokens: TokenBatch) -> Float[Tensor, "tokens hidden"]:
        """Give the states of all tokens."""
        states: Tensor = encoder(tokens)[0]
        return states


class LayerMixture(nn.Module):
    """Reads all layers of a frozen encoder: a weighted mean, then Transformer layers.

    The weights begin equal. No gradient reaches the encoder.
    """

    def __init__(
        self,
        n_layers: int,
        hidden_size: int,
        *,
        extra_layers: int,
        dropout: float,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(n_layers + 1))
        self.layers = nn.ModuleList(
            PackedLayer(hidden_size, dropout, generator) for _ in range(extra_layers)
        )

    def forward(self, encoder: Encoder, tokens: TokenBatch) -> Float[Tensor, "tokens hidden"]:
        """Give the states of all tokens."""
        with torch.no_grad():
            layers = torch.stack(encoder(tokens, range(encoder.n_layers + 1)))
        mixed = mix_layers(layers, self.weights)
        kind = mixed.device.type
        autocast = torch.is_autocast_enabled(kind)
        attend = plan_attention(tokens, torch.get_autocast_dtype(kind) if autocast else mixed.dtype)
        for layer in self.layers:
            mixed = layer(mixed, attend)
        return mixed


class PackedLayer(nn.Module):
    """A Transformer layer over packed sequences, the norms after its two halves as in BERT."""

    def __init__(self, hidden_size: int, dropout: float, generator: torch.Generator) -> None:
        super().__init__()
        self.n_heads = max(1, hidden_size // HEAD_SIZE)
        while hidden_size % self.n_heads:
            self.n_heads -= 1
        self.project = make_linear(hidden_size, 3 * hidden_size, generator)
        self.output = make_linear(hidden_size, hidden_size, generator)
        self.widen = make_linear(hidden_size, WIDENING * hidden_size, generator)
        self.narrow = make_linear(WIDENING * hidden_size, hidden_size, generator)
        self.first_norm, self.second_norm = nn.LayerNorm(hidden_size), nn.LayerNorm(hidden_size)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, states: Float[Tensor, "tokens hidden"], attend: Attend
    ) -> Float[Tensor, "tokens hidden"]:
        """Mix the states of every sequence, then change each for itself."""
        size = states.shape[-1] // self.n_heads
        query, key, value = self.project(states).view(-1, 3, self.n_heads, size).unbind(1)
        mixed = attend(query, key, value, 0.0, size**-0.5, None).flatten(1)
        states = self.first_norm(states + self.dropout(self.output(mixed)))
        inner = self.narrow(F.gelu(self.widen(states)))
        normed: Tensor = self.second_norm(states + self.dropout(inner))
        return normed


def mix_layers(
    layers: Float[Tensor, "layers tokens hidden"], weights: Float[Tensor, "layers"]
) -> Float[Tensor, "tokens hidden"]:
    """Average the layers, weighted by the softmax of `weights`.

    >>> mix_layers(torch.tensor([[[1.0]], [[3.0]]]), torch.zeros(2)).tolist()
    [[2.0]]
    """
    return torch.einsum("ltd,l->td", layers, weights.softmax(0).to(layers.dtype))


def make_linear(n_in: int, n_out: int, generator: torch.Generator) -> nn.Linear:
    """Make a linear layer as BERT's begin: N(0, 0.02²), no bias at first."""
    # Its own beginning would draw from the generator that all share.
    layer: nn.Linear = nn.utils.skip_init(nn.Linear, n_in, n_out)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        layer.weight.normal_(0, DEVIATION, generator=generator)
        layer.bias.zero_()
    return layer
