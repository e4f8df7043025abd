"""Weights averaged over time: exponentially (EMA) or over the last checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from calque.training import checkpoints

if TYPE_CHECKING:
    from torch import Tensor, nn

    from calque.training.recipe import AverageSection

PREFIX = "average."


class WeightAverage:
    """Keeps what a recipe's `average` asks for; without one it does nothing."""

    def __init__(self, settings: AverageSection, module: nn.Module) -> None:
        self.settings = settings
        self.shadow: dict[str, Tensor] = {}
        if settings.kind == "ema":
            self.shadow = {n: p.detach().clone() for n, p in module.named_parameters()}
            self._update = get_ema_multi_avg_fn(settings.decay)

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        """Take the weights after a step into the running average."""
        if self.shadow:
            current = dict(module.named_parameters())
            names = list(self.shadow)
            self._update([self.shadow[n] for n in names], [current[n] for n in names], 0)

    def tensors(self) -> dict[str, Tensor]:
        """Give what a checkpoint must keep."""
        return {PREFIX + name: value for name, value in self.shadow.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `tensors` gave."""
        for name, value in self.shadow.items():
            value.copy_(tensors[PREFIX + name])

    def pinned(self, run: Path, step: int) -> set[int]:
        """Name the steps whose checkpoints a last-k average still needs."""
        if self.settings.kind != "last":
            return set()
        folders = checkpoints.list_checkpoints(run)[-self.settings.last :]
        return {int(folder.name.split("-")[1]) for folder in folders} | {step}

    @torch.no_grad()
    def apply(self, module: nn.Module, run: Path, prefix: str) -> None:
        """Put the averaged weights into the module; `prefix` leads from it to the saved model."""
        if self.settings.kind == "ema":
            for name, parameter in module.named_parameters():
                parameter.copy_(self.shadow[name])
        if self.settings.kind == "last":
            folders = checkpoints.list_checkpoints(run)[-self.settings.last :]
            state = checkpoints.average_weights(folders)
            module.load_state_dict({prefix + k: v for k, v in state.items()}, strict=False)
