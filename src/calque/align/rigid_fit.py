"""One cloud of rows moved, scaled and turned onto another, as little changed in itself as can be.

Schönemann and Carroll, 1970, but for the scale: clouds get the same spread, where the least
squares would shrink a noisy one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class RigidFit:
    """Takes a row x to (x − center) · matrix + shift."""

    center: Float[Tensor, "src_width"]
    matrix: Float[Tensor, "src_width tgt_width"]
    shift: Float[Tensor, "tgt_width"]

    @classmethod
    def of(cls, src: Float[Tensor, "rows src_width"], tgt: Float[Tensor, "rows tgt_width"]) -> Self:
        """Fit the rows of one cloud to those of another; the widths may differ.

        >>> square = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
        >>> turned = 3 * square @ torch.tensor([[0.0, 1.0], [-1.0, 0.0]]) + 5
        >>> RigidFit.of(square, turned).apply(square[2]).round(decimals=4).tolist()
        [2.0, 8.0]
        """
        x, y = src.to(torch.float64), tgt.to(torch.float64)
        center, shift = x.mean(dim=0), y.mean(dim=0)
        x, y = x - center, y - shift
        u, _, v = torch.linalg.svd(x.mT @ y, full_matrices=False)
        turned = x @ (u @ v)
        spread = turned.square().sum()
        scale = (y.square().sum() / torch.where(spread > 0, spread, 1.0)).sqrt()
        return cls(*(part.to(tgt.dtype) for part in (center, scale * (u @ v), shift)))

    def apply(self, rows: Float[Tensor, "*rows src_width"]) -> Float[Tensor, "*rows tgt_width"]:
        """Move, scale and turn rows."""
        return (rows - self.center) @ self.matrix + self.shift
