"""Weights averaged over time: exponentially (EMA) or over the last checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from calque.training import checkpoints
from calque.training.processes import gather_tensor

if TYPE_CHECKING:
    from torch import Tensor, nn

    from calque.training.recipe import Recipe

PREFIX = "average."


class WeightAverage:
    """Keeps what a recipe's `average` asks for; without one it does nothing."""

    def __init__(self, recipe: Recipe) -> None:
        self.settings = recipe.average
        self.every, self.n_steps = recipe.checkpoints.every, recipe.schedule.steps
        self.shadow: dict[str, Tensor] = {}
        self._update: Any = get_ema_multi_avg_fn(self.settings.decay)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        """Take the weights after a step into the running average; it begins with the first."""
        if self.settings.kind != "ema":
            return
        current = dict(module.named_parameters())
        if not self.shadow:
            self.shadow = {name: value.detach().clone() for name, value in current.items()}
            return
        names = list(self.shadow)
        self._update([self.shadow[n] for n in names], [current[n] for n in names], 0)

    def tensors(self) -> dict[str, Tensor]:
        """Give what a checkpoint must keep; where weights are sharded, on every process."""
        return {PREFIX + name: gather_tensor(value) for name, value in self.shadow.items()}

    def restore(self, tensors: Mapping[str, Tensor], module: nn.Module) -> None:
        """Take back what `tensors` gave, on the devices and in the shards of the module."""
        if self.settings.kind == "ema":
            self.shadow = {
                name: _lay_out_like(tensors[PREFIX + name], value.detach())
                for name, value in module.named_parameters()
            }

    def pinned(self, run: Path) -> set[int]:
        """Name the steps that a last-k average needs beside the one about to be saved."""
        if self.settings.kind != "last":
            return set()
        return set(self._choose_steps(run)[1 - self.settings.last :])

    def result(self, run: Path) -> dict[str, Tensor]:
        """Give the averaged weights of the encoder, by their names in `Encoder.model`."""
        if self.settings.kind == "ema":
            whole = {name: gather_tensor(value) for name, value in self.shadow.items()}
            return {name.removeprefix("model."): value for name, value in whole.items()}
        steps = self._choose_steps(run)[-self.settings.last :]
        return checkpoints.average_weights([checkpoints.folder_of(run, step) for step in steps])

    def _choose_steps(self, run: Path) -> list[int]:
        """List the regular checkpoints; those that an interruption left do not count."""
        steps = [checkpoints.step_of(folder) or 0 for folder in checkpoints.list_checkpoints(run)]
        return [step for step in steps if step % self.every == 0 or step == self.n_steps]


def _lay_out_like(whole: Tensor, value: Tensor) -> Tensor:
    """Copy a whole tensor to where a live one lies, cut as that one is cut."""
    if isinstance(value, DTensor):
        return distribute_tensor(whole.to(value.device), value.device_mesh, value.placements)
    return torch.empty_like(value).copy_(whole)
