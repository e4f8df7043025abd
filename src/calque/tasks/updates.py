"""One update of fine-tuning: loss, gradients, clipping, AdamW, all without waiting for a device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from calque.tasks.precision import working_precision
from calque.tasks.replay import Replayed
from calque.training.schedule import rate_factor
from calque.types import InputError

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from calque.tasks.head_task import DeviceBatch, HeadModel
    from calque.tasks.task_settings import TaskSettings

BETAS, EPSILON = (0.9, 0.999), 1e-8


class Update:
    """Takes the updates of a run: learning rates rise over the warm-up, then fall linearly."""

    def __init__(
        self, model: HeadModel, settings: TaskSettings, n_updates: int, *, replays: bool = False
    ) -> None:
        self.model, self.settings, self.n_updates = model, settings, n_updates
        self.optimizer = build_optimizer(model, settings)
        self.peaks = [group["peak"] for group in self.optimizer.param_groups]
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        take: Callable[[Any], Tensor] = self._take
        self._follow = Replayed(take) if replays else take

    def __call__(self, batch: DeviceBatch, number: int) -> Float[Tensor, ""]:
        """Take update `number`, counted from 0; return the loss, still on the device."""
        self._set_rates(number)
        return self._follow(batch)

    def _set_rates(self, number: int) -> None:
        # The last update is to count as well: the rate reaches 0 one step after it.
        warmup = math.ceil(self.settings.warmup * self.n_updates)
        factor = rate_factor(number + 1, kind="linear", warmup=warmup, steps=self.n_updates + 1)
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(factor * peak)
            else:
                group["lr"] = factor * peak

    def _take(self, batch: Any) -> Tensor:
        with working_precision(self.model, self.settings):
            loss: Tensor = self.model(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.parameters, self.settings.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def build_optimizer(model: HeadModel, settings: TaskSettings) -> torch.optim.AdamW:
    """Make AdamW with a rate for the encoder and one for the head, decay on matrices only."""
    body = {id(parameter) for parameter in model.encoder.parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise InputError("nothing to train", fix="give the task a head")
    cuda = trained[0].is_cuda
    groups: list[dict[str, Any]] = []
    for in_body, rate in ((True, settings.learning_rate), (False, settings.head_learning_rate)):
        for decays in (True, False):
            members = [p for p in trained if (id(p) in body) == in_body and (p.ndim >= 2) == decays]
            if members:
                groups.append(
                    {
                        "params": members,
                        "lr": torch.tensor(rate, device=members[0].device) if cuda else rate,
                        "peak": rate,
                        "weight_decay": settings.weight_decay if decays else 0.0,
                    }
                )
    return torch.optim.AdamW(groups, betas=BETAS, eps=EPSILON, fused=cuda, capturable=cuda)
