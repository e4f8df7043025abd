"""One training step: weighted losses, names of objectives, and the check for finite values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from calque.objectives.base import Objective
from calque.training.step import Diverged, NonfiniteGuard, TrainStep, name_objectives
from calque.types import LossTerms

GOOD = torch.tensor(1.5)


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


def test_losses_are_summed_by_weight() -> None:
    step = make_step(("a", 1.0), ("b", 0.5))
    total, metrics = step([torch.tensor(3.0), torch.tensor(10.0)])
    assert total.item() == 6.0 + 0.5 * 20.0
    assert {k: v.item() for k, v in metrics.items()} == {
        "a": 6.0,
        "a/twice": 12.0,
        "b": 20.0,
        "b/twice": 40.0,
    }
    assert not any(value.requires_grad for value in metrics.values())
    torch.autograd.backward(total)
    gradients = [parameter.grad for parameter in step.objectives.parameters()]
    assert gradients == [torch.tensor(3.0), torch.tensor(5.0)]


def test_objective_without_a_batch_is_left_out() -> None:
    step = make_step(("a", 1.0), ("a", 0.5))
    total, metrics = step([None, torch.tensor(10.0)])
    assert total.item() == 10.0
    assert list(metrics) == ["a_2", "a_2/twice"]


class Prepared(Multiple):
    """An objective that adds a bias of the encoder to its batch."""

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


@pytest.fixture
def guard() -> NonfiniteGuard:
    return NonfiniteGuard(Accelerator(cpu=True))


def test_finite_numbers_pass(guard: NonfiniteGuard) -> None:
    guard.check()
    guard.record(1, {"masked_lm": GOOD, "masked_lm/accuracy": GOOD}, {"masked_lm": 0})
    guard.record(1, {"the gradient": GOOD}, {})
    guard.check()
    guard.check()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_first_bad_value_is_named(guard: NonfiniteGuard, value: float) -> None:
    bad = torch.tensor(value)
    batches = {"masked_lm": 16, "translation_lm": 17}
    guard.record(8, {"masked_lm": GOOD, "translation_lm": GOOD}, batches)
    guard.record(9, {"masked_lm": GOOD, "translation_lm": bad}, batches)
    guard.record(9, {"the gradient": bad}, {})
    with pytest.raises(
        Diverged, match=r"^translation_lm is not finite at step 9, batch 17 of its stream \(lower"
    ):
        guard.check()
    guard.check()


def test_metric_is_reported_with_the_batch_of_its_objective(guard: NonfiniteGuard) -> None:
    guard.record(2, {"mlm": GOOD, "mlm/accuracy": torch.tensor(torch.nan)}, {"mlm": 5})
    with pytest.raises(Diverged, match=r"^mlm/accuracy is not finite at step 2, batch 5"):
        guard.check()


def test_gradient_is_reported_without_a_batch(guard: NonfiniteGuard) -> None:
    guard.record(2, {"mlm": GOOD.bfloat16()}, {"mlm": 5})
    guard.record(2, {"the gradient": torch.tensor(torch.inf)}, {})
    with pytest.raises(Diverged, match=r"^the gradient is not finite at step 2 \("):
        guard.check()
