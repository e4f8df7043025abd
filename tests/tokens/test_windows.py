"""Windows over long texts: every token once, no window too long, overlap as specified."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from calque.tokens.tokenizer import encode_sentences
from calque.tokens.windows import (
    WordWindow,
    split_encoded_words,
    split_into_word_windows,
    split_long_sentences,
)
from calque.tokens.words import EncodedWords

SENTENCES = st.lists(st.integers(0, 5), min_size=1, max_size=40)


@given(SENTENCES, st.integers(5, 20), st.floats(0, 0.9))
def test_every_word_is_used_from_one_window_that_contains_it(
    pieces: list[int], max_subwords: int, overlap: float
) -> None:
    n_pieces = np.array(pieces)
    windows = split_into_word_windows(n_pieces, max_subwords, overlap)
    used = [word for window in windows for word in range(window.first, window.last)]
    assert used == list(range(len(pieces)))
    for window in windows:
        assert window.start <= window.first <= window.last <= window.stop
        assert n_pieces[window.start : window.stop].sum() <= max_subwords
    for one, other in itertools.pairwise(windows):
        assert other.start <= one.stop < other.stop
        assert n_pieces[other.start : one.stop].sum() <= overlap * max_subwords


@given(SENTENCES, st.floats(0, 0.9))
def test_a_sentence_that_fits_is_one_window(pieces: list[int], overlap: float) -> None:
    max_subwords = max(5, sum(pieces))
    assert split_into_word_windows(np.array(pieces), max_subwords, overlap) == [
        (0, len(pieces), 0, len(pieces))
    ]


@given(st.lists(SENTENCES | st.just([]), max_size=5), st.integers(5, 20), st.floats(0, 0.9))
def test_many_sentences_are_split_one_by_one(
    sentences: list[list[int]], max_subwords: int, overlap: float
) -> None:
    n_pieces = np.array([n for sentence in sentences for n in sentence], dtype=np.int64)
    n_words = np.array([len(sentence) for sentence in sentences], dtype=np.int64)
    text = EncodedWords(np.arange(n_pieces.sum()), n_pieces, n_words)
    expected, first, n_long = [], 0, 0
    for sentence in sentences:
        windows = [WordWindow(0, len(sentence), 0, len(sentence))]
        if sum(sentence) > max_subwords:
            windows = split_into_word_windows(np.array(sentence), max_subwords, overlap)
            n_long += 1
        expected += [[first + place for place in window] for window in windows]
        first += len(sentence)
    found, n_split = split_encoded_words(text, max_subwords, overlap)
    assert (found.tolist(), n_split) == (expected, n_long)


def test_windows_by_hand() -> None:
    # Windows of 4 words that share 2: the first shared word is used from the first window.
    found = split_into_word_windows(np.ones(8, dtype=np.int64), max_subwords=4, overlap=0.5)
    assert found == [(0, 4, 0, 3), (2, 6, 3, 5), (4, 8, 5, 8)]
    assert split_into_word_windows(np.ones(6, dtype=np.int64), 4, 0.0) == [
        (0, 4, 0, 4),
        (4, 6, 4, 6),
    ]


def test_a_word_longer_than_the_window_raises() -> None:
    with pytest.raises(ValueError, match="a word of 7 subwords"):
        split_into_word_windows(np.array([1, 7]), max_subwords=6, overlap=0.5)


@pytest.mark.parametrize("max_tokens", [5, 12, 512])
def test_long_sentences_become_even_windows(
    tiny_tokenizer: PreTrainedTokenizerFast, max_tokens: int
) -> None:
    sentences = ["The university has a cafeteria and a garden.", " ", "", "A " * 40, "The"]
    found = split_long_sentences(tiny_tokenizer, sentences, max_tokens)
    whole = encode_sentences(tiny_tokenizer, sentences)
    for number, ids in enumerate(whole):
        parts = [found.ids[k] for k in np.flatnonzero(found.line_numbers == number)]
        assert [token for part in parts for token in part] == ids.tolist()
        assert len(parts) == -(-len(ids) // (max_tokens - 2))
        assert max(map(len, parts), default=0) - min(map(len, parts), default=0) <= 1
    n_windows = [-(-len(ids) // (max_tokens - 2)) for ids in whole]
    assert (found.n_lines, found.n_empty) == (5, 2)
    assert found.n_long == sum(n > 1 for n in n_windows)
    assert found.n_long_windows == sum(n for n in n_windows if n > 1)
    assert found.lengths.tolist() == [len(ids) for ids in found.ids]
