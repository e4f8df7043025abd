"""Tables of scores against all of them at once, whether they are kept or computed where used."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from calque.algorithms import self_learning as score_table
from calque.algorithms.self_learning import SimilarityTable

sizes = st.integers(1, 40)
seeds = st.integers(0, 1000)


def draw(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@pytest.fixture(autouse=True, scope="module")
def _small_blocks() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(score_table, "BLOCK", 7)
        patch.setattr(score_table, "CPU_BLOCK", 4)
        yield


def make(n_src: int, n_tgt: int, kept: bool, seed: int) -> tuple[SimilarityTable, Tensor]:
    src, tgt = draw(n_src, 5, seed=seed), draw(n_tgt, 5, seed=seed + 1)
    table = SimilarityTable(n_src, n_tgt, src, kept_bytes=1 << 20 if kept else 0)
    assert (table.scores is not None) == kept
    table.fill(src, tgt)
    return table, src @ tgt.mT


@given(sizes, sizes, st.booleans(), seeds, st.data())
def test_the_highest_of_rows_and_columns(
    n_src: int, n_tgt: int, kept: bool, seed: int, data: st.DataObject
) -> None:
    table, scores = make(n_src, n_tgt, kept, seed)
    k = data.draw(st.integers(1, min(n_src, n_tgt)))
    by_src, by_tgt = table.best(k)
    for found, expected in ((by_src, scores.numpy()), (by_tgt, scores.numpy().T)):
        np.testing.assert_allclose(found.numpy(), -np.sort(-expected, axis=1)[:, :k], atol=1e-12)


@given(sizes, sizes, st.booleans(), seeds, st.data())
def test_words_of_any_rank(
    n_src: int, n_tgt: int, kept: bool, seed: int, data: st.DataObject
) -> None:
    """The n-th of all sorted scores is the one; past the last there is none."""
    table, scores = make(n_src, n_tgt, kept, seed)
    for way, all_scores, n_words in (
        (table.ranked_targets, scores.numpy(), n_src),
        (table.ranked_sources, scores.numpy().T, n_tgt),
    ):
        n_others = all_scores.shape[1]
        drawn = st.lists(st.integers(1, n_others + 3), min_size=n_words, max_size=n_words)
        ranks = sorted(data.draw(drawn))
        penalties = draw(n_others, seed=seed + 2)
        order = np.argsort(-(all_scores - penalties.numpy()), axis=1)
        expected = [
            row[rank - 1] if rank <= n_others else -1
            for row, rank in zip(order, ranks, strict=True)
        ]
        assert way(torch.tensor(ranks), penalties).tolist() == expected


@given(sizes, sizes, st.booleans(), seeds)
def test_a_table_can_be_filled_again(n_src: int, n_tgt: int, kept: bool, seed: int) -> None:
    table, _ = make(n_src, n_tgt, kept, seed)
    table.ranked_targets(torch.ones(n_src, dtype=torch.int64), torch.zeros(n_tgt).double())
    src, tgt = draw(n_src, 5, seed=seed + 3), draw(n_tgt, 5, seed=seed + 4)
    table.fill(src, tgt)
    torch.testing.assert_close(table.best(1)[0][:, 0], (src @ tgt.mT).amax(dim=1))
