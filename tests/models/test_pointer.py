"""The pointer network against torch's attention, by hand, and where its weights come from."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from calque.models.heads import INITIAL_SPREAD, PointerNetwork


def make_pointer(hidden_size: int, seed: int = 0) -> PointerNetwork:
    return PointerNetwork(hidden_size, torch.Generator().manual_seed(seed))


def draw(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def test_two_words_by_hand() -> None:
    pointer = make_pointer(1)
    with torch.no_grad():
        pointer.query.weight.fill_(2.0)
        pointer.query.bias.fill_(1.0)
        pointer.key.weight.fill_(3.0)
    # Queries 2·1 + 1 = 3 and 2·(−1) + 1 = −1, keys 3·0.5 and 3·2, √d = 1.
    scores = pointer(torch.tensor([[1.0], [-1.0]]), torch.tensor([[0.5], [2.0]]))
    assert scores.tolist() == [[4.5, 18.0], [-1.5, -6.0]]


def test_probabilities_are_those_of_attention_with_a_bias_of_keys() -> None:
    """Torch's attention has three projections; its keys' bias must make no difference."""
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
    asking, answering = draw(2, 5, 12, seed=4), draw(2, 7, 12, seed=5)
    _, expected = attention(asking, answering, answering)
    found = pointer(asking, answering).softmax(dim=-1)
    torch.testing.assert_close(found, expected)
    assert found.std() > 0.1


def test_what_is_sought_gives_the_scores() -> None:
    pointer, asking, answering = make_pointer(8), draw(3, 8), draw(4, 8, seed=1)
    torch.testing.assert_close(pointer.seek(asking) @ answering.mT, pointer(asking, answering))
    queries, keys = pointer.query(asking), pointer.key(answering)
    expected = queries @ keys.mT / math.sqrt(8)
    torch.testing.assert_close(pointer(asking, answering), expected)


def test_weights_come_from_the_generator_alone() -> None:
    before = torch.random.get_rng_state()
    one, again, other = make_pointer(40, 5), make_pointer(40, 5), make_pointer(40, 6)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(one.query.weight, again.query.weight)
    assert torch.equal(one.key.weight, again.key.weight)
    assert not torch.equal(one.query.weight, other.query.weight)
    assert one.query.weight.std().item() == pytest.approx(INITIAL_SPREAD, rel=0.05)
    assert one.query.bias.eq(0).all()
    assert {name for name, _ in one.named_parameters()} == {
        "query.weight",
        "query.bias",
        "key.weight",
    }
