"""One optimizer step of fine-tuning: loss, gradients, clipping, AdamW; optionally a CUDA graph."""

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

    from calque.evaluation.finetuning.head_model import DeviceBatch, HeadModel
    from calque.evaluation.settings import TaskSettings

BETAS, EPSILON = (0.9, 0.999), 1e-8
# Steps before the recording, in which libraries and the optimizer create their state.
N_WARMUP_STEPS = 3


class OptimizerStep:
    """The optimizer steps of a run: the learning rates rise during warm-up, then fall linearly."""

    def __init__(
        self, model: HeadModel, settings: TaskSettings, n_updates: int, *, can_replay: bool = False
    ) -> None:
        self.model, self.settings, self.n_updates = model, settings, n_updates
        self.optimizer = build_optimizer(model, settings)
        self.peaks = [group["peak"] for group in self.optimizer.param_groups]
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        step: Callable[[Any], Tensor] = self._step
        self._run = GraphReplay(step) if can_replay else step

    def __call__(self, batch: DeviceBatch, number: int) -> Float[Tensor, ""]:
        """Run step `number`, counted from 0, and return the loss, still on the device."""
        self._set_learning_rates(number)
        return self._run(batch)

    def _set_learning_rates(self, number: int) -> None:
        # The rate reaches 0 one step after the last, so that the last step counts too.
        warmup = math.ceil(self.settings.warmup * self.n_updates)
        factor = learning_rate_factor(
            number + 1, kind="linear", warmup=warmup, steps=self.n_updates + 1
        )
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(factor * peak)
            else:
                group["lr"] = factor * peak

    def _step(self, batch: Any) -> Tensor:
        with working_precision(self.model, self.settings):
            loss: Tensor = self.model(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.parameters, self.settings.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def build_optimizer(model: HeadModel, settings: TaskSettings) -> torch.optim.AdamW:
    """Return AdamW with separate rates for encoder and head; only matrices decay."""
    body = {id(parameter) for parameter in model.encoder.parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise InputError("no weight of the model is trained", fix="use a task with a head")
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


@contextmanager
def working_precision(model: HeadModel, settings: TaskSettings) -> Iterator[None]:
    """Compute in bfloat16 on CUDA, with fused layers where the encoder supports them."""
    device = next(model.parameters()).device
    half = device.type == "cuda" and settings.precision == "bf16"
    fused, model.encoder.use_fused_layers = (
        model.encoder.use_fused_layers,
        half and model.encoder.can_fuse,
    )
    try:
        # With a cache, a replayed step would use the weights of the previous step.
        with torch.autocast(device.type, torch.bfloat16, enabled=half, cache_enabled=False):
            yield
    finally:
        model.encoder.use_fused_layers = fused


class GraphReplay:
    """Runs some steps normally, then records one as a CUDA graph and replays it for other batches.

    One launch replaces about a thousand, which matters for small models. A batch of another shape
    than the recorded one is run normally. Random numbers advance as they would without a graph, so
    a seed still determines the result.
    """

    def __init__(self, step: Callable[[Any], Tensor]) -> None:
        self.step = step
        self.n_steps = 0
        self.stream: torch.cuda.Stream | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.batch: Any = None
        self.loss: Tensor | None = None

    def __call__(self, batch: Any) -> Tensor:
        """Run one step and return its loss, still on the device."""
        self.n_steps += 1
        if self.n_steps <= N_WARMUP_STEPS:
            return self._warm_up(batch)
        if self.graph is None:
            self._record(batch)
        assert self.graph is not None and self.loss is not None
        if tensor_sizes(batch) != tensor_sizes(self.batch):
            return self.step(batch)
        copy_tensors(batch, self.batch)
        self.graph.replay()
        return self.loss.clone()

    def _warm_up(self, batch: Any) -> Tensor:
        """Run a step on a side stream, as CUDA graphs require before recording."""
        if self.stream is None:
            self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            loss = self.step(batch)
        torch.cuda.current_stream().wait_stream(self.stream)
        return loss

    def _record(self, batch: Any) -> None:
        self.batch = clone_tensors(batch)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.loss = self.step(self.batch)


def list_tensors(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch and of nested batches, in the order of their fields."""
    found: list[Tensor] = []
    for field in fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif is_dataclass(value):
            found += list_tensors(value)
    return found


def tensor_sizes(batch: Any) -> list[torch.Size]:
    """Return the sizes of all tensors of a batch."""
    return [tensor.shape for tensor in list_tensors(batch)]


def copy_tensors(batch: Any, into: Any) -> None:
    """Copy the tensors of a batch into those of another batch of the same sizes."""
    torch._foreach_copy_(list_tensors(into), list_tensors(batch))


def clone_tensors(batch: Any) -> Any:
    """Return a copy of a batch whose tensors may be overwritten."""
    device = list_tensors(batch)[0].device
    copy = batch.to("cpu").to(device)
    torch.cuda.synchronize(device)
    return copy
