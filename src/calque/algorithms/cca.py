"""Deep CCA: canonical correlations of two views of the same rows, and their sum as a loss.

Andrew et al., 2013: the correlations are the singular values of T = Σ11^{-1/2} Σ12 Σ22^{-1/2}. Here
the views are whitened by Cholesky factors, which rotates T but keeps its singular values. The
gradient divides by no difference of singular values, so equal or zero values and repeated rows
never give NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch

from calque.errors import InputError

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


RIDGE = 1e-3
# Added to the diagonal so that Cholesky succeeds, in units of width · rounding error · trace.
SAFETY = 10
# Variance of constant features; its inverse is finite.
SMALLEST_VARIANCE = 1e-100


def deep_cca_loss(
    src: Float[Tensor, "rows src_width"],
    tgt: Float[Tensor, "rows tgt_width"],
    weights: Float[Tensor, "rows"] | None = None,
    *,
    ridges: tuple[float, float] = (RIDGE, RIDGE),
    relative: bool = False,
    k: int | None = None,
) -> Float[Tensor, ""]:
    """Return minus the sum of the `k` largest canonical correlations.

    By default all are summed. The arguments are those of `whitened_cross_covariance`.

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
    """Return all canonical correlations, largest first, without gradients."""
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
    """Return L1⁻¹ Σ12 L2⁻ᵀ with Σ11 = X̄ᵀX̄/(n − 1) + r1·I = L1 L1ᵀ, and Σ22 = L2 L2ᵀ.

    X̄ is centered per feature. A row of weight 2 counts as two rows, a row of weight 0 not at all.
    `relative` ridges are multiples of a view's mean variance, so its scale does not matter; with
    absolute ridges, a view of larger scale has higher correlations. Everything is computed in
    double precision, because encoder states have directions 10⁴ times as strong as others.
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
    """Return the sum of the `k` largest singular values, by default all; its gradient is Σ uᵢvᵢᵀ.

    Where this convex function is not smooth, that is a subgradient. Directions of singular value
    zero, which are arbitrary, are left out of it.

    >>> sum_singular_values(torch.diag(torch.tensor([3.0, 2.0, 0.0])), k=1).item()
    3.0
    """
    n_values = min(matrix.shape)
    if k is not None and not 0 < k <= n_values:
        problem = f"k is {k}, but there are {n_values} correlations"
        raise InputError(problem, fix=f"choose k from 1 to {n_values}")
    with torch.no_grad():
        leading = _leading_directions(matrix, n_values if k is None else k)
    return (matrix * leading).sum()


def _center(
    rows: Float[Tensor, "rows width"], weights: Float[Tensor, "rows"], total: Float[Tensor, ""]
) -> Float[Tensor, "rows width"]:
    """Return rows minus their weighted mean, times the square roots of their weights."""
    mean = weights @ rows / torch.where(total > 0, total, 1.0)
    return (rows - mean) * weights.sqrt()[:, None]


def _factor(
    rows: Float[Tensor, "rows width"], n: Float[Tensor, ""], ridge: float, relative: bool
) -> Float[Tensor, "width width"]:
    """Return the Cholesky factor of a view's regularized covariance."""
    gram = rows.mT @ rows / n
    width, trace = len(gram), gram.diagonal().sum()
    rounding = torch.finfo(gram.dtype).eps * trace.detach()
    added = (
        ridge * (trace / width if relative else 1.0) + SAFETY * width * rounding + SMALLEST_VARIANCE
    )
    # Unlike `cholesky`, this neither waits for the device nor raises if a state is NaN: the
    # training loop reports that together with the batch.
    factor: Tensor = torch.linalg.cholesky_ex(gram + added * torch.eye(width).to(gram)).L
    return factor


def _leading_directions(
    matrix: Float[Tensor, "rows columns"], k: int
) -> Float[Tensor, "rows columns"]:
    """Return Σ uᵢvᵢᵀ over the k largest singular values, from the smaller Gram matrix.

    It takes about half the time of an SVD; values below about 10⁻⁶ of the largest count as zero.
    """
    tall = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.mT
    squares, vectors = torch.linalg.eigh(torch.nan_to_num(tall.mT @ tall, 0.0, 0.0, 0.0))
    squares, vectors = squares[-k:].clamp(min=0), vectors[:, -k:]
    tiny = SAFETY * tall.shape[1] * torch.finfo(tall.dtype).eps * squares[-1]
    inverse = torch.where(squares > tiny, squares.rsqrt(), 0.0)
    leading: Tensor = tall @ (vectors * inverse) @ vectors.mT
    return leading if tall is matrix else leading.mT


@dataclass(frozen=True, slots=True)
class SimilarityTransform:
    """Translation, rotation and scaling of rows: x ↦ (x − center) · matrix + shift.

    Schönemann & Carroll, 1970, but with the scale that gives both sets of rows the same variance:
    the least-squares scale would shrink noisy rows.
    """

    center: Float[Tensor, "src_width"]
    matrix: Float[Tensor, "src_width tgt_width"]
    shift: Float[Tensor, "tgt_width"]

    @classmethod
    def of(cls, src: Float[Tensor, "rows src_width"], tgt: Float[Tensor, "rows tgt_width"]) -> Self:
        """Return the transform that fits `src` rows to `tgt` rows; their widths may differ.

        >>> square = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
        >>> moved = 3 * square @ torch.tensor([[0.0, 1.0], [-1.0, 0.0]]) + 5
        >>> SimilarityTransform.of(square, moved).apply(square[2]).round(decimals=4).tolist()
        [2.0, 8.0]
        """
        x, y = src.to(torch.float64), tgt.to(torch.float64)
        center, shift = x.mean(dim=0), y.mean(dim=0)
        x, y = x - center, y - shift
        u, _, v = torch.linalg.svd(x.mT @ y, full_matrices=False)
        rotated = x @ (u @ v)
        spread = rotated.square().sum()
        scale = (y.square().sum() / torch.where(spread > 0, spread, 1.0)).sqrt()
        return cls(*(part.to(tgt.dtype) for part in (center, scale * (u @ v), shift)))

    def apply(self, rows: Float[Tensor, "*rows src_width"]) -> Float[Tensor, "*rows tgt_width"]:
        """Return the transformed rows."""
        return (rows - self.center) @ self.matrix + self.shift
