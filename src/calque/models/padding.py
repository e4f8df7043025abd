"""From rows laid end to end to padded tables, for what compares the tokens of a sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from jaxtyping import Float, Int
    from torch import Tensor


def spread_rows(
    rows: Float[Tensor, "rows size"], cells: Int[Tensor, "rows"], shape: torch.Size
) -> Float[Tensor, "sentences words size"]:
    """Copy rows to their cells of a padded table of zeros; one cell beyond its end is dropped.

    Every cell has one row at most, so that the gradient is a plain copy back.

    >>> import torch
    >>> spread_rows(torch.tensor([[5.0], [7.0]]), torch.tensor([2, 4]), torch.Size([2, 2])).tolist()
    [[[0.0], [0.0]], [[5.0], [0.0]]]
    """
    n_cells = shape[0] * shape[1]
    table = rows.new_zeros(n_cells + 1, rows.shape[1]).index_copy(0, cells, rows)
    return table[:-1].view(*shape, -1)
