"""Optimal transport between the words of two sentences: Sinkhorn on padded batches.

Cuturi, 2013 (Sinkhorn Distances); Chi et al., 2021 (XLM-Align), for two iterations of it.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def uniform_mass(lengths: Int[Tensor, "pairs"], longest: int) -> Float[Tensor, "pairs longest"]:
    """Spread one unit of mass evenly over the words of every sentence, none over padding.

    >>> uniform_mass(torch.tensor([2, 4, 0]), 4).tolist()
    [[0.5, 0.5, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25], [0.0, 0.0, 0.0, 0.0]]
    """
    real = torch.arange(longest, device=lengths.device) < lengths[:, None]
    return real / lengths.clamp(min=1)[:, None]


def power_kernel(
    similarity: Float[Tensor, "pairs src tgt"],
    valid: Bool[Tensor, "pairs src tgt"],
    mu: float = 1.0,
    epsilon: float = 1e-6,
) -> Float[Tensor, "pairs src tgt"]:
    """Give XLM-Align's kernel max(ε, s)^(1/μ), 0 where not valid: the smaller μ, the sharper.

    Paper: Eq. 1 has a minus before the similarity, a misprint: with it every argmax changes.

    >>> cosines = torch.tensor([[[0.5, -0.5]]])
    >>> power_kernel(cosines, cosines > -1, mu=0.5, epsilon=0.125).tolist()
    [[[0.25, 0.015625]]]
    """
    return torch.where(valid, similarity.clamp(min=epsilon) ** (1 / mu), 0.0)


def exponential_log_kernel(
    similarity: Float[Tensor, "pairs src tgt"],
    valid: Bool[Tensor, "pairs src tgt"],
    sharpness: float,
) -> Float[Tensor, "pairs src tgt"]:
    """Give the logarithm of exp(sharpness · s), −inf where not valid.

    This is entropic transport at cost 1 − s with regularization 1 / sharpness.

    >>> cosines = torch.tensor([[[0.5, -0.5]]])
    >>> exponential_log_kernel(cosines, cosines > 0, sharpness=10.0).tolist()
    [[[5.0, -inf]]]
    """
    return torch.where(valid, sharpness * similarity, -torch.inf)


def sinkhorn(
    kernel: Float[Tensor, "pairs src tgt"],
    src_mass: Float[Tensor, "pairs src"],
    tgt_mass: Float[Tensor, "pairs tgt"],
    n_iterations: int = 2,
) -> Float[Tensor, "pairs src tgt"]:
    """Scale the columns, then the rows, of a kernel ≥ 0 so that they sum to the masses, in turn.

    Rows are exact after every iteration, columns in the limit: the order of POT and of XLM-Align's
    release. A row or column of zeros (padding) stays zero, whatever its mass.

    >>> kernel = torch.tensor([[[6.0, 1.0, 0.0], [2.0, 3.0, 0.0]]])
    >>> halves = torch.tensor([[0.5, 0.5, 0.0]])
    >>> sinkhorn(kernel, halves[:, :2], halves, n_iterations=1).tolist()
    [[[0.375, 0.125, 0.0], [0.125, 0.375, 0.0]]]
    """
    plan = kernel
    for _ in range(n_iterations):
        plan = plan * _divide(tgt_mass, plan.sum(dim=1))[:, None, :]
        plan = plan * _divide(src_mass, plan.sum(dim=2))[:, :, None]
    return plan


def _divide(
    mass: Float[Tensor, "pairs words"], total: Float[Tensor, "pairs words"]
) -> Float[Tensor, "pairs words"]:
    """Divide, with 0 for a division by 0; also in the gradient.

    Below the smallest normal number the quotient could overflow, so that counts as 0 as well.
    """
    filled = total >= torch.finfo(total.dtype).tiny
    return torch.where(filled, mass / torch.where(filled, total, 1.0), 0.0)


def log_sinkhorn(
    log_kernel: Float[Tensor, "pairs src tgt"],
    src_mass: Float[Tensor, "pairs src"],
    tgt_mass: Float[Tensor, "pairs tgt"],
    n_iterations: int = 2,
) -> Float[Tensor, "pairs src tgt"]:
    """Give the logarithm of `sinkhorn(exp(log_kernel), …)`, for kernels of any range.

    >>> log_kernel = torch.tensor([[[1000.0, 0.0], [0.0, -1000.0]]])
    >>> halves = torch.tensor([[0.5, 0.5]])
    >>> log_sinkhorn(log_kernel, halves, halves, n_iterations=1).exp()
    tensor([[[0.2500, 0.2500],
             [0.2500, 0.2500]]])
    """
    log_src, log_tgt = _safe_log(src_mass), _safe_log(tgt_mass)
    log_plan = log_kernel
    for _ in range(n_iterations):
        log_plan = log_plan + _subtract(log_tgt, _log_sum(log_plan, 1))[:, None, :]
        log_plan = log_plan + _subtract(log_src, _log_sum(log_plan, 2))[:, :, None]
    return log_plan


def _log_sum(log_plan: Float[Tensor, "pairs src tgt"], dim: int) -> Float[Tensor, "pairs words"]:
    """Sum in log space; torch's logsumexp has a gradient of nan where all is −inf."""
    top = log_plan.detach().amax(dim=dim, keepdim=True).clamp(min=torch.finfo(log_plan.dtype).min)
    return _safe_log((log_plan - top).exp_().sum(dim=dim)) + top.squeeze(dim)


def _safe_log(values: Float[Tensor, "pairs words"]) -> Float[Tensor, "pairs words"]:
    """Take the logarithm, −inf of 0; the gradient there is 0 rather than nan."""
    return torch.where(values > 0, torch.where(values > 0, values, 1.0).log(), -torch.inf)


def _subtract(
    log_mass: Float[Tensor, "pairs words"], log_total: Float[Tensor, "pairs words"]
) -> Float[Tensor, "pairs words"]:
    """Divide in log space, with log 0 for a division by 0; also in the gradient."""
    empty = log_total == -torch.inf
    return torch.where(empty, -torch.inf, log_mass - log_total.masked_fill(empty, 0.0))
