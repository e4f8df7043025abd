"""Packed attention against torch's own, sequence by sequence."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from calque.models import attention
from calque.models.attention import attend_packed, pad_slots, plan_attention
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
    """Attend with torch's function, a sequence at a time and without any padding."""
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
    """Run batches of a fixed shape through either way of attending."""
    monkeypatch.setattr(attention, "LONGEST_ROW", 256 if request.param == "rows" else 0)


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
def test_no_sequence_sees_another(shape: BatchShape | None) -> None:
    batch = make_batch(MIXED, shape)
    query, key, value = draw(batch)
    attend = plan_attention(batch, torch.float64)
    before = attend(query, key, value, 0.0, 0.5, None)
    start, stop = batch.offsets[1:3].tolist()
    changed = value.detach().clone()
    changed[start:stop] += 1
    moved = (attend(query, key, changed, 0.0, 0.5, None) - before).abs().sum((1, 2)) > 1e-9
    assert moved.nonzero().flatten().tolist() == list(range(start, stop))


def test_every_query_sees_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even padding far from its sentence: some kernels answer NaN to a query that sees none."""
    masks = []

    def watch(query: Tensor, *states: Tensor, attn_mask: Tensor, **options: object) -> Tensor:
        masks.append(attn_mask)
        return query

    monkeypatch.setattr(F, "scaled_dot_product_attention", watch)
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
def test_slots_match_a_loop(lengths: list[int]) -> None:
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    slots, valid = pad_slots(offsets, max(lengths))
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
def test_window_and_scale_reach_the_plan(passed: int | None, reach: int | None) -> None:
    """Transformers gives one more than the tokens seen to each side; the scale may be missing."""
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
