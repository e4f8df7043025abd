"""The one loop of fine-tuning: an encoder and a head on the examples of a task."""

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
from calque.evaluation.finetuning.updates import Update, working_precision
from calque.models.attention import MAX_ROW_LENGTH
from calque.models.pooling import BATCH_TOKENS
from calque.tokens.layout import fit_batch_shape
from calque.tokens.ragged import batch_by_length, batch_in_order
from calque.tokens.sampling import derive_seed

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from calque.evaluation.finetuning.head_task import B, Examples, HeadModel
    from calque.evaluation.settings import TaskSettings
    from calque.tokens.ragged import BatchShape

    IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class FineTuned:
    """What happened: the mean loss of every epoch, and which epoch's weights the model has."""

    losses: list[float]
    dev_scores: list[float]
    epoch: int  # counted from 1
    n_updates: int
    n_tokens: int
    seconds: float


def fine_tune(
    model: HeadModel,
    examples: Examples[B],
    settings: TaskSettings,
    *,
    seed: int,
    score_dev: Callable[[], float] | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> FineTuned:
    """Train a model in place on examples; the same seed on the same machine, the same weights.

    Every epoch draws its batches anew, within a budget of real tokens. On CUDA all of them have one
    shape and lie on the device before the epoch begins, and no update waits for the device. With
    `select="best"`, `score_dev` (higher is better) decides after every epoch which to keep.
    """
    if not len(examples.lengths):
        raise InputError("no examples to learn from", fix="give a training file")
    device = next(model.parameters()).device
    started, done = time.perf_counter(), 0
    plans = [
        plan_epoch(examples.lengths, settings.batch_tokens, seed, epoch)
        for epoch in range(settings.epochs)
    ]
    shape = _choose_shape(examples.lengths, plans, device)
    n_updates = sum(map(len, plans))
    keeper = _BestWeights(model) if settings.select == "best" and score_dev else None
    losses: list[float] = []
    with _own_randomness(seed, device), _current(device):
        update = Update(model, settings, n_updates, replays=_can_replay(model, settings, shape))
        for plan in plans:
            model.train()
            batches = [examples.collate(rows, shape).to(device) for rows in plan]
            found = []
            for batch in batches:
                found.append(update(batch, done))
                done += 1
                on_progress(done, n_updates)
            losses.append(_mean_loss(found, len(losses) + 1))
            if keeper is not None and score_dev is not None:
                keeper.offer(score_dev())
    epoch = settings.epochs if keeper is None else keeper.restore()
    model.eval()
    # The losses are of weights before each update: what the last one did is seen here alone.
    with _current(device), torch.no_grad(), working_precision(model, settings):
        _check_loss(float(model(batches[-1])), "after the last update")
    return FineTuned(
        losses,
        [] if keeper is None else keeper.scores,
        epoch,
        n_updates,
        int(examples.lengths.sum()) * settings.epochs,
        time.perf_counter() - started,
    )


def predict(
    model: HeadModel,
    examples: Examples[B],
    settings: TaskSettings,
    answer: Callable[[B], Any],
    batch_tokens: int | None = None,
) -> Iterator[tuple[IntArray, B, Any]]:
    """Give rows, their batch and its answer, those of similar length together, longest first.

    Answers stay on the device, and the next batch does not wait for them: read them afterwards.
    """
    device = next(model.parameters()).device
    budget = batch_tokens or BATCH_TOKENS.get(device.type, BATCH_TOKENS["cpu"])
    was_training = model.training
    model.eval()
    try:
        for rows in batch_by_length(examples.lengths, budget):
            batch = examples.collate(rows).to(device)
            with torch.no_grad(), working_precision(model, settings):
                found = answer(batch)
            yield rows, batch, found
    finally:
        model.train(was_training)


def plan_epoch(lengths: IntArray, batch_tokens: int, seed: int, epoch: int) -> list[IntArray]:
    """Draw the batches of an epoch: every example once, in random order."""
    order = np.random.default_rng([seed, epoch]).permutation(len(lengths))
    longest = int(lengths.max())
    if longest > batch_tokens:
        raise InputError(
            f"batch_tokens={batch_tokens} cannot hold an example of {longest} tokens",
            fix="raise batch_tokens or lower max_length",
        )
    return [order[batch] for batch in batch_in_order(lengths[order], batch_tokens)]


class _BestWeights:
    """Keeps the weights of the epoch with the highest score, the earliest of equals."""

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
def _own_randomness(seed: int, device: torch.device) -> Iterator[None]:
    """Draw dropout from the seed, and leave the random state of others as it was."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(derive_seed(seed, 0))
        yield


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Make the model's device the current one: a recording sees no work on any other."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _choose_shape(
    lengths: IntArray, plans: list[list[IntArray]], device: torch.device
) -> BatchShape | None:
    """One shape for all batches, where that saves launches; a CPU rather saves padding."""
    if device.type != "cuda":
        return None
    return fit_batch_shape(lengths, [batch for plan in plans for batch in plan])


def _can_replay(model: HeadModel, settings: TaskSettings, shape: BatchShape | None) -> bool:
    """Tell whether an update is of a kind that was seen to record well.

    A recording bears no waiting for the device, as attention over long rows does that has dropout
    or single precision. With the flash kernel, and in layers that cannot be fused, it was not
    tried on a GPU yet.
    """
    if shape is None or not settings.graphs or not model.replays:
        return False
    return shape.row <= MAX_ROW_LENGTH and model.encoder.can_fuse


def _mean_loss(losses: list[Tensor], epoch: int) -> float:
    """Average an epoch's losses: the one time that the device is waited for."""
    mean = float(torch.stack(losses).mean())
    _check_loss(mean, f"of epoch {epoch}")
    return mean


def _check_loss(loss: float, when: str) -> None:
    if not math.isfinite(loss):
        fix = "lower learning_rate and head_learning_rate"
        raise InputError(f"the loss {when} is {loss}", fix=fix)
