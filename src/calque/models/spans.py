"""The best span of a sequence: where it starts and where it ends, scored apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor


def find_best_spans(
    starts: Float[Tensor, "rows places"],
    ends: Float[Tensor, "rows places"],
    may_answer: Bool[Tensor, "rows places"],
    longest: int,
) -> tuple[Int[Tensor, "rows"], Int[Tensor, "rows"], Float[Tensor, "rows"]]:
    """Find first ≤ last < first + longest with the highest starts[first] + ends[last].

    Both must be places that may answer; a row without one has a score of −∞. Of equal spans the
    first and shortest is taken.
    """
    starts = starts.masked_fill(~may_answer, -torch.inf)
    ends = ends.masked_fill(~may_answer, -torch.inf)
    reach = F.pad(ends, (0, longest - 1), value=-torch.inf).unfold(1, longest, 1)
    scores = (starts[:, :, None] + reach).flatten(1)
    best, place = scores.max(dim=1)
    first, length = place // longest, place % longest
    return first, first + length, best
