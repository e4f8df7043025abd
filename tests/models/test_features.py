"""The feature extractor: its shape, its mathematics, and whose random numbers it takes."""

from __future__ import annotations

import torch

from calque.models.heads import FeatureExtractor


def make(hidden: int = 768, n_features: int = 128, seed: int = 1) -> FeatureExtractor:
    return FeatureExtractor(hidden, n_features, torch.Generator().manual_seed(seed))


def test_the_papers_shape_without_biases() -> None:
    shapes = {name: tuple(weight.shape) for name, weight in make().named_parameters()}
    assert shapes == {"hidden.weight": (768, 768), "output.weight": (128, 768)}
    assert all(weight.requires_grad for weight in make().parameters())
    assert make()(torch.randn(5, 768)).shape == (5, 128)


def test_features_by_hand() -> None:
    extractor = make(2, 1)
    with torch.no_grad():
        extractor.hidden.weight.copy_(torch.tensor([[1.0, 2.0], [-3.0, 1.0]]))
        extractor.output.weight.copy_(torch.tensor([[5.0, 7.0]]))
    # W₁ · (1, 1) = (3, −2), of which ReLU leaves (3, 0).
    assert extractor(torch.tensor([[1.0, 1.0]])).tolist() == [[15.0]]


def test_weights_come_from_the_generator_alone() -> None:
    state = torch.get_rng_state()
    one, same, other = make(seed=1), make(seed=1), make(seed=2)
    assert torch.equal(torch.get_rng_state(), state)
    for name, weight in one.named_parameters():
        assert torch.equal(weight, same.get_parameter(name))
        assert not torch.equal(weight, other.get_parameter(name))
    assert not torch.equal(one.hidden.weight[:128], one.output.weight)


def test_weights_are_spread_as_pytorch_spreads_them() -> None:
    extractor = make()
    for layer in (extractor.hidden, extractor.output):
        usual = torch.nn.Linear(layer.in_features, layer.out_features, bias=False)
        spread = usual.weight.std().item()
        assert abs(layer.weight.std().item() / spread - 1) < 0.02
        assert layer.weight.abs().max().item() <= usual.weight.abs().max().item() * 1.001
