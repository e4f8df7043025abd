"""Nearest orthogonal matrices by products, against singular vectors."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from calque.algorithms.procrustes import polar_factor


def draw(hidden: int, condition: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    u, v = (
        torch.linalg.qr(torch.randn(hidden, hidden, generator=generator, dtype=torch.float64))[0]
        for _ in range(2)
    )
    return u @ torch.diag(torch.logspace(0, -math.log10(condition), hidden).double()) @ v


@given(
    hidden=st.integers(1, 24),
    log_condition=st.floats(0, 6),
    scale=st.floats(1e-6, 1e6),
    seed=st.integers(0, 1000),
)
def test_it_is_that_of_singular_vectors(
    hidden: int, log_condition: float, scale: float, seed: int
) -> None:
    matrix = draw(hidden, 10**log_condition, seed)
    u, _, v = torch.linalg.svd(matrix)
    found = polar_factor(scale * matrix)
    assert found is not None
    torch.testing.assert_close(found, u @ v, rtol=0, atol=1e-8)


@pytest.mark.parametrize("rank", [0, 1, 5])
def test_what_is_not_unique_is_not_found(rank: int) -> None:
    matrix = draw(6, 10.0, 0)
    matrix[:, rank:] = 0
    assert polar_factor(matrix) is None


def test_infinite_numbers_have_none() -> None:
    assert polar_factor(torch.full((3, 3), math.nan, dtype=torch.float64)) is None
