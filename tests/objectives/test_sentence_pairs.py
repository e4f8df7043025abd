"""Batches of sentences read apart: where tokens lie, whose they are, and the means of them."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from calque.models.pooling import pool_sentences
from calque.objectives.base import Marks, hash_sequences, lay_apart
from calque.objectives.contrastive import SentencePairBatch, SentencePairCollator
from calque.tokens.ragged import BatchShape, Ragged

Pairs = list[tuple[list[int], list[int]]]

FIRST, LAST, PAD = 0, 2, 1
MARKS = Marks(FIRST, LAST, 1, PAD, 3, (FIRST, PAD, LAST, 3), 100)
# The third pair has the first one's source, the fourth the second one's target.
PAIRS: Pairs = [
    ([10, 11, 12], [20]),
    ([13], [21, 22]),
    ([10, 11, 12], [23, 24, 25, 26, 27]),
    ([14, 15], [21, 22]),
]
# Rows of 8 tokens: sources and targets lie in an order of their own.
SHAPE = BatchShape(tokens=56, row=8, sequences=12, budget=56)
SENTENCE = st.lists(st.integers(4, 99), min_size=1, max_size=6)


def collate(pairs: Pairs, shape: BatchShape | None) -> SentencePairBatch:
    sides = tuple(Ragged.of([pair[side] for pair in pairs]) for side in (0, 1))
    return SentencePairCollator(MARKS, shape)(sides, torch.Generator())


def pool_slowly(batch: SentencePairBatch, states: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """Find every sentence among the sequences by its ids, and average its states."""
    found: dict[tuple[int, ...], Tensor] = {}
    ids, offsets = batch.tokens.ids.tolist(), batch.tokens.offsets.tolist()
    for start, stop in pairwise(offsets):
        if stop > start and ids[start] == FIRST:
            found[tuple(ids[start + 1 : stop - 1])] = states[start + 1 : stop - 1].mean(dim=0)
    src, tgt = ([found[tuple(pair[side])] for pair in pairs] for side in (0, 1))
    return torch.stack(src), torch.stack(tgt)


def states_by_id(batch: SentencePairBatch) -> Tensor:
    """States that only depend on the token and its position, as those of equal sentences are."""
    table = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
    return table[batch.tokens.ids] + batch.tokens.positions[:, None]


@pytest.mark.parametrize("shape", [None, SHAPE])
def test_sentences_are_the_means_of_their_tokens(shape: BatchShape | None) -> None:
    batch = collate(PAIRS, shape)
    states = states_by_id(batch)
    for found, expected in zip(batch.pool(states), pool_slowly(batch, states, PAIRS), strict=True):
        torch.testing.assert_close(found[: len(PAIRS)], expected)
        assert found[len(PAIRS) :].eq(0).all()


@given(st.lists(st.tuples(SENTENCE, SENTENCE), min_size=1, max_size=6), st.booleans())
def test_any_sentences_are_pooled_as_a_loop_does(pairs: Pairs, with_rows: bool) -> None:
    batch = collate(pairs, SHAPE if with_rows else None)
    states = states_by_id(batch)
    for found, expected in zip(batch.pool(states), pool_slowly(batch, states, pairs), strict=True):
        torch.testing.assert_close(found[: len(pairs)], expected)


def test_pooling_is_that_of_the_finished_model() -> None:
    """Without a shape the sequences are the sources and then the targets."""
    batch = collate(PAIRS, None)
    states = torch.randn(len(batch.tokens.ids), 6)
    keep = ~torch.isin(batch.tokens.ids, torch.tensor([FIRST, LAST]))
    expected = pool_sentences(states, batch.tokens.offsets, keep)
    torch.testing.assert_close(torch.cat(batch.pool(states)), expected)


def test_half_precision_is_pooled_in_single() -> None:
    batch = collate([(list(range(4, 100)) * 4, [5])], None)
    states = torch.full((len(batch.tokens.ids), 2), 1.01, dtype=torch.bfloat16)
    src, tgt = batch.pool(states)
    assert src.dtype == torch.float32
    assert src.tolist() == tgt.tolist() == [[states[0, 0].item()] * 2]
    assert batch.pool(states.double())[0].dtype == torch.float64


def test_marks_and_other_sentences_get_no_gradient() -> None:
    batch = collate(PAIRS, SHAPE)
    states = torch.randn(len(batch.tokens.ids), 3, requires_grad=True)
    src, _ = batch.pool(states)
    (gradient,) = torch.autograd.grad(src[2].sum(), states)
    touched = gradient.ne(0).any(dim=1)
    assert sorted(batch.tokens.ids[touched].tolist()) == [10, 11, 12]
    assert gradient[touched].unique().tolist() == pytest.approx([1 / 3])


def owners_of(batch: SentencePairBatch) -> dict[int, list[int]]:
    """List the tokens that each sentence owns, in order."""
    found: dict[int, list[int]] = {}
    for token, owner in zip(batch.tokens.ids.tolist(), batch.owners.tolist(), strict=True):
        found.setdefault(owner, []).append(token)
    return found


def test_owners_without_a_shape() -> None:
    found = owners_of(collate(PAIRS, None))
    expected = [pair[side] for side in (0, 1) for pair in PAIRS]
    assert [found[k] for k in range(8)] == expected
    assert sorted(found[8]) == [FIRST] * 8 + [LAST] * 8


def test_owners_with_a_shape() -> None:
    """Room for six pairs: targets begin at 6, and what is nobody's is 12's."""
    batch = collate(PAIRS, SHAPE)
    found = owners_of(batch)
    assert found.keys() == {0, 1, 2, 3, 6, 7, 8, 9, 12}
    assert [found[k] for k in range(4)] == [pair[0] for pair in PAIRS]
    assert [found[k + 6] for k in range(4)] == [pair[1] for pair in PAIRS]
    n_padding = 56 - batch.tokens.n_real
    assert sorted(found[12]) == [FIRST] * 8 + [PAD] * n_padding + [LAST] * 8
    assert batch.weights.tolist() == [1, 1, 1, 1, 0, 0]


def test_batches_of_a_shape_have_one_shape() -> None:
    def sizes(batch: SentencePairBatch) -> list[int]:
        tokens = [batch.tokens.ids, batch.tokens.positions, batch.tokens.offsets]
        rest = [batch.owners, batch.weights, batch.src_keys, batch.tgt_keys]
        return [len(array) for array in tokens + rest]

    batches = [collate(pairs, SHAPE) for pairs in (PAIRS, PAIRS[:1], PAIRS[1:] * 2)]
    assert sizes(batches[0]) == sizes(batches[1]) == sizes(batches[2])
    assert [int(batch.weights.sum()) for batch in batches] == [4, 1, 6]
    more = collate(PAIRS * 2, SHAPE)  # than the shape has room for: nothing is lost
    assert more.weights.tolist() == [1] * 8


def test_equal_sentences_have_equal_keys() -> None:
    for shape in (None, SHAPE):
        batch = collate(PAIRS, shape)
        src, tgt = batch.src_keys.tolist()[:4], batch.tgt_keys.tolist()[:4]
        assert src[0] == src[2]
        assert tgt[1] == tgt[3]
        assert len(set(src)) == len(set(tgt)) == 3


@given(st.lists(st.lists(st.integers(0, 2**31), min_size=1, max_size=5), max_size=8))
def test_hashes_are_equal_where_sequences_are(sequences: list[list[int]]) -> None:
    ragged = Ragged.of([*sequences, *sequences[::-1]])
    found = hash_sequences(ragged.ids, ragged.lengths).tolist()
    n = len(sequences)
    assert found[:n] == found[n:][::-1]
    assert len(set(found)) == len({tuple(sequence) for sequence in sequences})


def test_hashes_of_like_sequences_differ() -> None:
    """All orders and lengths of few tokens, and long sentences that differ in one place."""
    sequences = [list(s) for n in range(1, 8) for s in product((0, 1, 2), repeat=n)]
    base = list(range(120))
    sequences += [[*base[:k], 7_000, *base[k + 1 :]] for k in range(120)]
    sequences += [base[:k] + base[k + 1 :] + [base[k]] for k in range(119)]
    ragged = Ragged.of(sequences)
    found = hash_sequences(ragged.ids, ragged.lengths).tolist()
    assert len(set(found)) == len(sequences)


def test_the_sides_may_own_their_marks() -> None:
    src, tgt = (Ragged.of([pair[side] for pair in PAIRS]) for side in (0, 1))
    for shape in (None, SHAPE):
        tokens, owners = lay_apart((src, tgt), MARKS, shape)
        found: dict[int, list[int]] = {}
        for token, owner in zip(tokens.ids.tolist(), owners.tolist(), strict=True):
            found.setdefault(owner, []).append(token)
        for k, pair in enumerate(PAIRS):
            assert found[k] == [FIRST, *pair[0], LAST]
            assert found[k + 4] == [FIRST, *pair[1], LAST]
        assert set(found.get(8, [])) <= {PAD}
        assert (8 in found) == (shape is not None)


def test_a_batch_travels_whole() -> None:
    batch = collate(PAIRS, SHAPE)
    moved = batch.to("cpu")
    assert type(moved) is SentencePairBatch
    assert moved.tokens.ids.equal(batch.tokens.ids)
    assert moved.tokens.row == 8
    assert moved.owners.equal(batch.owners)
    there = batch.to("meta")
    arrays = [there.tokens.ids, there.tokens.positions, there.tokens.offsets, there.owners]
    arrays += [there.weights, there.src_keys, there.tgt_keys]
    assert all(array.is_meta for array in arrays)
