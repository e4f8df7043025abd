"""Packed attention against PyTorch's own, sequence by sequence."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from calque.models import attention
from calque.models.attention import (
    attend_packed,
    padded_indices,
    plan_attention,
    plan_causal_attention,
    plan_cross_attention,
)
from calque.tokens.ragged import BatchShape, Ragged, pack
from calque.types import TokenBatch

HEADS, SIZE = 2, 4
SHAPE = BatchShape.fit(96, np.array([3, 9, 14, 1]), longest=16)
MIXED, EVEN = [9, 1, 14, 3, 16], [6, 6, 6]


def make_batch(lengths: list[int], shape: BatchShape | None = None) -> TokenBatch:
    return pack(Ragged.of([[7] * length for length in lengths]), shape=shape, pad_id=1)


def draw(batch: TokenBatch, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    size = (3, len(batch.ids), HEADS, SIZE)
    query, key, value = torch.randn(size, generator=generator, dtype=torch.float64)
    return query.requires_grad_(), key.requires_grad_(), value.requires_grad_()


def attend_one_by_one(
    batch: TokenBatch, states: tuple[Tensor, Tensor, Tensor], scale: float, window: int | None
) -> Tensor:
    """Attend with torch's function, one sequence at a time, without padding."""
    parts = []
    for start, stop in pairwise(batch.offsets.tolist()):
        if start < stop:
            steps = torch.arange(stop - start)
            near = (steps[:, None] - steps).abs() <= (len(steps) if window is None else window)
            q, k, v = (state[start:stop].transpose(0, 1) for state in states)
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=near, scale=scale)
            parts.append(mixed.transpose(0, 1))
    return torch.cat(parts)


@pytest.fixture(params=["rows", "padded"])
def longest_row(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run batches of a fixed shape through both implementations."""
    monkeypatch.setattr(attention, "MAX_ROW_LENGTH", 256 if request.param == "rows" else 0)


@pytest.mark.usefixtures("longest_row")
@pytest.mark.parametrize("window", [None, 0, 2, 100])
@pytest.mark.parametrize(
    "batch",
    [make_batch(MIXED), make_batch(EVEN), make_batch([5]), make_batch(MIXED, SHAPE)],
    ids=["mixed", "even", "one", "fixed shape"],
)
def test_matches_torch_in_value_and_gradient(batch: TokenBatch, window: int | None) -> None:
    states = draw(batch)
    attend = plan_attention(batch, torch.float64)
    found = attend(*states, 0.0, 0.3, window)
    expected = attend_one_by_one(batch, states, 0.3, window)
    torch.testing.assert_close(found, expected)
    weights = torch.arange(found.numel(), dtype=found.dtype).cos().view(found.shape)
    for mine, theirs in zip(
        torch.autograd.grad((found * weights).sum(), states),
        torch.autograd.grad((expected * weights).sum(), states),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.usefixtures("longest_row")
@pytest.mark.parametrize("shape", [None, SHAPE], ids=["packed", "fixed shape"])
def test_no_sequence_attends_to_another(shape: BatchShape | None) -> None:
    batch = make_batch(MIXED, shape)
    query, key, value = draw(batch)
    attend = plan_attention(batch, torch.float64)
    before = attend(query, key, value, 0.0, 0.5, None)
    start, stop = batch.offsets[1:3].tolist()
    changed = value.detach().clone()
    changed[start:stop] += 1
    moved = (attend(query, key, changed, 0.0, 0.5, None) - before).abs().sum((1, 2)) > 1e-9
    assert moved.nonzero().flatten().tolist() == list(range(start, stop))


def test_every_query_can_attend_to_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even padding far from its sentence: some kernels return NaN for a query without keys."""
    masks = []

    def record(query: Tensor, *states: Tensor, attn_mask: Tensor, **options: object) -> Tensor:
        masks.append(attn_mask)
        return query

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    batch = make_batch(MIXED)
    plan_attention(batch, torch.float64)(*draw(batch), 0.0, 0.3, 2)
    assert masks[0].shape == (5, 1, 16, 16)
    assert masks[0].any(-1).all()


@pytest.mark.usefixtures("longest_row")
@pytest.mark.parametrize("shape", [None, SHAPE], ids=["packed", "fixed shape"])
def test_dropout_keeps_the_mean(shape: BatchShape | None) -> None:
    batch = make_batch([16] * 5, shape)
    query, key, _ = (state.detach() for state in draw(batch))
    attend = plan_attention(batch, torch.float64)
    ones = torch.ones_like(query)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        drawn = torch.stack([attend(query, key, ones, 0.3, 0.5, None) for _ in range(100)])
    assert drawn.std() > 0.1
    assert abs(drawn.mean().item() - 1) < 0.02
    torch.testing.assert_close(attend(query, key, ones, 0.0, 0.5, None), ones)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=8).filter(any))
def test_padded_indices_match_a_loop(lengths: list[int]) -> None:
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    slots, valid = padded_indices(offsets, max(lengths))
    rows = [row[keep].tolist() for row, keep in zip(slots, valid, strict=True)]
    starts = offsets.tolist()
    assert rows == [list(range(s, s + n)) for s, n in zip(starts, lengths, strict=False) if n]
    assert int(slots.min()) >= 0 and int(slots.max()) < sum(lengths)


def test_without_a_plan_it_is_sdpa() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn((3, 2, HEADS, 5, SIZE), generator=generator)
    mask = torch.rand((2, 1, 5, 5), generator=generator) < 0.7
    mask |= torch.eye(5, dtype=torch.bool)
    module = torch.nn.Module()
    found, weights = attend_packed(module, query, key, value, mask, scaling=0.2)
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.2)
    torch.testing.assert_close(found, expected.transpose(1, 2))
    assert weights is None


@pytest.mark.parametrize(("passed", "reach"), [(None, None), (65, 64)])
def test_window_and_scale_are_passed_to_the_plan(passed: int | None, reach: int | None) -> None:
    """Transformers passes the number of visible tokens per side plus one; scale is optional."""
    seen: list[tuple[object, ...]] = []

    def attend(query: Tensor, key: Tensor, value: Tensor, *rest: object) -> Tensor:
        seen.append(rest)
        return value

    plan: Callable[..., Tensor] = attend
    query, key, value = torch.randn(3, 1, HEADS, 5, SIZE)
    mixed, _ = attend_packed(
        torch.nn.Module(), query, key, value, None, 0.1, attend=plan, sliding_window=passed
    )
    torch.testing.assert_close(mixed, value.transpose(1, 2))
    assert seen == [(0.1, SIZE**-0.5, reach)]


LENGTHS = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=5)
SCALE = 0.5


def draw_states(n_tokens: int, seed: int) -> torch.Tensor:
    return torch.randn(n_tokens, 2, 4, generator=torch.Generator().manual_seed(seed))


@given(LENGTHS)
def test_causal_and_cross_attention_equal_torch_per_sequence(
    lengths: list[tuple[int, int]],
) -> None:
    tgt, src = make_batch([n for n, _ in lengths]), make_batch([n for _, n in lengths])
    q, k, v = (draw_states(len(tgt.ids), seed) for seed in range(3))
    keys, values = (draw_states(len(src.ids), seed) for seed in (3, 4))
    before = plan_causal_attention(tgt, torch.float32)(q, k, v, 0.0, SCALE, None)
    across = plan_cross_attention(tgt, src, torch.float32)(q, keys, values, 0.0, SCALE, None)
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
def test_arguments_of_the_flash_kernel(lengths: list[tuple[int, int]]) -> None:
    """A replacement for the kernel, which needs a GPU: (-1, 0) means causal."""
    tgt, src = make_batch([n for n, _ in lengths]), make_batch([n for _, n in lengths])

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

    q, k, v = (draw_states(len(tgt.ids), seed) for seed in range(3))
    keys, values = (draw_states(len(src.ids), seed) for seed in (3, 4))
    with mock.patch("torch.nn.attention.varlen.varlen_attn", kernel):
        before = attention.plan_flash(tgt, tgt, causal=True)
        across = attention.plan_flash(tgt, src, causal=False)
        found = [before(q, k, v, 0.0, SCALE, None), across(q, keys, values, 0.0, SCALE, None)]
    wanted = [
        plan_causal_attention(tgt, torch.float32)(q, k, v, 0.0, SCALE, None),
        plan_cross_attention(tgt, src, torch.float32)(q, keys, values, 0.0, SCALE, None),
    ]
    torch.testing.assert_close(found, wanted)


def test_empty_sequences_have_no_effect() -> None:
    tgt, src = make_batch([2, 0, 3]), make_batch([4, 0, 1])
    q, keys, values = draw_states(5, 0), draw_states(5, 1), draw_states(5, 2)
    found = plan_cross_attention(tgt, src, torch.float32)(q, keys, values, 0.0, SCALE, None)
    full = plan_cross_attention(make_batch([2, 3]), make_batch([4, 1]), torch.float32)(
        q, keys, values, 0.0, SCALE, None
    )
    assert torch.equal(found, full)
    assert found.isfinite().all()


def test_causal_attention_does_not_support_rows() -> None:
    shape = BatchShape(32, 16, 4, 32)
    rows = pack(Ragged.of([[7] * 3, [7] * 4]), shape=shape, pad_id=1)
    with pytest.raises(AssertionError):
        plan_causal_attention(rows, torch.float32)
