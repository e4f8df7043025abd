"""Relaxed CSLS: a map that raises the retrieval score of a dictionary's pairs itself.

Joulin et al., 2018: for pairs (x, y), min over W of −2 xWy + the mean of xW with its k nearest y' +
the mean of y with its k nearest x'W, a convex function of W, as neighbors are maxima.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from calque.algorithms.nearest import nearest_neighbors
from calque.algorithms.procrustes import IndexPairs, solve_rotation
from calque.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Float, Int
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class RcslsSettings:
    """How the map is found; steps begin as long as the authors', and are halved when too long.

    `spectral` keeps the map's singular values at or below one, the convex hull of rotations. The
    authors found `none` better, with few rounds: the loss of ever longer maps falls without end.
    Neighbors are searched among the first `n_words`; where there are fewer than `n_neighbors`, all
    of them are.
    """

    n_neighbors: int = 10
    n_words: int = 20_000
    n_rounds: int = 10
    rate: float = 25.0
    least_rate: float = 1e-4
    constraint: Literal["none", "spectral"] = "none"


@dataclass(frozen=True, slots=True)
class RcslsFit:
    """A map and the loss after each round, the start's first."""

    map: Float[Tensor, "hidden hidden"]
    losses: list[float]


def fit_rcsls(
    src: Float[Tensor, "src hidden"],
    tgt: Float[Tensor, "tgt hidden"],
    pairs: IndexPairs,
    settings: RcslsSettings,
    on_round: Callable[[float], None] = lambda _: None,
) -> RcslsFit:
    """Descend from the orthogonal map, with all pairs in every step. Spaces must be normalized.

    Paper: the authors draw pairs and halve the rate when the loss rises, but keep the step. Here a
    step that raises the loss is taken back, so that it never does.
    """
    if len(pairs) == 0:
        raise InputError("no pairs to learn from", fix="give a dictionary of words that are there")
    W = solve_rotation(src, tgt, pairs).to(src)
    loss, gradient = rcsls_loss_and_gradient(src, tgt, pairs, W, settings)
    losses, rate = [loss], settings.rate
    while len(losses) <= settings.n_rounds and rate >= settings.least_rate:
        step = _project(W - rate * gradient, settings.constraint)
        new_loss, new_gradient = rcsls_loss_and_gradient(src, tgt, pairs, step, settings)
        if new_loss < loss:
            W, loss, gradient = step, new_loss, new_gradient
            losses.append(loss)
            on_round(loss)
        else:
            rate /= 2
    return RcslsFit(W, losses)


def rcsls_loss_and_gradient(
    src: Float[Tensor, "src hidden"],
    tgt: Float[Tensor, "tgt hidden"],
    pairs: IndexPairs,
    W: Float[Tensor, "hidden hidden"],
    settings: RcslsSettings,
) -> tuple[float, Float[Tensor, "hidden hidden"]]:
    """Give the loss and its gradient with respect to W.

    Every term is a product xWy, whose gradient is xᵀy: the neighbors of one side add up to a
    vector, and all of a pair to 2y − ȳ' and x̄'.
    """
    x, y = src[pairs.src], tgt[pairs.tgt]
    mapped = x @ W
    others = tgt[: settings.n_words]
    src_words = src[: settings.n_words]
    k = min(settings.n_neighbors, len(others), len(src_words))
    near_x, rows = nearest_neighbors(mapped, others, k)
    near_y, columns = nearest_neighbors(y, src_words @ W, k)
    loss = -2 * (mapped * y).sum() + near_x.mean(dim=1).sum() + near_y.mean(dim=1).sum()
    gradient = x.mT @ (_mean_rows(others, rows) - 2 * y) + _mean_rows(src_words, columns).mT @ y
    return float(loss) / len(pairs), gradient / len(pairs)


def _mean_rows(
    matrix: Float[Tensor, "words hidden"], rows: Int[Tensor, "pairs k"]
) -> Float[Tensor, "pairs hidden"]:
    """Average some rows for each pair, without a copy of all of them."""
    return torch.nn.functional.embedding_bag(rows, matrix, mode="mean")


def _project(W: Float[Tensor, "hidden hidden"], constraint: str) -> Float[Tensor, "hidden hidden"]:
    if constraint == "none":
        return W
    u, values, v = torch.linalg.svd(W.cpu().double())
    clipped: Tensor = (u * values.clamp(max=1)) @ v
    return clipped.to(W)
