"""The numbers a head task computes with: half precision on CUDA, single precision elsewhere.

An update recorded as a CUDA graph: one launch instead of a thousand, which small models need.

One update of fine-tuning: loss, gradients, clipping, AdamW, all without waiting for a device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch

from calque.errors import InputError
from calque.training.optimizer import learning_rate_factor

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from calque.evaluation.finetuning.head_task import DeviceBatch, HeadModel
    from calque.evaluation.settings import TaskSettings


@contextmanager
def working_precision(model: HeadModel, settings: TaskSettings) -> Iterator[None]:
    """Compute in half precision on CUDA, where layers of the BERT kind run fused."""
    device = next(model.parameters()).device
    half = device.type == "cuda" and settings.precision == "bf16"
    fused, model.encoder.use_fused_layers = model.encoder.use_fused_layers, half and model.encoder.can_fuse
    try:
        # Cached casts of weights would be those of the update before in a replayed one.
        with torch.autocast(device.type, torch.bfloat16, enabled=half, cache_enabled=False):
            yield
    finally:
        model.encoder.use_fused_layers = fused


# Updates before the recording: libraries set themselves up in them, the optimizer its state.
N_EAGER = 3


class Replayed:
    """Takes updates as they are at first, then records one and replays it with other batches.

    A batch of another shape than the recorded one is followed as it is. Random numbers go on from
    update to update as they would without recording, so that a seed still decides them.
    """

    def __init__(self, follow: Callable[[Any], Tensor]) -> None:
        self.follow = follow
        self.n_taken = 0
        self.stream: torch.cuda.Stream | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.batch: Any = None
        self.loss: Tensor | None = None

    def __call__(self, batch: Any) -> Tensor:
        """Take one update; return its loss, still on the device."""
        self.n_taken += 1
        if self.n_taken <= N_EAGER:
            return self._warm_up(batch)
        if self.graph is None:
            self._record(batch)
        assert self.graph is not None and self.loss is not None
        if sizes_of(batch) != sizes_of(self.batch):
            return self.follow(batch)
        copy_tensors(batch, self.batch)
        self.graph.replay()
        return self.loss.clone()

    def _warm_up(self, batch: Any) -> Tensor:
        """Take an update beside the main stream, as recording wants it."""
        if self.stream is None:
            self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            loss = self.follow(batch)
        torch.cuda.current_stream().wait_stream(self.stream)
        return loss

    def _record(self, batch: Any) -> None:
        self.batch = clone_tensors(batch)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.loss = self.follow(self.batch)


def tensors_of(batch: Any) -> list[Tensor]:
    """List the tensors of a batch and of the batches in it, in the order of their fields."""
    found: list[Tensor] = []
    for field in fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif is_dataclass(value):
            found += tensors_of(value)
    return found


def sizes_of(batch: Any) -> list[torch.Size]:
    """List the sizes of all tensors of a batch."""
    return [tensor.shape for tensor in tensors_of(batch)]


def copy_tensors(batch: Any, into: Any) -> None:
    """Copy the tensors of a batch over those of another of the same sizes."""
    torch._foreach_copy_(tensors_of(into), tensors_of(batch))


def clone_tensors(batch: Any) -> Any:
    """Copy a batch, so that its tensors may be written over."""
    device = tensors_of(batch)[0].device
    copy = batch.to("cpu").to(device)
    torch.cuda.synchronize(device)
    return copy


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
        factor = learning_rate_factor(number + 1, kind="linear", warmup=warmup, steps=self.n_updates + 1)
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
