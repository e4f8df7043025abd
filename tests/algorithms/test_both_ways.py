"""Nearest words in both directions against all scores at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from calque.algorithms.nearest import log_sum_exp_both_ways, nearest_neighbors_both_ways
from calque.errors import InputError


def draw(n_src: int, n_tgt: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    src = torch.randn(n_src, 6, generator=generator, dtype=torch.float64)
    return src, torch.randn(n_tgt, 6, generator=generator, dtype=torch.float64)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 60), st.integers(0, 9), st.data())
def test_blocks_change_nothing(
    n_src: int, n_tgt: int, block: int, seed: int, data: st.DataObject
) -> None:
    src, tgt = draw(n_src, n_tgt, seed)
    k_src = data.draw(st.integers(1, min(3, n_tgt)) | st.integers(1, n_tgt))
    k_tgt = data.draw(st.integers(0, min(3, n_src)) | st.integers(0, n_src))
    penalties = torch.linspace(-1, 2, n_src).double(), torch.linspace(1, -1, n_tgt).double()
    n_done: list[int] = []
    forward, backward = nearest_neighbors_both_ways(
        src,
        tgt,
        k_src,
        k_tgt,
        scale=1.5,
        src_penalties=penalties[0],
        tgt_penalties=penalties[1],
        block=block,
        on_rows=n_done.append,
    )
    scores = 1.5 * src.numpy() @ tgt.numpy().T
    by_src, by_tgt = scores - penalties[1].numpy(), scores.T - penalties[0].numpy()
    for (values, places), expected, k in ((forward, by_src, k_src), (backward, by_tgt, k_tgt)):
        assert values.shape == places.shape == (len(expected), k)
        np.testing.assert_allclose(values.numpy(), -np.sort(-expected)[:, :k], atol=1e-12)
        np.testing.assert_array_equal(places.numpy(), np.argsort(-expected)[:, :k])
    assert sum(n_done) == n_src


@given(st.integers(1, 30), st.integers(1, 30), st.integers(1, 40))
def test_log_sums(n_src: int, n_tgt: int, block: int) -> None:
    src, tgt = draw(n_src, n_tgt, 1)
    n_done: list[int] = []
    rows, columns = log_sum_exp_both_ways(src, tgt, 30.0, block=block, on_rows=n_done.append)
    scores = 30 * src @ tgt.mT
    torch.testing.assert_close(rows, scores.logsumexp(1))
    torch.testing.assert_close(columns, scores.logsumexp(0))
    assert sum(n_done) == n_src


def test_more_than_there_are() -> None:
    src, tgt = draw(3, 4, 0)
    with pytest.raises(InputError, match=r"k=5, of 4 words \(choose k from 1 to 4\)"):
        nearest_neighbors_both_ways(src, tgt, 5)
    with pytest.raises(InputError, match="k=4, of 3 words"):
        nearest_neighbors_both_ways(src, tgt, 1, 4)
