"""Layouts of pairs and packed batches: partners, slots and owners of all tokens."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calque.tokens.layout import (
    add_pair_special_tokens,
    build_packed_layout,
    build_packed_pair_layout,
    fit_batch_shape,
    join_sides,
    pack_pairs,
)
from calque.tokens.ragged import BatchShape, Ragged
from calque.tokens.tokenizer import SpecialTokens

PAD, ROW = 1, 16
sentences = st.lists(st.integers(4, 99), min_size=1, max_size=ROW // 2)
pairs_of_sentences = st.lists(st.tuples(sentences, sentences), min_size=1, max_size=12)


@given(pairs_of_sentences, st.booleans())
def test_partners_read_each_other(pairs: list[tuple[list[int], list[int]]], fixed: bool) -> None:
    left, right = (Ragged.of(list(side)) for side in zip(*pairs, strict=True))
    shape = BatchShape(tokens=6 * ROW, row=ROW, sequences=8, budget=6 * ROW) if fixed else None
    found = pack_pairs(left, right, shape=shape, pad_id=PAD)
    ids, offsets, read = found.tokens.ids, found.tokens.offsets, found.read.offsets
    assert len(offsets) == len(read)
    assert len(offsets) % 2 == 1
    assert offsets[-1] == read[-1] == len(ids)
    assert sorted(found.order.tolist()) == list(range(len(ids)))
    mine = [ids[a:b].tolist() for a, b in pairwise(offsets.tolist())]
    theirs = [ids[found.order[a:b]].tolist() for a, b in pairwise(read.tolist())]
    seen = []
    for number in range(0, len(mine), 2):
        one, other = mine[number : number + 2]
        if one and other:
            assert theirs[number : number + 2] == [other, one]
            seen.append((one, other))
        else:  # padding or empty
            assert set(one) <= {PAD}
            assert theirs[number : number + 2] == [one, []]
    assert sorted(seen) == sorted(pairs)
    if fixed:
        rows = np.arange(len(ids)) // ROW
        assert (rows[found.order.numpy()] == rows).all()
        starts = [a // ROW for a, b in pairwise(offsets.tolist()) if a < b]
        ends = [(b - 1) // ROW for a, b in pairwise(offsets.tolist()) if a < b]
        assert starts == ends
    else:
        assert found.tokens.longest == max(len(side) for pair in pairs for side in pair)
    positions = found.tokens.positions.tolist()
    for a, b in pairwise(offsets.tolist()):
        if a < b and PAD not in ids[a:b]:
            assert positions[a:b] == list(range(b - a))
    assert found.is_right.sum() == right.lengths.sum()
    assert sorted(ids[found.is_right].tolist()) == sorted(right.ids.tolist())


@given(st.lists(st.integers(1, 20), min_size=1, max_size=12), st.booleans())
def test_slots_find_every_token(lengths: list[int], fixed: bool) -> None:
    sizes = np.array(lengths)
    ragged = Ragged(np.arange(5, 5 + sizes.sum()), sizes)
    shape = fit_batch_shape(sizes, [np.arange(len(sizes))]) if fixed else None
    packed = build_packed_layout(ragged, pad_id=1, shape=shape)
    assert np.array_equal(packed.tokens.ids.numpy()[packed.slots], ragged.ids)
    firsts = np.cumsum(sizes) - sizes
    assert np.array_equal(packed.tokens.ids.numpy()[packed.starts], ragged.ids[firsts])
    assert not packed.tokens.positions.numpy()[packed.starts].any()
    if shape is not None:
        rest = np.delete(packed.tokens.ids.numpy(), packed.slots)
        assert (rest == 1).all() and len(packed.tokens.ids) == shape.tokens


def test_the_shape_fits_every_batch() -> None:
    lengths = np.random.default_rng(0).integers(2, 40, 200)
    batches = np.array_split(np.random.default_rng(1).permutation(200), 9)
    shape = fit_batch_shape(lengths, batches)
    for batch in batches:
        text = Ragged(np.full(lengths[batch].sum(), 7), lengths[batch])
        tokens = build_packed_layout(text, pad_id=1, shape=shape).tokens
        assert len(tokens.ids) == shape.tokens and tokens.row == shape.row
        assert len(tokens.offsets) == shape.sequences + shape.tokens // shape.row + 1


def test_an_empty_sequence_raises() -> None:
    with pytest.raises(ValueError, match="without tokens"):
        build_packed_layout(Ragged(np.array([1]), np.array([1, 0])), pad_id=0)


@given(pairs_of_sentences, st.booleans())
def test_slots_find_every_token_of_pairs(
    pairs: list[tuple[list[int], list[int]]], fixed: bool
) -> None:
    left = Ragged.of([pair[0] for pair in pairs])
    right = Ragged.of([pair[1] if k % 3 else [] for k, pair in enumerate(pairs)])
    lengths = left.lengths + right.lengths
    shape = fit_batch_shape(lengths, [np.arange(len(lengths))]) if fixed else None
    packed = build_packed_pair_layout(left, right, pad_id=PAD, shape=shape)
    ids, expected = packed.pairs.tokens.ids.numpy(), np.concatenate([left.ids, right.ids])
    assert np.array_equal(ids[packed.slots], expected)
    assert (np.delete(ids, packed.slots) == PAD).all()
    both = np.concatenate([left.lengths, right.lengths])
    is_filled, firsts = both > 0, np.cumsum(both) - both
    assert np.array_equal(ids[packed.starts[is_filled]], expected[firsts[is_filled]])
    assert not packed.starts[~is_filled].any()


@pytest.mark.parametrize(
    ("n_between", "ids", "reset_positions"),
    [
        (2, [0, 7, 8, 2, 2, 9, 2], [0, 1, 2, 3, 0, 1, 2]),  # XLM-R
        (1, [0, 7, 8, 2, 9, 2], [0, 1, 2, 3, 0, 1]),  # BERT
    ],
)
def test_joined_pairs_by_hand(n_between: int, ids: list[int], reset_positions: list[int]) -> None:
    special_tokens = SpecialTokens(0, 2, n_between, PAD, 3, (0, 1, 2, 3), 100)
    sides = add_pair_special_tokens(Ragged.of([[7, 8]]), Ragged.of([[9]]), special_tokens)
    for reset, expected in ((True, reset_positions), (False, list(range(len(ids))))):
        joined, positions = join_sides(*sides, reset=reset)
        assert (joined.ids.tolist(), positions.tolist()) == (ids, expected)
