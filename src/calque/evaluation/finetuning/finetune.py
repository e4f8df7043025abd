"""The fine-tuning loop: train an encoder and a head on the examples of a task, and predict."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from calque.errors import InputError
from calque.evaluation.finetuning.optimizer_step import OptimizerStep, working_precision
from calque.models.attention import MAX_ROW_LENGTH
from calque.models.pooling import BATCH_TOKENS
from calque.tokens.layout import fit_batch_shape
from calque.tokens.ragged import batch_by_length, batch_in_order
from calque.tokens.sampling import derive_seed

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from calque.evaluation.finetuning.head_model import BatchT, Examples, HeadModel
    from calque.evaluation.settings import TaskSettings
    from calque.tokens.ragged import BatchShape

    IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class FinetuneResult:
    """Mean loss of every epoch, and the epoch whose weights the model has."""

    losses: list[float]
    dev_scores: list[float]
    epoch: int  # counted from 1
    n_updates: int
    n_tokens: int
    seconds: float


def fine_tune(
    model: HeadModel,
    examples: Examples[BatchT],
    settings: TaskSettings,
    *,
    seed: int,
    score_dev: Callable[[], float] | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> FinetuneResult:
    """Train a model in place; the same seed on the same machine gives the same weights.

    Every epoch has new random batches within a budget of real tokens. On CUDA all of them have one
    shape and are on the device before the epoch starts, and no step waits for the device. With
    `select="best"`, `score_dev` (higher is better) decides after every epoch which one to keep.
    """
    if not len(examples.lengths):
        raise InputError("there are no training examples", fix="add a training file")
    device = next(model.parameters()).device
    started, done = time.perf_counter(), 0
    plans = [
        plan_epoch(examples.lengths, settings, seed, epoch) for epoch in range(settings.epochs)
    ]
    shape = _choose_shape(examples.lengths, plans, device)
    n_updates = sum(map(len, plans))
    best = _BestWeights(model) if settings.select == "best" and score_dev else None
    losses: list[float] = []
    with _seeded(seed, device), _on_device(device):
        update = OptimizerStep(
            model, settings, n_updates, can_replay=_can_replay(model, settings, shape)
        )
        for plan in plans:
            model.train()
            batches = [examples.collate(rows, shape).to(device) for rows in plan]
            found = []
            for batch in batches:
                found.append(update(batch, done))
                done += 1
                on_progress(done, n_updates)
            losses.append(_mean_loss(found, len(losses) + 1))
            if best is not None and score_dev is not None:
                best.offer(score_dev())
    epoch = settings.epochs if best is None else best.restore()
    model.eval()
    # Each loss belongs to the weights before the step; this checks the weights after the last one.
    with _on_device(device), torch.no_grad(), working_precision(model, settings):
        _check_loss(float(model(batches[-1])), "after the last step")
    return FinetuneResult(
        losses,
        [] if best is None else best.scores,
        epoch,
        n_updates,
        int(examples.lengths.sum()) * settings.epochs,
        time.perf_counter() - started,
    )


def predict(
    model: HeadModel,
    examples: Examples[BatchT],
    settings: TaskSettings,
    predict_batch: Callable[[BatchT], Any],
    batch_tokens: int | None = None,
) -> Iterator[tuple[IntArray, BatchT, Any]]:
    """Yield rows, their batch and its predictions; similar lengths together, longest first.

    Predictions stay on the device, and the next batch does not wait for them: read them afterwards.
    """
    device = next(model.parameters()).device
    budget = batch_tokens or BATCH_TOKENS.get(device.type, BATCH_TOKENS["cpu"])
    was_training = model.training
    model.eval()
    try:
        for rows in batch_by_length(examples.lengths, budget):
            batch = examples.collate(rows).to(device)
            with torch.no_grad(), working_precision(model, settings):
                found = predict_batch(batch)
            yield rows, batch, found
    finally:
        model.train(was_training)


def plan_epoch(lengths: IntArray, settings: TaskSettings, seed: int, epoch: int) -> list[IntArray]:
    """Return the random batches of an epoch, in which every example occurs once.

    They have a number of examples if `batch_examples` is set, otherwise a budget of tokens.
    """
    order = np.random.default_rng([seed, epoch]).permutation(len(lengths))
    if settings.batch_examples is not None:
        size = settings.batch_examples
        return [order[start : start + size] for start in range(0, len(order), size)]
    longest, batch_tokens = int(lengths.max()), settings.batch_tokens
    if longest > batch_tokens:
        raise InputError(
            f"an example has {longest} tokens, but batch_tokens is {batch_tokens}",
            fix="raise batch_tokens or lower max_length",
        )
    return [order[batch] for batch in batch_in_order(lengths[order], batch_tokens)]


class _BestWeights:
    """Keeps the weights of the epoch with the highest score, the earliest one of several."""

    def __init__(self, model: HeadModel) -> None:
        self.model, self.scores = model, list[float]()
        self._weights: dict[str, Tensor] = {}

    def offer(self, score: float) -> None:
        if score > max(self.scores, default=-math.inf):
            trained = self.model.named_parameters()
            self._weights = {n: p.detach().clone() for n, p in trained if p.requires_grad}
        self.scores.append(score)

    @torch.no_grad()
    def restore(self) -> int:
        for name, weight in self.model.named_parameters():
            if name in self._weights:
                weight.copy_(self._weights[name])
        return 1 + self.scores.index(max(self.scores))


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the random numbers of the block, and restore the global state afterwards."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(derive_seed(seed, 0))
        yield


def _on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make a CUDA device the current one, which CUDA graphs require."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _choose_shape(
    lengths: IntArray, plans: list[list[IntArray]], device: torch.device
) -> BatchShape | None:
    """Return one shape for all batches on CUDA; on a CPU padding would cost more than it saves."""
    if device.type != "cuda":
        return None
    return fit_batch_shape(lengths, [batch for plan in plans for batch in plan])


def _can_replay(model: HeadModel, settings: TaskSettings, shape: BatchShape | None) -> bool:
    """Return whether a step can be recorded as a CUDA graph.

    A graph must not wait for the device, which attention over long rows with dropout or single
    precision does. The flash kernel and layers that cannot be fused have not been tested.
    """
    if shape is None or not settings.graphs or not model.can_replay:
        return False
    return shape.row <= MAX_ROW_LENGTH and model.encoder.can_fuse


def _mean_loss(losses: list[Tensor], epoch: int) -> float:
    """Return the mean loss of an epoch; only here the loop waits for the device."""
    mean = float(torch.stack(losses).mean())
    _check_loss(mean, f"of epoch {epoch}")
    return mean


def _check_loss(loss: float, when: str) -> None:
    if not math.isfinite(loss):
        fix = "lower learning_rate and head_learning_rate"
        raise InputError(f"the training loss {when} is {loss}", fix=fix)
