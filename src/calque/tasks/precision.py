"""The numbers a head task computes with: half precision on CUDA, single precision elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from calque.tasks.head_task import HeadModel
    from calque.tasks.task_settings import TaskSettings


@contextmanager
def working_precision(model: HeadModel, settings: TaskSettings) -> Iterator[None]:
    """Compute in half precision on CUDA, where layers of the BERT kind run fused."""
    device = next(model.parameters()).device
    half = device.type == "cuda" and settings.precision == "bf16"
    fused, model.encoder.fuses = model.encoder.fuses, half and model.encoder.can_fuse
    try:
        # Cached casts of weights would be those of the update before in a replayed one.
        with torch.autocast(device.type, torch.bfloat16, enabled=half, cache_enabled=False):
            yield
    finally:
        model.encoder.fuses = fused
