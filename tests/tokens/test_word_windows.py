"""Windows over long sentences: every word once, nothing too long, as much context as promised."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calque.tokens.windows import split_words

SENTENCES = st.lists(st.integers(0, 5), min_size=1, max_size=40)


@given(SENTENCES, st.integers(5, 20), st.floats(0, 0.9))
def test_every_word_is_taken_from_one_window_that_has_it(
    pieces: list[int], room: int, overlap: float
) -> None:
    n_pieces = np.array(pieces)
    windows = split_words(n_pieces, room, overlap)
    taken = [word for window in windows for word in range(window.first, window.last)]
    assert taken == list(range(len(pieces)))
    for window in windows:
        assert window.start <= window.first <= window.last <= window.stop
        assert n_pieces[window.start : window.stop].sum() <= room
    for one, other in itertools.pairwise(windows):
        assert other.start <= one.stop < other.stop
        assert n_pieces[other.start : one.stop].sum() <= overlap * room


@given(SENTENCES, st.floats(0, 0.9))
def test_a_sentence_that_fits_is_one_window(pieces: list[int], overlap: float) -> None:
    room = max(5, sum(pieces))
    assert split_words(np.array(pieces), room, overlap) == [(0, len(pieces), 0, len(pieces))]


def test_windows_by_hand() -> None:
    # Windows of 4 words, 2 in common: the first word in common is the last of the first window's.
    found = split_words(np.ones(8, dtype=np.int64), max_subwords=4, overlap=0.5)
    assert found == [(0, 4, 0, 3), (2, 6, 3, 5), (4, 8, 5, 8)]
    assert split_words(np.ones(6, dtype=np.int64), 4, 0.0) == [(0, 4, 0, 4), (4, 6, 4, 6)]


def test_a_word_longer_than_the_window_is_refused() -> None:
    with pytest.raises(ValueError, match="a word of 7 subwords"):
        split_words(np.array([1, 7]), max_subwords=6, overlap=0.5)
