"""Cooperation of the processes of one run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from calque.errors import InputError
from calque.io.shards import LONGEST_WAIT, process_state

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor


@contextmanager
def main_process_first() -> Iterator[bool]:
    """Yield whether this is the main process; the others wait until it leaves the block."""
    state = process_state()
    if state.num_processes == 1:
        yield True
        return
    # The default group has a timeout of some minutes, but preparing text may take hours.
    group = torch.distributed.new_group(backend="gloo", timeout=LONGEST_WAIT)
    yield bool(state.is_main_process)
    try:
        torch.distributed.barrier(group)
    except RuntimeError as error:  # gloo raises it when a connection is closed
        raise InputError("another process has stopped", fix="see its error message") from error


def gather_tensor(value: Tensor) -> Tensor:
    """Return the whole of a sharded tensor, on every process, or a plain tensor unchanged."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def average_metrics(
    accelerator: Accelerator, metrics: Mapping[str, Tensor | float]
) -> dict[str, float]:
    """Return the mean of every metric over the processes, on all of them."""
    device = accelerator.device
    values = [torch.as_tensor(v, dtype=torch.float64, device=device) for v in metrics.values()]
    mean = accelerator.reduce(torch.stack(values), reduction="mean")
    return dict(zip(metrics, mean.tolist(), strict=True))
