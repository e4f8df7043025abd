"""Losses on text kept aside: the same batches with the same masks every time."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import torch

from calque.text.streams import Place

if TYPE_CHECKING:
    from calque.training.loop import Trainer


@torch.no_grad()
def validate(trainer: Trainer) -> dict[str, float]:
    """Measure every objective's loss; without text kept aside there is nothing to measure."""
    n_batches = trainer.recipe.checkpoints.validation_batches
    figures: dict[str, float] = {}
    trainer.module.eval()
    for name, objective, pair in zip(
        trainer.names, trainer.module.objectives, trainer.streams, strict=True
    ):
        if pair.validation is None:
            continue
        losses = []
        for _, batch in islice(pair.validation.walk(Place(), lambda count: True), n_batches):
            assert batch is not None
            with trainer.accelerator.autocast():
                terms = objective(trainer.encoder, batch.to(trainer.accelerator.device))
            losses.append(terms.loss)
        figures[f"loss/{name}"] = float(torch.stack(losses).mean())
    trainer.module.train()
    return figures
