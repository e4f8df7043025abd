"""Clouds laid onto each other: known movements are found, and shape is kept."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from calque.algorithms.cca import SimilarityTransform

seeds = st.integers(0, 1000)


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@settings(max_examples=30)
@given(seeds, st.integers(1, 5), st.integers(0, 3), st.floats(0.01, 100.0))
def test_a_known_movement_is_found(seed: int, width: int, more: int, scale: float) -> None:
    """Also into a space of more dimensions."""
    src = draw(20, width, seed=seed)
    frame = torch.linalg.qr(draw(width + more, width + more, seed=seed + 1))[0][:width]
    tgt = scale * src @ frame + draw(width + more, seed=seed + 2)
    torch.testing.assert_close(SimilarityTransform.of(src, tgt).apply(src), tgt)


def test_the_turn_is_scipys() -> None:
    src, tgt = draw(30, 4), draw(30, 4, seed=1) + 2
    x, y = (rows - rows.mean(0) for rows in (src, tgt))
    turn, _ = scipy.linalg.orthogonal_procrustes(x.numpy(), y.numpy())
    found = SimilarityTransform.of(src, tgt)
    scale = y.norm() / x.norm()
    np.testing.assert_allclose(found.matrix.numpy(), scale.item() * turn, atol=1e-10)
    laid = found.apply(src)
    torch.testing.assert_close(laid.mean(0), tgt.mean(0))
    assert laid.var(0).sum().item() == pytest.approx(tgt.var(0).sum().item())


@settings(max_examples=30)
@given(seeds, st.integers(1, 6), st.integers(1, 6), st.integers(1, 9))
def test_means_and_spreads_meet_whatever_the_clouds(
    seed: int, src_width: int, tgt_width: int, n_rows: int
) -> None:
    src, tgt = draw(n_rows, src_width, seed=seed), draw(n_rows, tgt_width, seed=seed + 1)
    laid = SimilarityTransform.of(src, tgt).apply(src)
    torch.testing.assert_close(laid.mean(0), tgt.mean(0))
    centered = (laid - laid.mean(0)).norm().item(), (tgt - tgt.mean(0)).norm().item()
    assert centered[0] == pytest.approx(centered[1], abs=1e-9)


@settings(max_examples=30)
@given(seeds, st.integers(1, 5), st.integers(0, 3), st.integers(2, 12))
def test_no_other_turn_is_nearer(seed: int, width: int, more: int, n_rows: int) -> None:
    """Of all that give the cloud the same mean and the same spread."""
    src, tgt = draw(n_rows, width, seed=seed), draw(n_rows, width + more, seed=seed + 1)
    found = SimilarityTransform.of(src, tgt)
    distance = (found.apply(src) - tgt).norm()
    scale = torch.linalg.matrix_norm(found.matrix, 2)
    for number in range(3):
        frame = torch.linalg.qr(draw(width + more, width + more, seed=seed + 2 + number))[0][:width]
        other = SimilarityTransform(found.center, scale * frame, found.shift)
        assert distance <= (other.apply(src) - tgt).norm() + 1e-9


def test_a_point_is_laid_on_the_mean() -> None:
    src, tgt = torch.ones(5, 3), draw(5, 2).float()
    laid = SimilarityTransform.of(src, tgt).apply(src)
    assert laid.dtype == torch.float32
    torch.testing.assert_close(laid, tgt.mean(0).expand(5, 2))
