"""First values of embedding rows: means of known rows, and draws from their distribution."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from calque.types import InputError

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from calque.models.vocabulary import RowSources

N_ROWS_AT_ONCE = 1 << 14
JITTERS = (1e-9, 1e-7, 1e-5, 1e-3)


def combine_rows(
    matrix: Float[Tensor, "old hidden"], sources: RowSources
) -> Float[Tensor, "new hidden"]:
    """Add up weighted rows; a row without sources is zero, one with a single source a copy."""
    combined = matrix.new_zeros((sources.n_rows, matrix.shape[1]))
    for start in range(0, len(sources.rows), N_ROWS_AT_ONCE):
        chosen = slice(start, start + N_ROWS_AT_ONCE)
        parts = matrix[torch.from_numpy(sources.sources[chosen])]
        parts *= torch.from_numpy(sources.weights[chosen]).to(matrix)[:, None]
        combined.index_add_(0, torch.from_numpy(sources.rows[chosen]), parts)
    return combined


def draw_like(
    known: Float[Tensor, "known hidden"], n_rows: int, generator: torch.Generator
) -> Float[Tensor, "{n_rows} hidden"]:
    """Draw rows from the normal distribution with the mean and covariance of known rows.

    μ + L z with L Lᵀ = Σ + jitter; the jitter, a small share of the mean variance, lets rows fewer
    than dimensions do.
    """
    if len(known) < 2:
        raise InputError(f"{len(known)} matched rows: no covariance", fix="set unmatched=normal")
    mean = known.mean(dim=0, dtype=torch.float64)
    factor = _factor_covariance(known, mean).to(known)
    drawn = known.new_empty((n_rows, known.shape[1]))
    for start in range(0, n_rows, N_ROWS_AT_ONCE):
        block = drawn[start : start + N_ROWS_AT_ONCE]
        noise = torch.randn(block.shape, generator=generator, dtype=known.dtype)
        torch.addmm(mean.to(known), noise, factor.T, out=block)
    return drawn


def draw_normal(
    n_rows: int, hidden: int, deviation: float, generator: torch.Generator
) -> Float[Tensor, "{n_rows} {hidden}"]:
    """Draw rows around zero, as new models begin."""
    return deviation * torch.randn((n_rows, hidden), generator=generator)


def _factor_covariance(
    known: Float[Tensor, "known hidden"], mean: Float[Tensor, "hidden"]
) -> Float[Tensor, "hidden hidden"]:
    """Find the Cholesky factor of a covariance, with as little jitter as it takes."""
    covariance = mean.new_zeros((len(mean), len(mean)))
    for start in range(0, len(known), N_ROWS_AT_ONCE):  # twice as wide, so not all at once
        centered = known[start : start + N_ROWS_AT_ONCE].double() - mean
        covariance += centered.T @ centered / (len(known) - 1)
    scale = covariance.diagonal().mean()
    identity = torch.eye(len(covariance), dtype=covariance.dtype)
    for jitter in JITTERS:
        factor: Tensor
        factor, failed = torch.linalg.cholesky_ex(covariance + jitter * scale * identity)
        if not failed:
            return factor
    if scale == 0:  # all rows are the same
        return torch.zeros_like(covariance)
    raise InputError(
        "the covariance of the matched rows cannot be factored", fix="set unmatched=normal"
    )
