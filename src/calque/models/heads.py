"""Networks on top of an encoder: feature extractor, pointer, layer mixture, classifier, spans."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

from calque.models.attention import plan_attention
from calque.models.encoder import compute_dtype

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from calque.models.attention import Attend
    from calque.models.encoder import Encoder
    from calque.types import TokenBatch

# The standard deviation of initial weights, as in BERT.
INITIAL_DEVIATION = 0.02
# The label of rows that only fill a fixed shape and are ignored by losses.
NO_LABEL = -100
# Size of an attention head, and inner size of the feed-forward network, as in BERT.
HEAD_SIZE, FEED_FORWARD_FACTOR = 64, 4


class FeatureExtractor(nn.Module):
    """f(h) = W₂ · ReLU(W₁ · h) without biases, shared by both languages and discarded afterwards.

    Wu and Dredze, 2020: it may remove what is specific to one language. With states of size 768 and
    128 features it is their 768-768-128.
    """

    def __init__(self, hidden_size: int, n_features: int, generator: torch.Generator) -> None:
        super().__init__()
        self.hidden = _make_projection(hidden_size, hidden_size, generator)
        self.output = _make_projection(hidden_size, n_features, generator)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return the features in the precision of the states (sharded weights may be narrower)."""
        hidden = F.linear(states, self.hidden.weight.to(states.dtype)).relu()
        return F.linear(hidden, self.output.weight.to(states.dtype))


def _make_projection(n_in: int, n_out: int, generator: torch.Generator) -> nn.Linear:
    """Return a linear layer without bias, initialized as PyTorch does, but from the generator."""
    layer = nn.Linear(n_in, n_out, bias=False, device="meta").to_empty(device="cpu")
    nn.init.uniform_(layer.weight, -(n_in**-0.5), n_in**-0.5, generator=generator)
    return layer


class PointerNetwork(nn.Module):
    """Scores every token of the other sentence as a partner: qᵀk / √d (XLM-Align, Eq. 11–13).

    One linear layer makes queries and one makes keys, in both directions. Paper: keys have a bias;
    it would add the same number to all scores of a query, which the softmax cancels.
    """

    def __init__(self, hidden_size: int, generator: torch.Generator | None = None) -> None:
        super().__init__()
        # Created on the meta device: otherwise torch would draw from the global generator.
        size = (hidden_size, hidden_size)
        self.query = nn.Linear(*size, device="meta").to_empty(device="cpu")
        self.key = nn.Linear(*size, bias=False, device="meta").to_empty(device="cpu")
        with torch.no_grad():
            for part in (self.query, self.key):
                part.weight.normal_(0.0, INITIAL_DEVIATION, generator=generator)
            self.query.bias.zero_()

    def project_queries(
        self, states: Float[Tensor, "*batch hidden"]
    ) -> Float[Tensor, "*batch hidden"]:
        """Return the vectors whose products with the states of other tokens are the scores.

        The key matrix is applied to the queries, because there are fewer: qᵀ(Wh) = (Wᵀq)ᵀh.
        """
        queries: Tensor = self.query(states)
        return queries @ self.key.weight / math.sqrt(states.shape[-1])

    def forward(
        self,
        queries: Float[Tensor, "*batch queries hidden"],
        keys: Float[Tensor, "*batch keys hidden"],
    ) -> Float[Tensor, "*batch queries keys"]:
        """Return the score of each key state for each query state."""
        return self.project_queries(queries) @ keys.mT


class LastLayer(nn.Module):
    """Reads the last layer of an encoder that is fine-tuned."""

    def forward(
        self, encoder: Encoder, tokens: TokenBatch, language: str
    ) -> Float[Tensor, "tokens hidden"]:
        """Return the states of all tokens."""
        states: Tensor = encoder(tokens)[0]
        return states


class LayerMixture(nn.Module):
    """Reads a frozen encoder: a learned weighted mean of layers, then new Transformer layers.

    This is the feature-based setting of Wu and Dredze (2020). The weights start equal. If the
    encoder has linear maps, the states of every layer are mapped by language before the mean, and
    layers without maps are not read.
    """

    def __init__(
        self,
        encoder: Encoder,
        *,
        extra_layers: int,
        dropout: float,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        numbers = range(encoder.n_layers + 1) if encoder.maps is None else encoder.maps.layers
        self.numbers = tuple(numbers)
        self.weights = nn.Parameter(torch.zeros(len(self.numbers)))
        self.layers = nn.ModuleList(
            PackedLayer(encoder.hidden_size, dropout, generator) for _ in range(extra_layers)
        )

    def forward(
        self, encoder: Encoder, tokens: TokenBatch, language: str
    ) -> Float[Tensor, "tokens hidden"]:
        """Return the states of all tokens of sentences in one language."""
        with torch.no_grad():
            states = encoder(tokens, self.numbers)
            if encoder.maps is not None:
                states = encoder.maps.apply_by_layer(states, language, self.numbers)
        mixed = mix_layers(torch.stack(states), self.weights)
        attend = plan_attention(tokens, compute_dtype(mixed))
        for layer in self.layers:
            mixed = layer(mixed, attend)
        return mixed


class PackedLayer(nn.Module):
    """A post-norm Transformer layer over packed sequences, as in BERT."""

    def __init__(self, hidden_size: int, dropout: float, generator: torch.Generator) -> None:
        super().__init__()
        self.n_heads = max(1, hidden_size // HEAD_SIZE)
        while hidden_size % self.n_heads:
            self.n_heads -= 1
        inner_size = FEED_FORWARD_FACTOR * hidden_size
        self.project = make_linear(hidden_size, 3 * hidden_size, generator)
        self.output = make_linear(hidden_size, hidden_size, generator)
        self.widen = make_linear(hidden_size, inner_size, generator)
        self.narrow = make_linear(inner_size, hidden_size, generator)
        self.first_norm, self.second_norm = nn.LayerNorm(hidden_size), nn.LayerNorm(hidden_size)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, states: Float[Tensor, "tokens hidden"], attend: Attend
    ) -> Float[Tensor, "tokens hidden"]:
        """Return the states after self-attention and feed-forward network."""
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
    """Return the mean of the layers, weighted by the softmax of `weights`.

    >>> mix_layers(torch.tensor([[[1.0]], [[3.0]]]), torch.zeros(2)).tolist()
    [[2.0]]
    """
    return torch.einsum("ltd,l->td", layers, weights.softmax(0).to(layers.dtype))


def make_linear(n_in: int, n_out: int, generator: torch.Generator) -> nn.Linear:
    """Return a linear layer initialized as in BERT: weights from N(0, 0.02²), biases 0."""
    # Without initialization, which would draw from the global generator.
    layer: nn.Linear = nn.utils.skip_init(nn.Linear, n_in, n_out)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        layer.weight.normal_(0, INITIAL_DEVIATION, generator=generator)
        layer.bias.zero_()
    return layer


class SentenceClassifier(nn.Module):
    """Scores classes from one state per sentence: a tanh layer and a linear one, as in RoBERTa.

    Without `pooler` there is only the linear layer, as in Wu and Dredze (2020).
    """

    def __init__(
        self,
        hidden_size: int,
        n_classes: int,
        dropout: float,
        generator: torch.Generator,
        *,
        pooler: bool = True,
    ) -> None:
        super().__init__()
        self.dense = make_linear(hidden_size, hidden_size, generator) if pooler else None
        self.output = make_linear(hidden_size, n_classes, generator)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, states: Float[Tensor, "sentences hidden"]
    ) -> Float[Tensor, "sentences classes"]:
        """Return the score of every class."""
        if self.dense is not None:
            states = self.dropout(torch.tanh(self.dense(states)))
        scores: Tensor = self.output(states)
        return scores


def mean_cross_entropy(scores: Tensor, labels: Tensor) -> Float[Tensor, ""]:
    """Return the mean of −log p(label) over rows with a label, in single precision at least.

    Rows labeled `NO_LABEL` are ignored; if there are no others, the loss is 0.
    """
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    total = F.cross_entropy(wide, labels, ignore_index=NO_LABEL, reduction="sum")
    return total / (labels != NO_LABEL).sum().clamp(min=1)


def find_best_spans(
    starts: Float[Tensor, "rows tokens"],
    ends: Float[Tensor, "rows tokens"],
    may_answer: Bool[Tensor, "rows tokens"],
    longest: int,
) -> tuple[Int[Tensor, "rows"], Int[Tensor, "rows"], Float[Tensor, "rows"]]:
    """Return the spans with the highest starts[first] + ends[last], and these scores.

    first ≤ last < first + longest, and both must be tokens that may answer; a row without such
    tokens has a score of −∞. Of equal spans the first and shortest is returned.
    """
    starts = starts.masked_fill(~may_answer, -torch.inf)
    ends = ends.masked_fill(~may_answer, -torch.inf)
    reach = F.pad(ends, (0, longest - 1), value=-torch.inf).unfold(1, longest, 1)
    scores = (starts[:, :, None] + reach).flatten(1)
    best, cell = scores.max(dim=1)
    first, length = cell // longest, cell % longest
    return first, first + length, best
