"""Averaged weights: EMA against torch's AveragedModel, last-k by hand."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.optim import swa_utils
from torch.optim.swa_utils import AveragedModel

from calque.training.checkpoints import WeightAverage, write_checkpoint
from calque.training.recipe import Recipe

MakeRecipe = Callable[..., Recipe]
make_rule: Any = swa_utils.get_ema_multi_avg_fn


class Wrapper(nn.Module):
    """As an Encoder keeps its model."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Any = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def move(module: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator))


def test_ema_is_that_of_torch(tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    module = Wrapper()
    reference: Any = AveragedModel(module, multi_avg_fn=make_rule(0.9))
    average = WeightAverage(tiny_recipe("average.kind=ema", "average.decay=0.9"))
    for step in range(6):
        move(module, step)
        average.update(module)
        reference.update_parameters(module)
    result = average.result(tmp_path)
    expected = reference.module.model.state_dict()
    assert result.keys() == expected.keys()
    assert all(torch.equal(result[name], expected[name]) for name in expected)
    assert not torch.equal(result["0.weight"], module.model[0].weight)


def test_ema_goes_on_after_a_restore(tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    module = Wrapper()
    average, restored = (WeightAverage(tiny_recipe("average.kind=ema")) for _ in range(2))
    for step in range(3):
        move(module, step)
        average.update(module)
    kept = {name: value.clone() for name, value in average.tensors().items()}
    assert all(name.startswith("average.model.") for name in kept)
    restored.restore(kept, deepcopy(module))
    move(module, 3)
    for one in (average, restored):
        one.update(module)
    left, right = average.result(tmp_path), restored.result(tmp_path)
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_without_an_average_nothing_is_kept(tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    average = WeightAverage(tiny_recipe())
    average.update(Wrapper())
    assert average.tensors() == {}
    assert average.pinned(tmp_path) == set()
    average.restore({}, Wrapper())


def write_step(run: Path, step: int, pinned: set[int]) -> None:
    def save_model(folder: Path) -> None:
        save_file({"w": torch.full((2,), float(step))}, folder / "model.safetensors")

    write_checkpoint(run, step, save_model, {}, {}, 1, pinned)


def test_the_last_regular_checkpoints_are_kept_and_averaged(
    tiny_recipe: MakeRecipe, tmp_path: Path
) -> None:
    recipe = tiny_recipe(
        "average.kind=last", "average.last=3", "checkpoints.every=10", "schedule.steps=45"
    )
    average = WeightAverage(recipe)
    kept = []
    for step in (10, 20, 25, 30, 40, 45):  # 25: an interruption
        write_step(tmp_path, step, average.pinned(tmp_path))
        kept.append(
            sorted(int(path.name.removeprefix("step-")) for path in tmp_path.glob("step-*"))
        )
    assert kept == [[10], [10, 20], [10, 20, 25], [10, 20, 30], [20, 30, 40], [30, 40, 45]]
    assert average.result(tmp_path)["w"].tolist() == pytest.approx([(30 + 40 + 45) / 3] * 2)
