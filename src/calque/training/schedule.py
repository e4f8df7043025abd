"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from calque.training.recipe import Recipe


def rate_factor(
    step: int, *, kind: Literal["linear", "cosine", "constant"], warmup: int, steps: int
) -> float:
    """Rise to 1 over the warm-up, then fall to 0 (linear, cosine) or stay (constant).

    >>> [rate_factor(step, kind="linear", warmup=2, steps=6) for step in (0, 1, 2, 4, 6)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    if step < warmup:
        return step / max(1, warmup)
    if kind == "constant":
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    if kind == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    return 1 - progress


def set_rate(optimizer: Optimizer, recipe: Recipe, step: int) -> float:
    """Give an optimizer the learning rate of a step, counted from 1, and return it.

    Weights that were frozen for a time are new to the optimizer: for them, it warms up again.
    """
    schedule, thaw = recipe.schedule, recipe.freeze_steps
    factor = rate_factor(step, kind=schedule.kind, warmup=schedule.warmup, steps=schedule.steps)
    if thaw is not None and step > thaw:
        factor *= min(1.0, (step - thaw) / max(1, schedule.warmup))
    rate = factor * recipe.optimizer.learning_rate
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate
