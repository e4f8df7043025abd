"""The feature extractor that contrastive learning looks through, and throws away afterwards.

Two ways to read an encoder: its last layer, or a learnt mixture of all layers, frozen.

The second is the feature-based setting of Wu and Dredze (2020): a softmax-weighted mean of the
layers, and a few Transformer layers that are trained on top of it.

Small networks on top of states: classifiers of sentences and of words.

The best span of a sequence: where it starts and where it ends, scored apart.

The alignment pointer network: from a token to its partners in the other sentence.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

from calque.models.attention import plan_attention

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from calque.models.attention import Attend
    from calque.models.encoder import Encoder
    from calque.types import TokenBatch


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
        self.project = make_linear_layer_mixture(hidden_size, 3 * hidden_size, generator)
        self.output = make_linear_layer_mixture(hidden_size, hidden_size, generator)
        self.widen = make_linear_layer_mixture(hidden_size, WIDENING * hidden_size, generator)
        self.narrow = make_linear_layer_mixture(WIDENING * hidden_size, hidden_size, generator)
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


def make_linear_layer_mixture(n_in: int, n_out: int, generator: torch.Generator) -> nn.Linear:
    """Make a linear layer as BERT's begin: N(0, 0.02²), no bias at first."""
    # Its own beginning would draw from the generator that all share.
    layer: nn.Linear = nn.utils.skip_init(nn.Linear, n_in, n_out)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        layer.weight.normal_(0, DEVIATION, generator=generator)
        layer.bias.zero_()
    return layer


NO_LABEL = -100


class SentenceClassifier(nn.Module):
    """Scores classes from one state a sentence: a layer of tanh, then a linear one, as RoBERTa."""

    def __init__(
        self, hidden_size: int, n_classes: int, dropout: float, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.dense = make_linear_layer_mixture(hidden_size, hidden_size, generator)
        self.output = make_linear_layer_mixture(hidden_size, n_classes, generator)
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


def find_best_spans(
    starts: Float[Tensor, "rows places"],
    ends: Float[Tensor, "rows places"],
    may_answer: Bool[Tensor, "rows places"],
    longest: int,
) -> tuple[Int[Tensor, "rows"], Int[Tensor, "rows"], Float[Tensor, "rows"]]:
    """Find first ≤ last < first + longest with the highest starts[first] + ends[last].

    Both must be places that may answer; a row without one has a score of −∞. Of equal spans the
    first and shortest is taken.
    """
    starts = starts.masked_fill(~may_answer, -torch.inf)
    ends = ends.masked_fill(~may_answer, -torch.inf)
    reach = F.pad(ends, (0, longest - 1), value=-torch.inf).unfold(1, longest, 1)
    scores = (starts[:, :, None] + reach).flatten(1)
    best, place = scores.max(dim=1)
    first, length = place // longest, place % longest
    return first, first + length, best


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
