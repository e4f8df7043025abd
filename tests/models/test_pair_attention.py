"""Attention of packed decoders, against torch's own on one sequence after another."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from calque.models import attention as pair_attention
from calque.models.attention import plan_causal, plan_cross
from calque.tokens.ragged import Ragged, pack
from calque.types import TokenBatch

LENGTHS = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=5)
SCALE = 0.5


def make(lengths: list[int]) -> TokenBatch:
    return pack(Ragged.of([[7] * n for n in lengths]), pad_id=1)


def draw(n_tokens: int, seed: int) -> torch.Tensor:
    return torch.randn(n_tokens, 2, 4, generator=torch.Generator().manual_seed(seed))


@given(LENGTHS)
def test_causal_and_cross_are_those_of_every_pair_alone(lengths: list[tuple[int, int]]) -> None:
    tgt, src = make([n for n, _ in lengths]), make([n for _, n in lengths])
    q, k, v = (draw(len(tgt.ids), seed) for seed in range(3))
    keys, values = (draw(len(src.ids), seed) for seed in (3, 4))
    before = plan_causal(tgt, torch.float32)(q, k, v, 0.0, SCALE, None)
    across = plan_cross(tgt, src, torch.float32)(q, keys, values, 0.0, SCALE, None)
    for number in range(len(lengths)):
        here = slice(*tgt.offsets[number : number + 2].tolist())
        there = slice(*src.offsets[number : number + 2].tolist())
        mine = [x[here].transpose(0, 1) for x in (q, k, v)]
        alone = F.scaled_dot_product_attention(*mine, is_causal=True, scale=SCALE)
        torch.testing.assert_close(before[here], alone.transpose(0, 1))
        theirs = [x[there].transpose(0, 1) for x in (keys, values)]
        alone = F.scaled_dot_product_attention(mine[0], *theirs, scale=SCALE)
        torch.testing.assert_close(across[here], alone.transpose(0, 1))


@given(LENGTHS)
def test_the_flash_kernel_is_asked_for_the_same(lengths: list[tuple[int, int]]) -> None:
    """A stand-in for the kernel, which knows no CPU, by its documentation: (-1, 0) is causal."""
    tgt, src = make([n for n, _ in lengths]), make([n for _, n in lengths])

    def kernel(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seq_q: torch.Tensor,
        cu_seq_k: torch.Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float,
        window_size: tuple[int, int],
    ) -> torch.Tensor:
        assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
        assert (int(cu_seq_q.diff().max()), int(cu_seq_k.diff().max())) == (max_q, max_k)
        parts = []
        for number in range(len(cu_seq_q) - 1):
            mine = query[cu_seq_q[number] : cu_seq_q[number + 1]].transpose(0, 1)
            there = slice(int(cu_seq_k[number]), int(cu_seq_k[number + 1]))
            theirs = [x[there].transpose(0, 1) for x in (key, value)]
            causal = window_size == (-1, 0)
            mixed = F.scaled_dot_product_attention(mine, *theirs, is_causal=causal, scale=scale)
            parts.append(mixed.transpose(0, 1))
        return torch.cat(parts)

    q, k, v = (draw(len(tgt.ids), seed) for seed in range(3))
    keys, values = (draw(len(src.ids), seed) for seed in (3, 4))
    with mock.patch("torch.nn.attention.varlen.varlen_attn", kernel):
        before = pair_attention._flash_attention(tgt, tgt, causal=True)
        across = pair_attention._flash_attention(tgt, src, causal=False)
        found = [before(q, k, v, 0.0, SCALE, None), across(q, keys, values, 0.0, SCALE, None)]
    wanted = [
        plan_causal(tgt, torch.float32)(q, k, v, 0.0, SCALE, None),
        plan_cross(tgt, src, torch.float32)(q, keys, values, 0.0, SCALE, None),
    ]
    torch.testing.assert_close(found, wanted)


def test_sequences_that_are_empty_on_both_sides_do_not_matter() -> None:
    tgt, src = make([2, 0, 3]), make([4, 0, 1])
    q, keys, values = draw(5, 0), draw(5, 1), draw(5, 2)
    found = plan_cross(tgt, src, torch.float32)(q, keys, values, 0.0, SCALE, None)
    full = plan_cross(make([2, 3]), make([4, 1]), torch.float32)(q, keys, values, 0.0, SCALE, None)
    assert torch.equal(found, full)
    assert found.isfinite().all()


def test_a_decoder_does_not_read_rows() -> None:
    from calque.tokens.ragged import BatchShape

    shape = BatchShape(32, 16, 4, 32)
    rows = pack(Ragged.of([[7] * 3, [7] * 4]), shape=shape, pad_id=1)
    with pytest.raises(AssertionError):
        plan_causal(rows, torch.float32)
    assert np.isin(rows.ids.numpy(), [1, 7]).all()
