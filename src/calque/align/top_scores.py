"""The highest of many scores, row by row or column by column, found through maxima of groups.

The k highest scores of a row lie in the k groups of it with the highest maxima. So a row is read
once for its maxima, which is as fast as memory, and only k groups of it are sorted: the result is
that of `torch.topk`, several times as fast.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor


def best_in_rows(
    scores: Float[Tensor, "rows columns"], k: int
) -> tuple[Float[Tensor, "rows k"], Int[Tensor, "rows k"]]:
    """Find the k highest scores of each row and their columns, the highest first.

    >>> best_in_rows(torch.tensor([[0.1, 0.9, 0.5]]), 2)[1].tolist()
    [[1, 2]]
    """
    size = _group_size(scores.shape[1], k)
    if size == 1:
        return _unpack(scores.topk(k, dim=1))
    n_groups = scores.shape[1] // size
    maxima = scores[:, : n_groups * size].unflatten(1, (size, n_groups)).amax(dim=1)
    return _best_of_groups(scores, maxima, size, k)


def best_in_columns(
    scores: Float[Tensor, "rows columns"], k: int
) -> tuple[Float[Tensor, "columns k"], Int[Tensor, "columns k"]]:
    """Find the k highest scores of each column and their rows, the highest first."""
    size = _group_size(len(scores), k)
    if size == 1:
        return _unpack(scores.mT.contiguous().topk(k, dim=1))
    n_groups = len(scores) // size
    # Not of the transposed view, whose maxima would be taken against the order in memory.
    maxima = scores[: n_groups * size].unflatten(0, (size, n_groups)).amax(dim=0)
    return _best_of_groups(scores.mT, maxima.mT.contiguous(), size, k)


def merge_best(
    old: tuple[Float[Tensor, "rows k"], Int[Tensor, "rows k"]] | None,
    new: tuple[Float[Tensor, "rows more"], Int[Tensor, "rows more"]],
    k: int,
) -> tuple[Float[Tensor, "rows k"], Int[Tensor, "rows k"]]:
    """Keep the k highest of two sets of scores, whose places count in one and the same order."""
    if old is None:
        return new
    values, places = (torch.cat(both, dim=1) for both in zip(old, new, strict=True))
    best, order = _unpack(values.topk(min(k, values.shape[1]), dim=1))
    return best, places.gather(1, order)


def _best_of_groups(
    scores: Float[Tensor, "rows columns"],
    maxima: Float[Tensor, "rows groups"],
    size: int,
    k: int,
) -> tuple[Float[Tensor, "rows k"], Int[Tensor, "rows k"]]:
    groups = maxima.topk(k, dim=1, sorted=False).indices
    n_groups, n_columns = maxima.shape[1], scores.shape[1]
    # Members lie n_groups apart: so maxima are taken of many neighbors in memory at once.
    steps = torch.arange(0, size * n_groups, n_groups, device=scores.device)
    places = (groups[:, :, None] + steps).flatten(1)
    rest = torch.arange(size * n_groups, n_columns, device=scores.device)
    places = torch.cat([places, rest.expand(len(scores), -1)], dim=1)
    best, order = _unpack(scores.gather(1, places).topk(k, dim=1))
    return best, places.gather(1, order)


def _group_size(n_scores: int, k: int) -> int:
    """Choose a power of two near √(n/k), where maxima and members of k groups are equally many.

    >>> _group_size(20_000, 10), _group_size(60, 10)
    (32, 1)
    """
    size = 1 << round(math.log2(max(1.0, n_scores / k)) / 2)
    return size if size >= 4 and n_scores // size >= k else 1


def _unpack(found: torch.return_types.topk) -> tuple[Tensor, Tensor]:
    return found.values, found.indices
