"""Split the blocks of an input among the processes that torchrun started."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from calque.errors import InputError

if TYPE_CHECKING:
    from accelerate import PartialState

ResultT = TypeVar("ResultT")

# Other processes may wait this long, for example while the main one trains or reads its input.
LONGEST_WAIT = timedelta(days=7)


class StoppedByMainProcess(Exception):
    """The main process failed and reports the error; the other processes exit silently."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `n_ranks` processes that take turns at the blocks of an input; alone by default."""

    rank: int = 0
    n_ranks: int = 1
    group: Any = None

    @property
    def is_main(self) -> bool:
        """Whether this process checks the input and merges the output."""
        return self.rank == 0

    def owns(self, block: int) -> bool:
        """Return whether this process works on a block, given by its number."""
        return block % self.n_ranks == self.rank

    def all_succeeded(self, success: bool = True) -> bool:
        """Wait for all processes and return whether all of them reported success."""
        if self.n_ranks == 1:
            return success

        import torch

        worst = torch.tensor(int(success))
        torch.distributed.all_reduce(worst, torch.distributed.ReduceOp.MIN, group=self.group)
        return bool(worst)

    def run_on_main(self, work: Callable[[], ResultT]) -> ResultT | None:
        """Run a function in the main process while the others wait; an InputError stops all."""
        result, error = None, None
        if self.is_main:
            try:
                result = work()
            except InputError as problem:
                error = problem
        if not self.all_succeeded(error is None):
            raise error or StoppedByMainProcess
        return result


@contextmanager
def join_shard_group() -> Iterator[Shard]:
    """Yield the shard of this process; without torchrun there is only one process."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Shard()
        return

    import torch

    state = process_state()
    # The default group may be NCCL's, which works on GPU tensors only and times out in minutes.
    group = torch.distributed.new_group(backend="gloo", timeout=LONGEST_WAIT)
    try:
        yield Shard(state.process_index, state.num_processes, group)
    finally:
        torch.distributed.destroy_process_group()  # otherwise its threads abort the process at exit


def process_state() -> PartialState:
    """Return Accelerate's view of the processes that torchrun started, on GPUs if there are any."""
    import torch
    from accelerate import PartialState

    return PartialState(cpu=not torch.cuda.is_available())
