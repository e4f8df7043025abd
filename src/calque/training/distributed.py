"""What several processes of one run do together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from calque.errors import InputError
from calque.io.outputs import LONGEST_WAIT, join_processes

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor


@contextmanager
def main_process_first() -> Iterator[bool]:
    """Tell which process is the main one, and let the others wait until it leaves the block."""
    state = join_processes()
    if state.num_processes == 1:
        yield True
        return
    # The default group gives up after some minutes; text may take hours to prepare.
    group = torch.distributed.new_group(backend="gloo", timeout=LONGEST_WAIT)
    yield bool(state.is_main_process)
    try:
        torch.distributed.barrier(group)
    except RuntimeError as error:  # gloo's, when a connection ends
        raise InputError("another process has stopped", fix="see what it says") from error


def gather_tensor(value: Tensor) -> Tensor:
    """Put a sharded tensor together, on every process; any other is returned as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def average_figures(
    accelerator: Accelerator, figures: Mapping[str, Tensor | float]
) -> dict[str, float]:
    """Average figures over the processes; all get the same numbers."""
    device = accelerator.device
    values = [torch.as_tensor(v, dtype=torch.float64, device=device) for v in figures.values()]
    mean = accelerator.reduce(torch.stack(values), reduction="mean")
    return dict(zip(figures, mean.tolist(), strict=True))
