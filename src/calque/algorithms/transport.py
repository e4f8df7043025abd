"""Entropic optimal transport between the words of two sentences: Sinkhorn on padded batches.

Cuturi, 2013; XLM-Align (Chi et al., 2021), Eq. 3–6. Everything is computed in log space, so that
sharp kernels neither overflow nor vanish.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

# XLM-Align, Eq. 1: ε keeps the logarithm of a product finite.
MIN_PRODUCT = 1e-6


def product_log_kernel(
    products: Float[Tensor, "pairs src tgt"],
    valid: Bool[Tensor, "pairs src tgt"],
    sharpness: float = 1.0,
) -> Float[Tensor, "pairs src tgt"]:
    """Return log K with K = max(ε, hᵢᵀhⱼ)^sharpness, and −inf where not valid.

    XLM-Align, Eq. 1 and 5 with μ = 1 / sharpness. Paper: the minus sign of Eq. 1 is a misprint.

    >>> products = torch.tensor([[[4.0, -2.0]]])
    >>> product_log_kernel(products, products < 9, sharpness=0.5).exp()
    tensor([[[2.0000e+00, 1.0000e-03]]])
    """
    return exponential_log_kernel(products.clamp(min=MIN_PRODUCT).log(), valid, sharpness)


def exponential_log_kernel(
    similarity: Float[Tensor, "pairs src tgt"],
    valid: Bool[Tensor, "pairs src tgt"],
    sharpness: float,
) -> Float[Tensor, "pairs src tgt"]:
    """Return log K with K = exp(sharpness · s), and −inf where not valid (XLM-Align, Eq. 5).

    Paper: s is log max(ε, hᵢᵀhⱼ), as in `product_log_kernel`; with cosines, norms do not matter.
    This is entropic transport at cost 1 − s with regularization μ = 1 / sharpness.

    >>> cosines = torch.tensor([[[0.5, -0.5]]])
    >>> exponential_log_kernel(cosines, cosines > 0, sharpness=10.0).tolist()
    [[[5.0, -inf]]]
    """
    return torch.where(valid, sharpness * similarity, -torch.inf)


def log_sinkhorn(
    log_kernel: Float[Tensor, "pairs src tgt"],
    src_mass: Float[Tensor, "pairs src"],
    tgt_mass: Float[Tensor, "pairs tgt"],
    n_iterations: int = 2,
    scale_first: Literal["columns", "rows"] = "columns",
) -> Float[Tensor, "pairs src tgt"]:
    """Return the logarithm of the transport plan diag(u) K diag(v) (XLM-Align, Eq. 4 and 6).

    Each iteration scales the columns, then the rows, so that they sum to the masses: rows are
    exact after every iteration, columns in the limit, as in POT and in XLM-Align's code. With
    `scale_first="rows"` it is the other way round, as Eq. 6 is written. A row or column without
    similarity (padding) stays empty, whatever its mass.

    >>> log_kernel = torch.tensor([[[1000.0, 0.0], [0.0, -1000.0]]])
    >>> halves = torch.tensor([[0.5, 0.5]])
    >>> log_sinkhorn(log_kernel, halves, halves, n_iterations=1).exp()
    tensor([[[0.2500, 0.2500],
             [0.2500, 0.2500]]])
    """
    if scale_first == "rows":
        return log_sinkhorn(log_kernel.mT, tgt_mass, src_mass, n_iterations).mT
    log_src, log_tgt = _safe_log(src_mass), _safe_log(tgt_mass)
    log_plan = log_kernel
    for _ in range(n_iterations):
        log_plan = log_plan + _subtract(log_tgt, _log_sum(log_plan, 1))[:, None, :]
        log_plan = log_plan + _subtract(log_src, _log_sum(log_plan, 2))[:, :, None]
    return log_plan


def _log_sum(log_plan: Float[Tensor, "pairs src tgt"], dim: int) -> Float[Tensor, "pairs words"]:
    """Return logsumexp; the gradient of torch's own is NaN where all values are −inf."""
    top = log_plan.detach().amax(dim=dim, keepdim=True).clamp(min=torch.finfo(log_plan.dtype).min)
    return _safe_log((log_plan - top).exp_().sum(dim=dim)) + top.squeeze(dim)


def _safe_log(values: Float[Tensor, "pairs words"]) -> Float[Tensor, "pairs words"]:
    """Return the logarithm, −inf for 0; the gradient there is 0 instead of NaN."""
    return torch.where(values > 0, torch.where(values > 0, values, 1.0).log(), -torch.inf)


def _subtract(
    log_mass: Float[Tensor, "pairs words"], log_total: Float[Tensor, "pairs words"]
) -> Float[Tensor, "pairs words"]:
    """Return log(mass / total), and log 0 where the total is 0; also in the gradient."""
    empty = log_total == -torch.inf
    return torch.where(empty, -torch.inf, log_mass - log_total.masked_fill(empty, 0.0))
