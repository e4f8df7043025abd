"""Nearest words of two spaces in both directions, out of the same products, block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import torch

from calque.align.top_scores import best_in_columns, best_in_rows, merge_best
from calque.types import InputError

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    Best = tuple[Float[Tensor, "words k"], Int[Tensor, "words k"]]

BLOCK = 4096


class Rows(Protocol):
    """Vectors that give some of their rows when asked: a tensor, or an array on disk."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Tensor: ...


def nearest_both_ways(
    src: Float[Tensor, "src hidden"] | Rows,
    tgt: Float[Tensor, "tgt hidden"] | Rows,
    k_src: int,
    k_tgt: int = 0,
    *,
    scale: float = 1.0,
    src_penalties: Float[Tensor, "src"] | None = None,
    tgt_penalties: Float[Tensor, "tgt"] | None = None,
    block: int = BLOCK,
    on_rows: Callable[[int], None] | None = None,
) -> tuple[Best, Best]:
    """Find each source's `k_src` best targets and each target's `k_tgt` best sources.

    A source chooses by scale·xy − penalty(y), a target by scale·xy − penalty(x): a word that is
    near to everything can be made less attractive. `on_rows` hears of sources that are done.

    >>> src, tgt = torch.eye(2), torch.tensor([[1.0, 0.5], [0.8, 0.0]])
    >>> (_, forward), (_, backward) = nearest_both_ways(src, tgt, 1, 1)
    >>> forward.tolist(), backward.tolist()
    ([[0], [0]], [[0], [0]])
    """
    for k, n_words in ((k_src, len(tgt)), (k_tgt, len(src))):
        if k > n_words:
            raise InputError(f"k={k}, of {n_words:,} words", fix=f"choose k from 1 to {n_words:,}")
    columns: list[Best | None] = [None] * (-(-len(tgt) // block))
    rows: list[Best] = []
    for start, part in _blocks(src, block):
        best: Best | None = None
        for number, (first, other) in enumerate(_blocks(tgt, block)):
            scores = (scale * part) @ other.mT
            own = _subtract(scores, tgt_penalties, first, dim=1)
            values, places = best_in_rows(own, min(k_src, len(other)))
            best = merge_best(best, (values, places + first), k_src)
            if k_tgt:
                own = _subtract(scores, src_penalties, start, dim=0)
                values, places = best_in_columns(own, min(k_tgt, len(part)))
                columns[number] = merge_best(columns[number], (values, places + start), k_tgt)
        if best is not None:
            rows.append(best)
        if on_rows is not None:
            on_rows(len(part))
    return _join(rows, src, k_src), _join([best for best in columns if best], tgt, k_tgt)


def log_sums_both_ways(
    src: Float[Tensor, "src hidden"],
    tgt: Float[Tensor, "tgt hidden"],
    scale: float = 1.0,
    *,
    block: int = BLOCK,
    on_rows: Callable[[int], None] | None = None,
) -> tuple[Float[Tensor, "src"], Float[Tensor, "tgt"]]:
    """Give log Σ e^(scale·xy): of each source over all targets, and of each target over sources."""
    rows, columns = src.new_full((len(src),), -torch.inf), tgt.new_full((len(tgt),), -torch.inf)
    for start, part in _blocks(src, block):
        own = rows[start : start + len(part)]
        for first, other in _blocks(tgt, block):
            scores = (scale * part) @ other.mT
            theirs = columns[first : first + len(other)]
            torch.logaddexp(own, scores.logsumexp(dim=1), out=own)
            torch.logaddexp(theirs, scores.logsumexp(dim=0), out=theirs)
        if on_rows is not None:
            on_rows(len(part))
    return rows, columns


def _blocks(rows: Rows, size: int) -> Iterator[tuple[int, Tensor]]:
    edges = [*range(0, len(rows), size), len(rows)]
    return ((start, rows[start:end]) for start, end in pairwise(edges))


def _subtract(
    scores: Float[Tensor, "rows columns"], penalties: Tensor | None, start: int, dim: int
) -> Float[Tensor, "rows columns"]:
    if penalties is None:
        return scores
    own = penalties[start : start + scores.shape[dim]]
    return scores - (own if dim == 1 else own[:, None])


def _join(parts: list[Best], words: Rows, k: int) -> Best:
    if not parts:
        shape, none = (len(words), k), words[:0]
        return none.new_empty(shape), torch.empty(shape, dtype=torch.int64, device=none.device)
    scores, places = (torch.cat(both) for both in zip(*parts, strict=True))
    return scores, places
