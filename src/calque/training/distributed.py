"""Cooperation of the processes of one run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from calque.errors import InputError, explain_os_error
from calque.io.files import check_writable_folder
from calque.io.locks import LOCK, hidden_path, lock_output
from calque.io.shards import LONGEST_WAIT, Shard, StoppedByMainProcess, process_state

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Be the only process that writes a folder while the block runs.

    The folder is created, and removed again if it stays empty.
    """
    check_writable_folder(folder)
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise explain_os_error(error, folder) from error
    try:
        with lock_output(folder, hidden_path(folder / "run", LOCK)):
            yield
    finally:
        with suppress(OSError):  # it is not empty
            for path in missing:
                path.rmdir()


@contextmanager
def main_process_first() -> Iterator[bool]:
    """Yield whether this is the main process; the others wait until it leaves the block.

    If it fails there, the others raise StoppedByMainProcess.
    """
    state = process_state()
    if state.num_processes == 1:
        yield True
        return
    # The default group has a timeout of some minutes, but preparing text may take hours.
    group = torch.distributed.new_group(backend="gloo", timeout=LONGEST_WAIT)
    shard = Shard(state.process_index, state.num_processes, group)
    try:
        yield shard.is_main
    except BaseException:
        with suppress(RuntimeError):  # the others have stopped, too
            shard.all_succeeded(False)
        raise
    try:
        is_going_on = shard.all_succeeded()
    except RuntimeError as error:  # gloo raises it when a connection is closed
        raise InputError("another process has stopped", fix="see its error message") from error
    if not is_going_on:
        raise StoppedByMainProcess


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
