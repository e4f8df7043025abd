from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calque.tokens.layout import build_packed_layout, fit_batch_shape
from calque.tokens.ragged import Ragged


@given(st.lists(st.integers(1, 20), min_size=1, max_size=12), st.booleans())
def test_every_token_is_found_again(lengths: list[int], fixed: bool) -> None:
    sizes = np.array(lengths)
    ragged = Ragged(np.arange(5, 5 + sizes.sum()), sizes)
    shape = fit_batch_shape(sizes, [np.arange(len(sizes))]) if fixed else None
    placed = build_packed_layout(ragged, pad_id=1, shape=shape)
    assert np.array_equal(placed.tokens.ids.numpy()[placed.slots], ragged.ids)
    firsts = np.cumsum(sizes) - sizes
    assert np.array_equal(placed.tokens.ids.numpy()[placed.starts], ragged.ids[firsts])
    assert not placed.tokens.positions.numpy()[placed.starts].any()
    if shape is not None:
        rest = np.delete(placed.tokens.ids.numpy(), placed.slots)
        assert (rest == 1).all() and len(placed.tokens.ids) == shape.tokens


def test_the_shape_holds_every_batch() -> None:
    lengths = np.random.default_rng(0).integers(2, 40, 200)
    batches = np.array_split(np.random.default_rng(1).permutation(200), 9)
    shape = fit_batch_shape(lengths, batches)
    for batch in batches:
        text = Ragged(np.full(lengths[batch].sum(), 7), lengths[batch])
        tokens = build_packed_layout(text, pad_id=1, shape=shape).tokens
        assert len(tokens.ids) == shape.tokens and tokens.row == shape.row
        assert len(tokens.offsets) == shape.sequences + shape.tokens // shape.row + 1


def test_a_sequence_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="without tokens"):
        build_packed_layout(Ragged(np.array([1]), np.array([1, 0])), pad_id=0)
