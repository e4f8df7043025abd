"""Linear maps between two spaces from sums over pairs: orthogonal, least squares, or step by step.

A map W takes rows t of one space to rows s of another, min Σ‖s − t W‖². All it needs of the rows
are sums of constant size (`PairSums`), however many pairs there are. Schönemann, 1966 (orthogonal
Procrustes); Lample et al., 2018 (the orthogonal step); Wu and Dredze, 2020, for states of encoders.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jaxtyping import Float
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class PairSums:
    """Sums over weighted pairs (s, t), one set of them for every place of a stack of maps.

    `cross` is Σ w tᵀs and `gram` Σ w tᵀt, if it is kept; `weights` are Σ w, and `src_squares` and
    `tgt_squares` Σ w‖s‖² and Σ w‖t‖². In double precision a product of two single-precision
    numbers is exact, and sums of a billion of them are good to ten digits: what is solved from
    them is the solution for the whole text at once. States of encoders need that: some directions
    are 10⁴ times as strong as others, and single precision would leave the weak ones to rounding.
    """

    weights: Float[Tensor, "*stack"]
    src_squares: Float[Tensor, "*stack"]
    tgt_squares: Float[Tensor, "*stack"]
    cross: Float[Tensor, "*stack hidden hidden"]
    gram: Float[Tensor, "*stack hidden hidden"] | None

    @classmethod
    def zeros(
        cls,
        stack: tuple[int, ...],
        hidden: int,
        *,
        gram: bool = True,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Begin with no pairs; without `gram`, half the memory and half the work.

        An orthogonal map does not need it, neither to be found nor to be judged.
        """

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        square = (*stack, hidden, hidden)
        return cls(
            weights=zeros(*stack),
            src_squares=zeros(*stack),
            tgt_squares=zeros(*stack),
            cross=zeros(*square),
            gram=zeros(*square) if gram else None,
        )

    def add(
        self,
        place: tuple[int, ...],
        src: Float[Tensor, "rows hidden"],
        tgt: Float[Tensor, "rows hidden"],
        weights: Float[Tensor, "rows"] | None = None,
    ) -> None:
        """Count pairs of rows in, in place; a row of weight 2 is as good as two rows."""
        s, t = src.to(self.cross), tgt.to(self.cross)
        w = s.new_ones(len(s)) if weights is None else weights.to(s)
        weighted = t * w[:, None]
        self.cross[place].addmm_(weighted.mT, s)
        if self.gram is not None:
            self.gram[place].addmm_(weighted.mT, t)
        self.weights[place] += w.sum()
        self.src_squares[place] += w @ s.square().sum(dim=1)
        self.tgt_squares[place] += w @ t.square().sum(dim=1)

    def tensors(self) -> Iterator[Tensor]:
        """Give all sums: added to those of another process, they are of the pairs of both."""
        yield from (self.weights, self.src_squares, self.tgt_squares, self.cross)
        if self.gram is not None:
            yield self.gram

    def merge(self, other: PairSums) -> None:
        """Count in what another has counted."""
        for mine, theirs in zip(self.tensors(), other.tensors(), strict=True):
            mine += theirs.to(mine.device)

    def select(self, place: int) -> PairSums:
        """Give the sums at one place of the stack's first dimension, not copied."""
        return PairSums(
            self.weights[place],
            self.src_squares[place],
            self.tgt_squares[place],
            self.cross[place],
            None if self.gram is None else self.gram[place],
        )

    def residuals(
        self, maps: Float[Tensor, "*stack hidden hidden"] | None = None
    ) -> Float[Tensor, "*stack"]:
        """Give Σ w‖s − t W‖² / Σ w from the sums alone; without maps, W is the identity.

        ‖S − T W‖² = ‖S‖² − 2 tr(Wᵀ TᵀS) + tr(Wᵀ TᵀT W); an orthogonal W, the only kind there is
        without `gram`, leaves ‖T‖² of the last term. Where there are no pairs it is NaN.
        """
        if maps is None:
            inner, images = self.cross.diagonal(dim1=-2, dim2=-1).sum(dim=-1), self.tgt_squares
        else:
            wide = maps.to(self.cross)
            inner, images = (wide * self.cross).sum(dim=(-2, -1)), self.tgt_squares
            if self.gram is not None:
                images = (wide * (self.gram @ wide)).sum(dim=(-2, -1))
        total = self.src_squares - 2 * inner + images
        return total.clamp(min=0) / torch.where(self.weights > 0, self.weights, math.nan)


def solve_procrustes(
    cross: Float[Tensor, "*stack hidden hidden"],
) -> Float[Tensor, "*stack hidden hidden"]:
    """Find the orthogonal W of min ‖S − T W‖² by TᵀS = U Σ Vᵀ: W = U Vᵀ.

    Directions that no pair speaks of are free, and what a decomposition gives there is chance:
    of all solutions this is the one nearest to the identity.

    >>> quarter = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    >>> t = torch.tensor([[3.0, 4.0], [0.0, 1.0]], dtype=torch.float64)
    >>> torch.allclose(solve_procrustes(t.mT @ (t @ quarter)), quarter)
    True
    """
    u, strengths, v = torch.linalg.svd(cross)
    maps: Tensor = u @ v
    tiny = strengths[..., :1] * cross.shape[-1] * torch.finfo(cross.dtype).eps
    ranks = (strengths > tiny).sum(dim=-1)
    for place in (ranks < cross.shape[-1]).nonzero().tolist():
        index = tuple(place)
        maps[index] = _complete(u[index], v[index], int(ranks[index]))
    return maps


def solve_least_squares(
    gram: Float[Tensor, "*stack hidden hidden"],
    cross: Float[Tensor, "*stack hidden hidden"],
    cutoff: float | None = None,
) -> Float[Tensor, "*stack hidden hidden"]:
    """Find the W of min ‖S − T W‖² among all matrices: (TᵀT)⁺ TᵀS, the smallest if several fit.

    What varies less than `cutoff` times the strongest direction is taken for rounding and mapped
    to nothing. TᵀT has the squares of that, so that the least there can be is about 10⁻⁷.

    >>> t = torch.tensor([[1.0, 0.0], [2.0, 0.0]], dtype=torch.float64)  # nothing of the second
    >>> solve_least_squares(t.mT @ t, t.mT @ (3 * t)).tolist()
    [[3.0, 0.0], [0.0, 0.0]]
    """
    values, vectors = torch.linalg.eigh(gram)
    least = gram.shape[-1] * torch.finfo(gram.dtype).eps
    tiny = values[..., -1:] * (least if cutoff is None else max(least, cutoff**2))
    inverse = torch.where(values > tiny, 1 / values, 0.0)
    maps: Tensor = vectors @ (inverse[..., None] * (vectors.mT @ cross))
    return maps


def orthogonalize_step(
    maps: Float[Tensor, "*stack hidden hidden"], beta: float
) -> Float[Tensor, "*stack hidden hidden"]:
    """Go a step towards the nearest orthogonal matrix: W ← (1 + β) W − β (W Wᵀ) W.

    A singular value σ becomes σ (1 + β − β σ²), which tends to 1. Past √((1 + β)/β) it changes its
    sign, past √((2 + β)/β) it grows without end: 10.0 and 14.2 for β = 0.01. So a matrix that may
    have one past `step_limit`, by the row sums or the norm of W Wᵀ, is first scaled down to it.
    Below, the step is the paper's to the last bit.

    >>> orthogonalize_step(torch.tensor([[0.5]]), 0.25).tolist()  # 0.5 · (1 + 0.25 − 0.25 · 0.25)
    [[0.59375]]
    """
    squares = maps @ maps.mT
    bound = torch.minimum(
        torch.linalg.matrix_norm(squares, torch.inf), torch.linalg.matrix_norm(squares)
    )
    # Both norms of W Wᵀ are at least the square of the largest singular value.
    scale = (step_limit(beta) / bound.sqrt()).clamp(max=1.0)[..., None, None]
    return scale * ((1 + beta) * maps - beta * scale.square() * (squares @ maps))


def step_limit(beta: float) -> float:
    """Give the singular value up to which a larger one stays larger after a step: √((1 + β)/3β).

    >>> round(step_limit(0.01), 2)
    5.8
    """
    return math.sqrt((1 + beta) / (3 * beta))


def _complete(
    u: Float[Tensor, "hidden hidden"], v: Float[Tensor, "hidden hidden"], rank: int
) -> Float[Tensor, "hidden hidden"]:
    """Keep what the first `rank` directions say; turn the others as little as possible."""
    a, _, b = torch.linalg.svd(u[:, rank:].mT @ v[rank:].mT)
    maps: Tensor = u[:, :rank] @ v[:rank] + u[:, rank:] @ (a @ b) @ v[rank:]
    return maps
