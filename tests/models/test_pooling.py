"""Pooling against plain loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from calque.models.pooling import pool_sentences, pool_words


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=8).filter(any),
    st.integers(0, 2**31),
)
def test_sentences_match_a_loop(lengths: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    states = torch.randn(sum(lengths), 3, generator=generator)
    keep = torch.rand(sum(lengths), generator=generator) < 0.5
    pooled = pool_sentences(states, offsets, keep)
    for row, start, stop in zip(pooled, offsets[:-1], offsets[1:], strict=True):
        mine, kept = states[start:stop], keep[start:stop]
        expected = mine[kept] if kept.any() else mine
        want = expected.mean(0) if len(expected) else torch.zeros(3)
        torch.testing.assert_close(row, want)


def test_half_precision_is_summed_in_single() -> None:
    states = torch.full((4096, 1), 1.0, dtype=torch.bfloat16)
    pooled = pool_sentences(states, torch.tensor([0, 4096]), torch.ones(4096, dtype=torch.bool))
    assert pooled.dtype == torch.float32
    assert pooled.item() == 1.0  # a bfloat16 sum of ones stops at 256


def test_gradients() -> None:
    states = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    offsets, keep = torch.tensor([0, 2, 5]), torch.tensor([True, False, False, False, False])
    assert torch.autograd.gradcheck(lambda x: pool_sentences(x, offsets, keep), states)
    words = torch.tensor([-1, 1, 1, 0, -1])
    for how in ("mean", "first"):
        assert torch.autograd.gradcheck(lambda x, how=how: pool_words(x, words, 3, how), states)


@pytest.mark.parametrize("how", ["mean", "first"])
def test_words_match_a_loop(how: str) -> None:
    states = torch.randn(9, 4)
    words = torch.tensor([-1, 2, 2, 0, 0, 0, 4, -1, 2])
    pooled = pool_words(states, words, 5, how)  # type: ignore[arg-type]
    for word in range(5):
        mine = states[words == word]
        want = torch.zeros(4) if len(mine) == 0 else mine.mean(0) if how == "mean" else mine[0]
        torch.testing.assert_close(pooled[word], want)
