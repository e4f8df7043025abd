"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math
from typing import Literal


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
