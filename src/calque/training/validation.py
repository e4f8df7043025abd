"""Losses on text kept aside: the same batches with the same masks every time."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import torch
from torch.distributed.fsdp import FSDPModule

from calque.training.processes import average_figures

if TYPE_CHECKING:
    from torch import Tensor

    from calque.training.run import Run


@torch.no_grad()
def validate(run: Run) -> dict[str, float]:
    """Measure every objective's loss; without text kept aside there is nothing to measure."""
    totals: dict[str, Tensor | float] = defaultdict(float)
    run.wrapped.eval()
    for batches in run.validation_batches:
        on_device = [batch and batch.to(run.accelerator.device) for batch in batches]
        with run.accelerator.autocast():
            _, figures = run.wrapped(on_device)
        for name, value in figures.items():
            totals[f"loss/{name}"] += value / len(run.validation_batches)
    for objective in run.objectives if totals else []:
        objective.after_validation()
    run.wrapped.train()
    if isinstance(run.wrapped, FSDPModule):
        run.wrapped.reshard()  # with no backward pass to do it, the outermost part stays whole
    return average_figures(run.accelerator, totals) if totals else {}
