"""Words as numbers: first come, first numbered; unknown words are told apart from known ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calque.word_alignment import counts as word_ids
from calque.word_alignment.counts import Vocabulary, find_pairs, number_pairs

sentences = st.lists(st.lists(st.text("aAbßİΣ", max_size=2), max_size=4), max_size=6)


@given(sentences, st.booleans(), st.integers(1, 7))
def test_numbers_name_the_words(text: list[list[str]], lowercase: bool, chunk: int) -> None:
    words = Vocabulary(lowercase=lowercase)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(word_ids, "CHUNK_PAIRS", chunk)
        numbered = number_pairs(zip(text, text, strict=True), words, words).src
        found = list(numbered.sentences())
        assert list(numbered.sentences(1, 3)) == found[1:3]
    folded = [[word.lower() if lowercase else word for word in sentence] for sentence in text]
    assert [[words.words[k] for k in sentence] for sentence in found] == folded
    assert words.words == list(dict.fromkeys(word for sentence in folded for word in sentence))
    again = Vocabulary(words.words, lowercase=lowercase)
    np.testing.assert_array_equal(again.find(text).ids, numbered.ids)


def test_unknown_words() -> None:
    src, tgt = Vocabulary(["das", "haus"]), Vocabulary(["The"], lowercase=False)
    pairs = find_pairs([(["DAS", "neue", "Haus"], ["The", "the"]), ([], [])], src, tgt)
    assert pairs.src.ids.tolist() == [0, -1, 1]
    assert pairs.tgt.ids.tolist() == [0, -1]
    assert pairs.src.lengths.tolist() == [3, 0]
    assert (len(src), len(tgt)) == (2, 1)


def test_nothing() -> None:
    pairs = number_pairs([], Vocabulary(), Vocabulary())
    assert len(pairs) == 0 and pairs.src.ids.dtype == np.int32
    assert list(pairs.src.sentences()) == []
