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


VECTOR = 32


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
    whole = scores[:, : n_groups * size]
    if size < VECTOR:  # groups of members far apart, for maxima of neighbors all at once
        maxima = whole.view(-1, size, n_groups).amax(dim=1)
        return _best_of_groups(scores, maxima, k, size, step=n_groups)
    maxima = whole.view(-1, n_groups, size).amax(dim=2)
    return _best_of_groups(scores, maxima, k, size)


def best_in_columns(
    scores: Float[Tensor, "rows columns"], k: int
) -> tuple[Float[Tensor, "columns k"], Int[Tensor, "columns k"]]:
    """Find the k highest scores of each column and their rows, the highest first."""
    size = _group_size(len(scores), k)
    if size == 1:
        return _unpack(scores.mT.contiguous().topk(k, dim=1))
    n_groups = len(scores) // size
    # Not of the transposed view, whose maxima would be taken against the order in memory.
    maxima = scores[: n_groups * size].view(n_groups, size, -1).amax(dim=1)
    return _best_of_groups(scores.mT, maxima.mT.contiguous(), k, size)


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
    k: int,
    size: int,
    step: int = 1,
) -> tuple[Float[Tensor, "rows k"], Int[Tensor, "rows k"]]:
    """Sort the k groups of the highest maxima, whose members are `step` apart, and the rest."""
    groups = maxima.topk(k, dim=1, sorted=False).indices
    first = groups * size if step == 1 else groups
    members = torch.arange(size, device=scores.device) * step
    rest = torch.arange(maxima.shape[1] * size, scores.shape[1], device=scores.device)
    places = (first[:, :, None] + members).flatten(1)
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
