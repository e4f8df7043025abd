"""An update recorded as a CUDA graph: one launch instead of a thousand, which small models need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

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
