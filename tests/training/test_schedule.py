"""The learning rate against transformers' schedules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

from calque.training.recipe import Recipe
from calque.training.step import rate_factor, set_rate


@pytest.mark.parametrize(("warmup", "steps"), [(4, 20), (0, 7), (6, 7), (1, 2)])
@pytest.mark.parametrize(
    ("kind", "reference"),
    [
        ("linear", get_linear_schedule_with_warmup),
        ("cosine", get_cosine_schedule_with_warmup),
        ("constant", get_constant_schedule_with_warmup),
    ],
)
def test_rates_are_those_of_transformers(
    kind: Any, reference: Callable[..., Any], warmup: int, steps: int
) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    counts = [warmup] if kind == "constant" else [warmup, steps]
    scheduler = reference(optimizer, *counts)
    for step in range(steps + 1):
        ours = rate_factor(step, kind=kind, warmup=warmup, steps=steps)
        assert ours == pytest.approx(scheduler.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        scheduler.step()


def test_every_group_gets_the_rate(tiny_recipe: Callable[..., Recipe]) -> None:
    recipe = tiny_recipe("schedule.warmup=4", "schedule.steps=8", "optimizer.learning_rate=0.2")
    weights = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": [w]} for w in weights], lr=9.0)
    for step, rate in ((1, 0.05), (4, 0.2), (6, 0.1), (8, 0.0)):
        assert set_rate(optimizer, recipe, step) == pytest.approx(rate)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([rate] * 2)


def test_it_warms_up_again_when_all_weights_learn(tiny_recipe: Callable[..., Recipe]) -> None:
    changes = ("schedule.warmup=4", "schedule.steps=20", "schedule.kind=constant")
    recipe = tiny_recipe(*changes, "freeze=['encoder.*']", "freeze_steps=6")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=9.0)
    top = recipe.optimizer.learning_rate
    found = [set_rate(optimizer, recipe, step) / top for step in range(1, 12)]
    assert found == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 0.25, 0.5, 0.75, 1, 1])
