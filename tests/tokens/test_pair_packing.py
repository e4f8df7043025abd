"""Pairs side by side: every sequence finds its partner, in its row, and no token is lost."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from calque.tokens.layout import pack_pairs
from calque.tokens.ragged import BatchShape, Ragged

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
        else:  # padding, or nothing
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
