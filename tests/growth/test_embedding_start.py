"""First rows of embeddings: means against SciPy, draws against NumPy's moments."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from calque.errors import InputError
from calque.growth.initialize import combine_rows, draw_like, draw_normal
from calque.growth.match import RowSources


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@given(st.integers(0, 2**31), st.integers(1, 12), st.integers(1, 9), st.integers(0, 30))
def test_combining_is_a_sparse_product(seed: int, n_new: int, n_old: int, n_parts: int) -> None:
    sparse = pytest.importorskip("scipy.sparse")
    draw = np.random.default_rng(seed)
    rows = np.sort(draw.integers(0, n_new, n_parts))
    sources = draw.integers(0, n_old, n_parts)
    weights = draw.random(n_parts).astype(np.float32)
    matrix = draw.standard_normal((n_old, 4)).astype(np.float32)
    product = sparse.coo_matrix((weights, (rows, sources)), shape=(n_new, n_old)) @ matrix
    found = combine_rows(torch.from_numpy(matrix), RowSources(n_new, rows, sources, weights))
    np.testing.assert_allclose(found.numpy(), product, rtol=1e-5, atol=1e-5)


def test_a_single_source_is_copied_bit_for_bit() -> None:
    matrix = torch.randn(5, 7, generator=generator())
    sources = RowSources(3, np.array([0, 2]), np.array([4, 4]), np.ones(2, dtype=np.float32))
    found = combine_rows(matrix, sources)
    assert torch.equal(found, torch.stack([matrix[4], torch.zeros(7), matrix[4]]))


def test_draws_have_the_moments_of_the_known() -> None:
    mixing = torch.randn(6, 6, generator=generator(1))
    known = torch.randn(400, 6, generator=generator(2)) @ mixing + torch.arange(6)
    drawn = draw_like(known, 200_000, generator(3))
    assert drawn.dtype == torch.float32
    expected = np.cov(known.numpy(), rowvar=False)
    np.testing.assert_allclose(drawn.mean(0), known.mean(0), atol=0.05)
    np.testing.assert_allclose(np.cov(drawn.numpy(), rowvar=False), expected, atol=0.15)
    assert np.abs(expected - np.diag(np.diag(expected))).max() > 1  # what a diagonal would miss


def test_fewer_rows_than_dimensions() -> None:
    """The draws stay in the span of the known rows, but for the jitter."""
    known = torch.randn(4, 50, generator=generator())
    drawn = draw_like(known, 30, generator(1)).double()
    centered = (known - known.mean(0)).double()
    basis = torch.linalg.qr(centered.T)[0][:, :3]
    offset = drawn - known.double().mean(0)
    outside = offset - offset @ basis @ basis.T
    assert offset.norm() > 10
    assert outside.norm() < 1e-2 * offset.norm()


def test_equal_rows_give_equal_rows() -> None:
    drawn = draw_like(torch.full((5, 3), 2.5), 4, generator())
    assert torch.equal(drawn, torch.full((4, 3), 2.5))


def test_draws_follow_the_generator() -> None:
    known = torch.randn(20, 5, generator=generator())
    assert torch.equal(draw_like(known, 9, generator(4)), draw_like(known, 9, generator(4)))
    assert not torch.equal(draw_like(known, 9, generator(4)), draw_like(known, 9, generator(5)))
    assert draw_like(known, 0, generator()).shape == (0, 5)
    first = draw_normal(9, 5, 0.02, generator(4))
    assert torch.equal(first, draw_normal(9, 5, 0.02, generator(4)))


def test_normal_rows() -> None:
    drawn = draw_normal(2000, 50, 0.02, generator())
    assert drawn.std().item() == pytest.approx(0.02, rel=0.02)
    assert drawn.mean().item() == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize("known", [torch.zeros(0, 3), torch.zeros(1, 3)])
def test_too_few_rows(known: torch.Tensor) -> None:
    with pytest.raises(InputError, match=f"{len(known)} matched rows: no covariance"):
        draw_like(known, 2, generator())


def test_rows_that_are_no_numbers() -> None:
    with pytest.raises(InputError, match="cannot be factored"):
        draw_like(torch.full((3, 2), float("nan")), 2, generator())
