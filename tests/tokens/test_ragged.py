"""Batching compared with plain lists; packed batches contain exactly their sequences."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from calque.errors import InputError
from calque.tokens.ragged import (
    BatchShape,
    Ragged,
    add_special_tokens,
    assign_rows,
    batch_by_length,
    batch_in_order,
    interleave,
    pack,
    ranges,
    reorder,
)
from calque.types import TokenBatch

PAD = 1
lengths_lists = st.lists(st.integers(0, 20), min_size=1, max_size=60)
token_lists = st.lists(st.lists(st.integers(2, 99), min_size=1, max_size=20), max_size=40)


def as_lists(ragged: Ragged) -> list[list[int]]:
    ends = np.cumsum(ragged.lengths)
    return [ragged.ids[end - n : end].tolist() for n, end in zip(ragged.lengths, ends, strict=True)]


def unpack(batch: TokenBatch) -> list[tuple[list[int], list[int]]]:
    """List the ids and positions of every sequence that has tokens."""
    bounds = batch.offsets.tolist()
    return [
        (batch.ids[start:stop].tolist(), batch.positions[start:stop].tolist())
        for start, stop in pairwise(bounds)
        if stop > start
    ]


@given(lengths_lists, st.integers(1, 60), st.none() | st.integers(1, 5))
def test_batches_in_order_fill_the_budget(
    lengths: list[int], max_tokens: int, max_sequences: int | None
) -> None:
    cuts = list(batch_in_order(np.array(lengths), max_tokens, max_sequences))
    assert np.concatenate(cuts).tolist() == list(range(len(lengths)))
    for cut in cuts:
        n_tokens = sum(lengths[k] for k in cut)
        assert n_tokens <= max_tokens or len(cut) == 1
        assert max_sequences is None or len(cut) <= max_sequences
        following = int(cut[-1]) + 1
        if following < len(lengths) and len(cut) != max_sequences:
            assert n_tokens + lengths[following] > max_tokens  # one more would not fit


@given(lengths_lists, st.integers(1, 100))
def test_batches_by_length_contain_every_sequence_once(lengths: list[int], max_tokens: int) -> None:
    batches = batch_by_length(np.array(lengths), max_tokens)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))
    order = [lengths[k] for batch in batches for k in batch]
    assert order == sorted(lengths, reverse=True)
    for batch in batches:
        assert len(batch) * max(lengths[k] for k in batch) <= max_tokens or len(batch) == 1


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 6))))
def test_ranges_match_a_loop(pairs: list[tuple[int, int]]) -> None:
    starts, lengths = (np.array([pair[i] for pair in pairs], dtype=np.int64) for i in (0, 1))
    expected = [start + step for start, length in pairs for step in range(length)]
    assert ranges(starts, lengths).tolist() == expected


@given(token_lists, st.none() | st.just(0), st.none() | st.just(2))
def test_special_tokens_match_lists(
    sequences: list[list[int]], first: int | None, last: int | None
) -> None:
    head, tail = [] if first is None else [first], [] if last is None else [last]
    found = add_special_tokens(Ragged.of(sequences), first, last)
    assert as_lists(found) == [[*head, *sequence, *tail] for sequence in sequences]


@given(st.lists(st.tuples(st.lists(st.integers(0, 9)), st.lists(st.integers(0, 9)))), st.randoms())
def test_joining_and_reordering_match_lists(
    pairs: list[tuple[list[int], list[int]]], random: object
) -> None:
    left, right = ([pair[i] for pair in pairs] for i in (0, 1))
    joined, n_left = interleave(Ragged.of(left), Ragged.of(right))
    assert as_lists(joined) == [a + b for a, b in pairs]
    assert n_left.tolist() == [len(a) for a in left]
    index = [random.randrange(len(pairs)) for _ in pairs]  # type: ignore[attr-defined]
    reordered = reorder(joined, np.array(index, dtype=np.int64))
    assert as_lists(reordered) == [pairs[k][0] + pairs[k][1] for k in index]


@given(token_lists)
def test_packed_sequences_can_be_restored(sequences: list[list[int]]) -> None:
    batch = pack(Ragged.of(sequences), pad_id=PAD)
    assert unpack(batch) == [(sequence, list(range(len(sequence)))) for sequence in sequences]
    assert batch.n_real == len(batch.ids) == sum(map(len, sequences))
    assert batch.longest == max(map(len, sequences), default=1)
    assert batch.offsets.dtype == torch.int32  # required by flash attention


@given(st.data())
def test_sequences_packed_into_a_shape_can_be_restored(data: st.DataObject) -> None:
    shape = BatchShape.fit(160, np.array([5, 9, 14, 20, 3] * 20), longest=20)
    kept = st.lists(st.integers(1, 20), max_size=shape.sequences).map(
        lambda lengths: lengths[: int(np.searchsorted(np.cumsum(lengths), shape.budget, "right"))]
    )
    lengths = data.draw(kept)
    sequences = [[10 + k % 80] * length for k, length in enumerate(lengths)]
    positions = np.concatenate([np.zeros(0, dtype=np.int64), *(3 + np.arange(n) for n in lengths)])
    batch = pack(Ragged.of(sequences), positions=positions, shape=shape, pad_id=PAD)
    found = [(ids, where) for ids, where in unpack(batch) if PAD not in ids]
    padding = [ids for ids, _ in unpack(batch) if PAD in ids]
    expected = [(ids, list(range(3, 3 + len(ids)))) for ids in sequences]
    assert Counter(map(repr, found)) == Counter(map(repr, expected))
    assert {token for ids in padding for token in ids} <= {PAD}
    assert batch.n_real == sum(lengths)
    assert batch.offsets[0] == 0 and batch.offsets[-1] == len(batch.ids)  # no token outside
    assert (batch.offsets.diff() >= 0).all() and int(batch.offsets.diff().max()) <= batch.longest
    assert int(batch.positions.min()) >= 0


@given(st.lists(st.integers(1, 20), min_size=1, max_size=100))
def test_rows_are_full_enough(lengths: list[int]) -> None:
    rows = assign_rows(np.array(lengths), row=20)
    filled = np.bincount(rows, weights=lengths)
    assert filled.max() <= 20
    assert (filled > 0).all()
    lightest = np.sort(filled)[:2]
    assert len(filled) == 1 or lightest.sum() > 20


def test_all_batches_of_a_stream_have_one_shape() -> None:
    generator = np.random.default_rng(0)
    lengths = generator.integers(3, 13, size=5000) * generator.integers(1, 6, size=5000)
    shape = BatchShape.fit(4096, lengths, longest=64)
    batches = []
    for cut in batch_in_order(lengths, shape.budget, shape.sequences):
        sequences = [[7] * int(lengths[k]) for k in cut]
        batches.append(pack(Ragged.of(sequences), shape=shape, pad_id=PAD))
    assert {(len(b.ids), len(b.positions), len(b.offsets), b.longest) for b in batches} == {
        (shape.tokens, shape.tokens, len(batches[0].offsets), batches[0].longest)
    }
    real = sum(batch.n_real for batch in batches[:-1])
    assert real / (len(batches) - 1) / shape.tokens > 0.9  # little padding


def test_a_batch_too_small_for_the_longest_sequence_raises() -> None:
    with pytest.raises(InputError, match="raise batch_tokens or lower max_length"):
        BatchShape.fit(100, np.array([10, 20]), longest=101)
    shape = BatchShape.fit(160, np.array([5]), longest=16)
    with pytest.raises(ValueError, match="17"):
        pack(Ragged.of([[7] * 17]), shape=shape, pad_id=PAD)
