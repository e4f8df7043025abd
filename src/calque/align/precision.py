"""Products of matrices in the precision that a device multiplies fastest."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class Multiplier:
    """Products of some rows with blocks of others, in memory that is used again and again.

    New memory for every block would take a CPU as long as a quarter of the multiplication. Low
    precision must be asked for by its type; see `fast_dtype`.
    """

    def __init__(self, rows: Float[Tensor, "rows hidden"], block: int, dtype: torch.dtype) -> None:
        self.rows, self.dtype = rows.to(dtype), dtype
        self.products = rows.new_empty(len(rows) * block)
        self.coarse = self.rows.new_empty(len(rows) * block) if dtype != rows.dtype else None

    @property
    def rounding(self) -> float:
        """The largest relative error of one rounding."""
        return torch.finfo(self.dtype).eps / 2

    def __call__(self, others: Float[Tensor, "others hidden"]) -> Float[Tensor, "rows others"]:
        """Multiply; the result is there until the next call."""
        shape = (len(self.rows), len(others))
        products = self.products[: shape[0] * shape[1]].view(shape)
        if self.coarse is None:
            return torch.mm(self.rows, others.mT, out=products)
        coarse = self.coarse[: shape[0] * shape[1]].view(shape)
        return products.copy_(torch.mm(self.rows, others.to(self.dtype).mT, out=coarse))


def fast_dtype(tensor: Tensor) -> torch.dtype:
    """Give bfloat16 for float32 on CPUs that multiply it in hardware, otherwise what there is.

    A GPU multiplies float32 fast enough for all that is done with words; other CPUs are slow
    with bfloat16.
    """
    is_cpu, is_single = tensor.device.type == "cpu", tensor.dtype == torch.float32
    return torch.bfloat16 if is_cpu and is_single and _cpu_has_it() else tensor.dtype


@cache
def _cpu_has_it() -> bool:
    # torch knows but does not tell in public; without the answer, float32 is right as well.
    asks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, ask, bool)() for ask in asks)
