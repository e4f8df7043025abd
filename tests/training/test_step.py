"""One step: weighted sums, names, freezing, and which weights decay."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from calque.errors import InputError
from calque.models.encoder import Encoder
from calque.objectives.base import Objective
from calque.training.recipe import Recipe
from calque.training.step import TrainStep, build_optimizer, freeze, name_objectives
from calque.types import LossTerms

MakeRecipe = Callable[..., Recipe]


class Multiple(Objective):
    """An objective whose loss is its batch times a weight of its own."""

    def __init__(self, kind: str, weight: float) -> None:
        super().__init__(SimpleNamespace(kind=kind, weight=weight))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, encoder: Any, batch: Tensor) -> LossTerms:
        loss = self.scale * batch
        return LossTerms(loss, {"twice": 2 * loss})


def make_step(*parts: tuple[str, float]) -> TrainStep:
    objectives: Any = [Multiple(kind, weight) for kind, weight in parts]
    encoder: Any = nn.Linear(1, 1)
    return TrainStep(encoder, objectives)


def test_losses_are_summed_by_weight_and_told_apart() -> None:
    step = make_step(("a", 1.0), ("b", 0.5))
    total, figures = step([torch.tensor(3.0), torch.tensor(10.0)])
    assert total.item() == 6.0 + 0.5 * 20.0
    assert {k: v.item() for k, v in figures.items()} == {
        "a": 6.0,
        "a/twice": 12.0,
        "b": 20.0,
        "b/twice": 40.0,
    }
    assert not any(value.requires_grad for value in figures.values())
    torch.autograd.backward(total)
    gradients = [parameter.grad for parameter in step.objectives.parameters()]
    assert gradients == [torch.tensor(3.0), torch.tensor(5.0)]


def test_an_objective_without_a_batch_is_left_out() -> None:
    step = make_step(("a", 1.0), ("a", 0.5))
    total, figures = step([None, torch.tensor(10.0)])
    assert total.item() == 10.0
    assert list(figures) == ["a_2", "a_2/twice"]


class Prepared(Multiple):
    """An objective that adds to its batch what the encoder says."""

    def prepare(self, encoder: Any, batch: Tensor) -> Tensor:
        return batch + encoder.bias.detach()[0]


@pytest.mark.parametrize("training", [True, False])
def test_batches_are_prepared_with_the_encoder(training: bool) -> None:
    encoder: Any = nn.Linear(1, 1)
    nn.init.constant_(encoder.bias, 10.0)
    step = TrainStep(encoder, [Prepared("a", 1.0)]).train(training)
    total, _ = step([torch.tensor(3.0)])
    assert total.item() == 2.0 * 13.0


def test_objectives_of_one_kind_are_numbered() -> None:
    kinds = [Multiple(kind, 1.0) for kind in ("mlm", "tlm", "mlm")]
    assert name_objectives(kinds) == ["mlm_1", "tlm", "mlm_2"]


def test_freezing_by_pattern(tiny_encoder: Encoder) -> None:
    encoder = deepcopy(tiny_encoder)
    n_frozen = freeze(encoder, ["*.embeddings.*", "*.layer.0.*"])
    named = dict(encoder.named_parameters())
    frozen = {name for name, parameter in named.items() if not parameter.requires_grad}
    expected = {n for n in named if ".embeddings." in n or ".layer.0." in n}
    assert frozen - expected <= {"model.lm_head.decoder.weight"}  # the embeddings by another name
    assert expected <= frozen
    assert not encoder.model.get_input_embeddings().weight.requires_grad
    assert 0 < len(frozen) < len(named)
    assert n_frozen == sum(named[name].numel() for name in frozen)
    assert freeze(encoder, []) == n_frozen


def test_a_pattern_that_matches_nothing_is_refused(tiny_encoder: Encoder) -> None:
    encoder = deepcopy(tiny_encoder)
    with pytest.raises(
        InputError, match=r"freeze: '\*\.layer\.7\.\*' matches no parameter.*model\."
    ):
        freeze(encoder, ["*.embeddings.*", "*.layer.7.*"])


@pytest.mark.parametrize("patterns", [["!*.layer.0.*"], ["*.embeddings.*", "!*.layer.0.*"]])
def test_a_pattern_that_takes_nothing_back_is_refused(
    patterns: list[str], tiny_encoder: Encoder
) -> None:
    """As if `!…` alone meant that all else is frozen: nothing would be, without a word."""
    problem = r"freeze: '!\*\.layer\.0\.\*' takes nothing back \(.*such as 'model\.\*'\)"
    with pytest.raises(InputError, match=problem):
        freeze(deepcopy(tiny_encoder), patterns)


def test_matrices_decay_and_vectors_do_not(tiny_encoder: Encoder, tiny_recipe: MakeRecipe) -> None:
    encoder = deepcopy(tiny_encoder)
    settings = tiny_recipe(
        "optimizer.weight_decay=0.3", "optimizer.betas=[0.8, 0.95]", "optimizer.epsilon=1e-7"
    ).optimizer
    optimizer = build_optimizer(encoder, settings)
    decay = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert len(decay) == len(list(encoder.parameters()))
    for name, parameter in encoder.named_parameters():
        plain = name.endswith("bias") or "LayerNorm" in name or "layer_norm" in name
        assert decay[id(parameter)] == (0.0 if plain else 0.3), name
    for group in optimizer.param_groups:
        assert (group["betas"], group["eps"]) == ((0.8, 0.95), 1e-7)


def test_frozen_weights_are_not_optimised(tiny_encoder: Encoder, tiny_recipe: MakeRecipe) -> None:
    encoder = deepcopy(tiny_encoder)
    freeze(encoder, ["*weight"])
    (group,) = build_optimizer(encoder, tiny_recipe().optimizer).param_groups
    assert {id(p) for p in group["params"]} == {
        id(p) for n, p in encoder.named_parameters() if n.endswith("bias")
    }
    freeze(encoder, ["*"])
    with pytest.raises(InputError, match="every parameter is frozen"):
        build_optimizer(encoder, tiny_recipe().optimizer)
