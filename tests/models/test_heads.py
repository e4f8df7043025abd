"""Heads on top of an encoder, each against a direct computation."""

from __future__ import annotations

import math
from copy import deepcopy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from calque.models.attention import plan_attention
from calque.models.encoder import Encoder
from calque.models.heads import (
    INITIAL_DEVIATION,
    NO_LABEL,
    FeatureExtractor,
    LayerMixture,
    PackedLayer,
    PointerNetwork,
    SentenceClassifier,
    find_best_spans,
    mean_cross_entropy,
    mix_layers,
)
from calque.models.language_maps import LanguageMaps
from calque.tokens.ragged import Ragged, pack


def test_loss_is_the_mean_over_labeled_rows() -> None:
    scores = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, NO_LABEL, 2, NO_LABEL, 1])
    expected = F.cross_entropy(scores[[0, 2, 4]], labels[[0, 2, 4]])
    assert float(mean_cross_entropy(scores, labels)) == pytest.approx(float(expected))


def test_loss_without_labels_is_zero() -> None:
    scores = torch.randn(2, 3, requires_grad=True)
    loss = mean_cross_entropy(scores, torch.full((2,), NO_LABEL))
    loss.backward()
    assert loss.item() == 0 and scores.grad is not None and not scores.grad.any()


def test_loss_of_half_precision_scores_is_single_precision() -> None:
    scores = torch.randn(4, 3).bfloat16()
    assert mean_cross_entropy(scores, torch.zeros(4, dtype=torch.long)).dtype == torch.float32


def test_classifier_weights_come_from_the_generator() -> None:
    one, same, other = (
        SentenceClassifier(8, 2, 0.0, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)
    )
    assert torch.equal(one.dense.weight, same.dense.weight)
    assert not torch.equal(one.dense.weight, other.dense.weight)


def test_classifier_without_pooler_is_linear() -> None:
    generator = torch.Generator().manual_seed(0)
    classifier = SentenceClassifier(8, 2, 0.5, generator, pooler=False)
    states = torch.randn(3, 8, generator=generator)
    expected = states @ classifier.output.weight.T + classifier.output.bias
    torch.testing.assert_close(classifier(states), expected)  # without dropout, which comes before
    assert len(list(classifier.parameters())) == 2


def make_extractor(hidden: int = 768, n_features: int = 128, seed: int = 1) -> FeatureExtractor:
    return FeatureExtractor(hidden, n_features, torch.Generator().manual_seed(seed))


def test_feature_extractor_has_the_shape_of_the_paper() -> None:
    shapes = {name: tuple(weight.shape) for name, weight in make_extractor().named_parameters()}
    assert shapes == {"hidden.weight": (768, 768), "output.weight": (128, 768)}
    assert all(weight.requires_grad for weight in make_extractor().parameters())
    assert make_extractor()(torch.randn(5, 768)).shape == (5, 128)


def test_features_by_hand() -> None:
    extractor = make_extractor(2, 1)
    with torch.no_grad():
        extractor.hidden.weight.copy_(torch.tensor([[1.0, 2.0], [-3.0, 1.0]]))
        extractor.output.weight.copy_(torch.tensor([[5.0, 7.0]]))
    # W₁ · (1, 1) = (3, −2), of which ReLU leaves (3, 0).
    assert extractor(torch.tensor([[1.0, 1.0]])).tolist() == [[15.0]]


def test_the_feature_extractor_uses_only_its_generator() -> None:
    state = torch.get_rng_state()
    one, same, other = make_extractor(seed=1), make_extractor(seed=1), make_extractor(seed=2)
    assert torch.equal(torch.get_rng_state(), state)
    for name, weight in one.named_parameters():
        assert torch.equal(weight, same.get_parameter(name))
        assert not torch.equal(weight, other.get_parameter(name))
    assert not torch.equal(one.hidden.weight[:128], one.output.weight)


def test_feature_extractor_weights_have_the_spread_of_pytorch() -> None:
    extractor = make_extractor()
    for layer in (extractor.hidden, extractor.output):
        usual = torch.nn.Linear(layer.in_features, layer.out_features, bias=False)
        spread = usual.weight.std().item()
        assert abs(layer.weight.std().item() / spread - 1) < 0.02
        assert layer.weight.abs().max().item() <= usual.weight.abs().max().item() * 1.001


def make_pointer(hidden_size: int, seed: int = 0) -> PointerNetwork:
    return PointerNetwork(hidden_size, torch.Generator().manual_seed(seed))


def draw(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def test_pointer_scores_by_hand() -> None:
    pointer = make_pointer(1)
    with torch.no_grad():
        pointer.query.weight.fill_(2.0)
        pointer.query.bias.fill_(1.0)
        pointer.key.weight.fill_(3.0)
    # Queries 2·1 + 1 = 3 and 2·(−1) + 1 = −1, keys 3·0.5 and 3·2, √d = 1.
    scores = pointer(torch.tensor([[1.0], [-1.0]]), torch.tensor([[0.5], [2.0]]))
    assert scores.tolist() == [[4.5, 18.0], [-1.5, -6.0]]


def test_pointer_probabilities_equal_attention_with_a_key_bias() -> None:
    """Torch's attention has a key bias, which must make no difference."""
    pointer = make_pointer(12, seed=3)
    attention = nn.MultiheadAttention(12, 1, batch_first=True)
    with torch.no_grad():
        for parameter in pointer.parameters():
            parameter.mul_(30)
        pointer.query.bias.copy_(draw(12, seed=1))
        attention.in_proj_weight[:12] = pointer.query.weight
        attention.in_proj_weight[12:24] = pointer.key.weight
        attention.in_proj_bias[:12] = pointer.query.bias
        attention.in_proj_bias[12:24] = draw(12, seed=2)
    queries, keys = draw(2, 5, 12, seed=4), draw(2, 7, 12, seed=5)
    _, expected = attention(queries, keys, keys)
    found = pointer(queries, keys).softmax(dim=-1)
    torch.testing.assert_close(found, expected)
    assert found.std() > 0.1


def test_pointer_scores_are_scaled_products() -> None:
    pointer, queries, keys = make_pointer(8), draw(3, 8), draw(4, 8, seed=1)
    torch.testing.assert_close(pointer.project_queries(queries) @ keys.mT, pointer(queries, keys))
    expected = pointer.query(queries) @ pointer.key(keys).mT / math.sqrt(8)
    torch.testing.assert_close(pointer(queries, keys), expected)


def test_the_pointer_uses_only_its_generator() -> None:
    before = torch.random.get_rng_state()
    one, again, other = make_pointer(40, 5), make_pointer(40, 5), make_pointer(40, 6)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(one.query.weight, again.query.weight)
    assert torch.equal(one.key.weight, again.key.weight)
    assert not torch.equal(one.query.weight, other.query.weight)
    assert one.query.weight.std().item() == pytest.approx(INITIAL_DEVIATION, rel=0.05)
    assert one.query.bias.eq(0).all()
    assert {name for name, _ in one.named_parameters()} == {
        "query.weight",
        "query.bias",
        "key.weight",
    }


def test_packed_layer_equals_torchs_transformer_layer() -> None:
    layer = PackedLayer(128, 0.0, torch.Generator().manual_seed(0)).eval()
    reference = nn.TransformerEncoderLayer(
        128, layer.n_heads, 512, 0.0, activation="gelu", batch_first=True
    ).eval()
    pairs = {
        "self_attn.in_proj_weight": layer.project.weight,
        "self_attn.in_proj_bias": layer.project.bias,
        "self_attn.out_proj.weight": layer.output.weight,
        "self_attn.out_proj.bias": layer.output.bias,
        "linear1.weight": layer.widen.weight,
        "linear1.bias": layer.widen.bias,
        "linear2.weight": layer.narrow.weight,
        "linear2.bias": layer.narrow.bias,
    }
    reference.load_state_dict(pairs, strict=False)
    states = torch.randn(7, 128, generator=torch.Generator().manual_seed(1))
    batch = pack(Ragged.of([[1, 2, 3], [4, 5, 6, 7]]), pad_id=0)
    found = layer(states, plan_attention(batch, torch.float32))
    with torch.no_grad():
        expected = [reference(part[None])[0] for part in states.split([3, 4])]
    torch.testing.assert_close(found, torch.cat(expected), atol=1e-5, rtol=1e-4)


def test_gradients_reach_only_the_mixture(tiny_encoder: Encoder) -> None:
    generator = torch.Generator().manual_seed(0)
    mixture = LayerMixture(tiny_encoder, extra_layers=1, dropout=0.0, generator=generator)
    tokens = pack(Ragged.of([[0, 5, 6, 2], [0, 7, 2]]), pad_id=1)
    encoder = deepcopy(tiny_encoder)
    encoder.zero_grad(set_to_none=True)
    mixture(encoder, tokens, "en").square().sum().backward()
    assert all(weight.grad is not None for weight in mixture.parameters())
    assert all(weight.grad is None for weight in encoder.parameters())


def test_mixture_without_extra_layers_is_the_mean_of_the_layers(tiny_encoder: Encoder) -> None:
    generator = torch.Generator().manual_seed(0)
    mixture = LayerMixture(tiny_encoder, extra_layers=0, dropout=0.0, generator=generator)
    tokens = pack(Ragged.of([[0, 5, 6, 2]]), pad_id=1)
    with torch.no_grad():
        layers = tiny_encoder.model(tokens.ids[None], output_hidden_states=True).hidden_states
    torch.testing.assert_close(
        mixture(tiny_encoder, tokens, "en"), torch.stack(layers).mean(0)[0], atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize("numbers", [(0, 1, 2, 3, 4), (1, 3)])
def test_mixture_maps_every_layer_by_its_own_map(
    tiny_encoder: Encoder, numbers: tuple[int, ...]
) -> None:
    """Compare with loops in double precision: the mean of h W over layers, of h for English."""
    encoder, generator = deepcopy(tiny_encoder), torch.Generator().manual_seed(0)
    maps = torch.randn(2, len(numbers), 64, 64, generator=generator)
    encoder.maps = LanguageMaps(maps, ("ja", "de"), numbers, "en")
    mixture = LayerMixture(encoder, extra_layers=0, dropout=0.0, generator=generator)
    with torch.no_grad():
        mixture.weights.normal_(generator=generator)
    tokens = pack(Ragged.of([[0, 5, 6, 2], [0, 7, 2]]), pad_id=1)
    with torch.no_grad():
        states = encoder(tokens, numbers)
    shares = mixture.weights.detach().double().softmax(0)
    for row, language in enumerate(("ja", "de", "en")):
        expected = torch.zeros(7, 64, dtype=torch.float64)
        for n, of_layer in enumerate(states):
            W = torch.eye(64) if language == "en" else maps[row, n]
            for token in range(7):
                expected[token] += shares[n] * (of_layer[token].double() @ W.double())
        found = mixture(encoder, tokens, language).double()
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_mixture_weights_can_select_a_layer() -> None:
    layers = torch.randn(3, 5, 2, generator=torch.Generator().manual_seed(0))
    chosen = mix_layers(layers, torch.tensor([-50.0, 50.0, -50.0]))
    torch.testing.assert_close(chosen, layers[1])


@given(st.integers(0, 1000), st.integers(1, 9), st.integers(1, 12))
def test_best_spans_match_a_loop(seed: int, n_places: int, longest: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    starts, ends = torch.randn(2, 4, n_places, generator=generator)
    may_answer = torch.rand(4, n_places, generator=generator) < 0.7
    firsts, lasts, scores = find_best_spans(starts, ends, may_answer, longest)
    for row in range(4):
        places = [place for place in range(n_places) if may_answer[row, place]]
        spans = {
            (first, last): float(starts[row, first] + ends[row, last])
            for first in places
            for last in places
            if first <= last < first + longest
        }
        if spans:
            found = (int(firsts[row]), int(lasts[row]))
            assert spans[found] == max(spans.values()) == float(scores[row])
        else:
            assert scores[row] == -torch.inf


def test_the_first_and_shortest_of_equal_spans_is_returned() -> None:
    zeros, every = torch.zeros(1, 5), torch.ones(1, 5, dtype=torch.bool)
    first, last, score = find_best_spans(zeros, zeros, every, 3)
    assert (int(first), int(last), float(score)) == (0, 0, 0)
