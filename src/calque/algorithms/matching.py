"""Word links from a matrix of scores: mutual argmax, itermax, maximum-weight matching.

SimAlign (Jalili Sabet et al., 2020). Scores of padding are −inf and are never linked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from calque.errors import MissingExtra

if TYPE_CHECKING:
    import numpy.typing as npt


def mutual_argmax(scores: Float[Tensor, "pairs src tgt"]) -> Bool[Tensor, "pairs src tgt"]:
    """Return the links between words that are each other's best (SimAlign, Argmax).

    XLM-Align, Eq. 7–8. The first of several equal scores counts as the best.

    >>> mutual_argmax(torch.tensor([[[0.9, 0.8], [0.7, 0.1]]])).tolist()
    [[[True, False], [False, False]]]
    """
    links = torch.zeros_like(scores, dtype=torch.bool)
    if not scores.numel():
        return links
    best_score, best_tgt = scores.max(dim=2)
    best_src = scores.max(dim=1).indices
    rows = torch.arange(scores.shape[1], device=scores.device)
    mutual = (best_src.gather(1, best_tgt) == rows) & (best_score > -torch.inf)
    return links.scatter_(2, best_tgt[:, :, None], mutual[:, :, None])


def itermax(
    scores: Float[Tensor, "pairs src tgt"], n_rounds: int = 2, alpha: float = 0.9
) -> Bool[Tensor, "pairs src tgt"]:
    """Return the links of repeated mutual argmax, with discounted scores for linked words.

    SimAlign, Algorithm 1; XLM-Align, Eq. 7–9. Before every further round, scores between a free
    and a linked word are multiplied by α, and scores between two linked words become 0. Rounds add
    nothing once all words of a side are linked. As in SimAlign, pairs with at most two words on a
    side get one round.

    Scores should be similarities ≥ 0, such as (1 + cos) / 2, or a transport plan (not its
    logarithm). Paper: SimAlign multiplies negative scores by α too, which raises them. Here the
    discount lowers them, and the lowest score of the pair takes the place of 0.

    >>> rows = [[0.9, 0.2, 0.1], [0.3, 0.8, 0.1], [0.7, 0.1, 0.2]]
    >>> itermax(torch.tensor([rows])).long().tolist()
    [[[1, 0, 0], [0, 1, 0], [1, 0, 0]]]
    """
    real = scores > -torch.inf
    src_words, tgt_words = real.any(dim=2), real.any(dim=1)
    large = (src_words.sum(dim=1) > 2) & (tgt_words.sum(dim=1) > 2)
    links = mutual_argmax(scores)
    if not scores.numel():
        return links
    for _ in range(n_rounds - 1):
        free_src = src_words & ~links.any(dim=2)
        free_tgt = tgt_words & ~links.any(dim=1)
        continues = large & free_src.any(dim=1) & free_tgt.any(dim=1)
        found = mutual_argmax(_discount(scores, free_src, free_tgt, alpha))
        open_cells = (free_src[:, :, None] | free_tgt[:, None, :]) & continues[:, None, None]
        links = links | (found & open_cells)
    return links


def _discount(
    scores: Float[Tensor, "pairs src tgt"],
    free_src: Bool[Tensor, "pairs src"],
    free_tgt: Bool[Tensor, "pairs tgt"],
    alpha: float,
) -> Float[Tensor, "pairs src tgt"]:
    """Return scores lowered for linked words; padding keeps −inf."""
    n_free = free_src[:, :, None].to(scores.dtype) + free_tgt[:, None, :].to(scores.dtype)
    weight = (alpha * n_free).clamp(max=1.0)
    lowered = torch.where(scores < 0, scores * (2 - weight), scores * weight)
    real = scores > -torch.inf
    lowest = torch.where(real, lowered, 0.0).amin(dim=(1, 2), keepdim=True).clamp(max=0.0)
    return torch.where((n_free == 0) & real, lowest, lowered)


def max_weight_matching(scores: Float[Tensor, "pairs src tgt"]) -> Bool[Tensor, "pairs src tgt"]:
    """Return one-to-one links: as many as possible and, among those, with the highest total score.

    SimAlign's Match. As there, a score of exactly 0 is never linked, but a negative one may be.
    The pairs are solved one by one with SciPy, on the CPU.

    >>> max_weight_matching(torch.tensor([[[0.9, 0.8], [0.7, 0.1]]])).tolist()
    [[[False, True], [True, False]]]
    """
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError as error:
        raise MissingExtra("scipy", "align") from error

    weights = scores.detach().cpu().double().numpy()
    edges = np.isfinite(weights) & (weights != 0)
    links = np.zeros_like(edges)
    for matrix, edge, matched in zip(weights, edges, links, strict=True):
        if not edge.any():
            continue
        n_src, n_tgt = _extent(edge.any(axis=1)), _extent(edge.any(axis=0))
        matrix, edge = matrix[:n_src, :n_tgt], edge[:n_src, :n_tgt]
        # A penalty that no gain elsewhere outweighs: absent edges are only used if unavoidable.
        absent = -2 * (min(n_src, n_tgt) + 1) * np.abs(matrix[edge]).max()
        rows, columns = linear_sum_assignment(np.where(edge, matrix, absent), maximize=True)
        matched[rows, columns] = edge[rows, columns]
    return torch.from_numpy(links).to(scores.device)


def _extent(present: npt.NDArray[np.bool_]) -> int:
    """Return the length without the padding at the end."""
    return int(present.nonzero()[0][-1]) + 1
