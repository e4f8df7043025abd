"""Sharing work among the processes that torchrun has started."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from calque.types import InputError

ResultT = TypeVar("ResultT")


class StoppedByMain(Exception):
    """The main process met bad input, and says so; the others stop without a word."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One process among others that take turns at the blocks of a file; alone by default."""

    rank: int = 0
    n_ranks: int = 1
    group: Any = None

    @property
    def is_main(self) -> bool:
        """Tell whether this process checks the input and puts the output together."""
        return self.rank == 0

    def owns(self, block: int) -> bool:
        """Tell whether a block is this process's to work on."""
        return block % self.n_ranks == self.rank

    def agree(self, is_fine: bool = True) -> bool:
        """Wait for all processes, and tell whether all of them are fine."""
        if self.n_ranks == 1:
            return is_fine
        import torch

        worst = torch.tensor(int(is_fine))
        torch.distributed.all_reduce(worst, torch.distributed.ReduceOp.MIN, group=self.group)
        return bool(worst)

    def run_on_main(self, work: Callable[[], ResultT]) -> ResultT | None:
        """Do something in the main process while the others wait; bad input there stops all."""
        result, error = None, None
        if self.is_main:
            try:
                result = work()
            except InputError as problem:
                error = problem
        if not self.agree(error is None):
            raise error or StoppedByMain
        return result


@contextmanager
def join_shards() -> Iterator[Shard]:
    """Work with the other processes, if torchrun has started any, until the block ends."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Shard()
        return
    import torch

    from calque.training.processes import LONGEST_WAIT, join_processes

    state = join_processes()
    # The default group may belong to GPUs, and gives up after some minutes.
    group = torch.distributed.new_group(backend="gloo", timeout=LONGEST_WAIT)
    try:
        yield Shard(state.process_index, state.num_processes, group)
    finally:
        torch.distributed.destroy_process_group()  # or its threads abort the process at exit
