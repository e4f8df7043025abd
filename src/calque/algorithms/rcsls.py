"""Relaxed CSLS (RCSLS): a map that directly raises the CSLS scores of a dictionary's pairs.

Joulin et al., 2018: for pairs (x, y), minimize over W −2 xWy + the mean of xWy' over the k nearest
y' + the mean of x'Wy over the k nearest x'W. It is convex in W, since neighbors are maxima.
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
    """Settings of gradient descent; a step that does not lower the loss is halved.

    The constraint `spectral` keeps the singular values of the map at or below one, the convex hull
    of rotations. The authors found `none` better with few rounds: without a constraint the loss of
    ever larger maps has no lower bound. Neighbors are searched among the first `n_words` words.
    """

    n_neighbors: int = 10
    n_words: int = 20_000
    n_rounds: int = 10
    rate: float = 25.0
    least_rate: float = 1e-4
    constraint: Literal["none", "spectral"] = "none"


@dataclass(frozen=True, slots=True)
class RcslsFit:
    """A map, and the losses at the start and after each round."""

    map: Float[Tensor, "hidden hidden"]
    losses: list[float]


def fit_rcsls(
    src: Float[Tensor, "src hidden"],
    tgt: Float[Tensor, "tgt hidden"],
    pairs: IndexPairs,
    settings: RcslsSettings,
    on_round: Callable[[float], None] = lambda _: None,
) -> RcslsFit:
    """Return the map that minimizes RCSLS by gradient descent from the orthogonal map.

    The spaces must be normalized, and every step uses all pairs. Paper: the authors sample pairs
    and halve the rate when the loss rises, but keep the step. Here such a step is undone, so the
    loss never rises.
    """
    if len(pairs) == 0:
        problem = "the dictionary has no pair whose words are in both vocabularies"
        raise InputError(problem, fix="use a dictionary of words that have vectors")
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
    """Return the loss and its gradient with respect to W (Joulin et al., 2018).

    Every term is a product xWy with gradient xᵀy, so a pair contributes xᵀ(ȳ' − 2y) + x̄'ᵀy, where
    ȳ' and x̄' are the means of the neighbors.
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
    """Return the mean of some rows for each pair, without copying all of them."""
    return torch.nn.functional.embedding_bag(rows, matrix, mode="mean")


def _project(W: Float[Tensor, "hidden hidden"], constraint: str) -> Float[Tensor, "hidden hidden"]:
    if constraint == "none":
        return W
    u, values, v = torch.linalg.svd(W.cpu().double())
    clipped: Tensor = (u * values.clamp(max=1)) @ v
    return clipped.to(W)
