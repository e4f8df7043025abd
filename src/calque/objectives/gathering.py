"""Rows of all processes of a run as one batch, with gradients that find their way back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.nn import functional as F

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


def n_processes() -> int:
    """Count the processes that train together."""
    return distributed.get_world_size() if _is_shared() else 1


def process_number() -> int:
    """Give the number of this process."""
    return distributed.get_rank() if _is_shared() else 0


def total_over_processes(value: Float[Tensor, ""]) -> Float[Tensor, ""]:
    """Sum a number over the processes, without gradient."""
    total = value.detach().clone()
    if n_processes() > 1:
        distributed.all_reduce(total)
    return total


def gather_rows(*columns: Tensor) -> tuple[Tensor, ...]:
    """Put rows of all processes under one another, in the order of the processes.

    All columns of a process have as many rows; processes may have different numbers, and zeros
    fill them up to the most. Gradients of the rows come back summed over the processes.
    """
    return columns if n_processes() == 1 else _gather_columns(columns)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _gather_columns(columns: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    most = torch.tensor(len(columns[0]), device=columns[0].device)
    distributed.all_reduce(most, distributed.ReduceOp.MAX)
    n_missing = int(most) - len(columns[0])
    return tuple(_Gathered.apply(_fill(one, n_missing)) for one in columns)  # type: ignore[no-untyped-call]


class _Gathered(torch.autograd.Function):
    """Rows of all processes; what each of them wants changed is summed on the way back.

    PyTorch's own differentiable gathering is deprecated.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        parts = [torch.empty_like(rows) for _ in range(n_processes())]
        distributed.all_gather(parts, rows)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.contiguous().clone()
        distributed.all_reduce(total)
        n_rows = len(total) // n_processes()
        return total[process_number() * n_rows :][:n_rows]


def _fill(rows: Tensor, n_missing: int) -> Tensor:
    filled = F.pad(rows, (0, 0) * (rows.ndim - 1) + (0, n_missing)) if n_missing else rows
    return filled.contiguous()


def _is_shared() -> bool:
    return distributed.is_available() and distributed.is_initialized()
