"""One cloud of rows moved, scaled and turned onto another, as little changed in itself as can be.

Schönemann and Carroll, 1970, but for the scale: clouds get the same spread, where the least
squares would shrink a noisy one.

Canonical correlations of two views of the same rows, and deep CCA's loss (Andrew et al., 2013).

What is computed is T = Σ11^{-1/2} Σ12 Σ22^{-1/2}, whose singular values are the correlations.
Whitening by Cholesky factors turns T, but keeps those. Nothing is divided by a difference of
singular values, on the way back neither: equal ones, zeros and repeated rows are as good as others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch

from calque.errors import InputError

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class SimilarityTransform:
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


RIDGE = 1e-3
# What Cholesky needs on the diagonal of any matrix, in units of its size, rounding and trace.
SAFETY = 10
# The variance of features that have none; its inverse is a number still.
NOTHING = 1e-100


def deep_cca_loss(
    src: Float[Tensor, "rows src_width"],
    tgt: Float[Tensor, "rows tgt_width"],
    weights: Float[Tensor, "rows"] | None = None,
    *,
    ridges: tuple[float, float] = (RIDGE, RIDGE),
    relative: bool = False,
    k: int | None = None,
) -> Float[Tensor, ""]:
    """Give minus the sum of the `k` largest canonical correlations, by default of all.

    The arguments are those of `whitened_cross_covariance`.

    >>> x = torch.tensor([[0.0], [1.0], [2.0]])
    >>> round(deep_cca_loss(x, -3 * x, ridges=(0, 0)).item(), 6)
    -1.0
    """
    table = whitened_cross_covariance(src, tgt, weights, ridges=ridges, relative=relative)
    return -sum_singular_values(table, k).to(torch.promote_types(src.dtype, torch.float32))


def canonical_correlations(
    src: Float[Tensor, "rows src_width"],
    tgt: Float[Tensor, "rows tgt_width"],
    weights: Float[Tensor, "rows"] | None = None,
    *,
    ridges: tuple[float, float] = (RIDGE, RIDGE),
    relative: bool = False,
) -> Float[Tensor, "correlations"]:
    """Give all canonical correlations, the largest first, without gradient."""
    with torch.no_grad():
        table = whitened_cross_covariance(src, tgt, weights, ridges=ridges, relative=relative)
        correlations: Tensor = torch.linalg.svdvals(table)
    return correlations


def whitened_cross_covariance(
    src: Float[Tensor, "rows src_width"],
    tgt: Float[Tensor, "rows tgt_width"],
    weights: Float[Tensor, "rows"] | None = None,
    *,
    ridges: tuple[float, float] = (RIDGE, RIDGE),
    relative: bool = False,
) -> Float[Tensor, "src_width tgt_width"]:
    """Give L1⁻¹ Σ12 L2⁻ᵀ with Σ11 = X̄ᵀX̄/(n − 1) + r1·I = L1 L1ᵀ, and likewise for the other view.

    X̄ is centred per feature. A row of weight 2 is as good as two rows, one of weight 0 is not
    there. `relative` ridges are in units of a view's mean variance: then neither its scale nor a
    change of it counts. With absolute ones, a view that grows is correlated better. All is done in
    double precision: states of encoders have directions 10⁴ times as strong as others, whose
    squares single precision cannot hold side by side.
    """
    x, y = src.to(torch.float64), tgt.to(torch.float64)
    w = x.new_ones(len(x)) if weights is None else weights.to(x)
    total = w.sum()
    x, y = (_center(rows, w, total) for rows in (x, y))
    n = (total - 1).clamp(min=1)
    factors = [_factor(rows, n, r, relative) for rows, r in zip((x, y), ridges, strict=True)]
    half = torch.linalg.solve_triangular(factors[0], x.mT @ y / n, upper=False)
    table: Tensor = torch.linalg.solve_triangular(factors[1].mT, half, upper=True, left=False)
    return table


def sum_singular_values(
    matrix: Float[Tensor, "rows columns"], k: int | None = None
) -> Float[Tensor, ""]:
    """Sum the `k` largest singular values, by default all; the gradient is Σ uᵢvᵢᵀ over them.

    That is a subgradient of this convex function wherever it is not smooth. Directions of no
    strength, which a decomposition chooses by chance, are left out of it.

    >>> sum_singular_values(torch.diag(torch.tensor([3.0, 2.0, 0.0])), k=1).item()
    3.0
    """
    n_values = min(matrix.shape)
    if k is not None and not 0 < k <= n_values:
        raise InputError(f"k={k} of {n_values} correlations", fix=f"choose 1 to {n_values}")
    with torch.no_grad():
        leading = _lead(matrix, n_values if k is None else k)
    return (matrix * leading).sum()


def _center(
    rows: Float[Tensor, "rows width"], weights: Float[Tensor, "rows"], total: Float[Tensor, ""]
) -> Float[Tensor, "rows width"]:
    """Subtract the weighted mean, and scale rows by the roots of their weights."""
    mean = weights @ rows / torch.where(total > 0, total, 1.0)
    return (rows - mean) * weights.sqrt()[:, None]


def _factor(
    rows: Float[Tensor, "rows width"], n: Float[Tensor, ""], ridge: float, relative: bool
) -> Float[Tensor, "width width"]:
    """Give the Cholesky factor of a view's regularised covariance."""
    gram = rows.mT @ rows / n
    width, trace = len(gram), gram.diagonal().sum()
    rounding = torch.finfo(gram.dtype).eps * trace.detach()
    added = ridge * (trace / width if relative else 1.0) + SAFETY * width * rounding + NOTHING
    # Unlike `cholesky` this neither waits for the device nor stops where a state is NaN: the
    # training loop tells that with the batch.
    factor: Tensor = torch.linalg.cholesky_ex(gram + added * torch.eye(width).to(gram)).L
    return factor


def _lead(matrix: Float[Tensor, "rows columns"], k: int) -> Float[Tensor, "rows columns"]:
    """Give Σ uᵢvᵢᵀ over the k largest singular values, by the smaller of the two Gram matrices.

    In about half the time of an SVD; values below 10⁻⁶ or so of the largest count as zero.
    """
    tall = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.mT
    squares, vectors = torch.linalg.eigh(torch.nan_to_num(tall.mT @ tall, 0.0, 0.0, 0.0))
    squares, vectors = squares[-k:].clamp(min=0), vectors[:, -k:]
    tiny = SAFETY * tall.shape[1] * torch.finfo(tall.dtype).eps * squares[-1]
    inverse = torch.where(squares > tiny, squares.rsqrt(), 0.0)
    leading: Tensor = tall @ (vectors * inverse) @ vectors.mT
    return leading if tall is matrix else leading.mT
