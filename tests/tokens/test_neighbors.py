"""Sentences with the one before: what is paired, and that it travels to other processes."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from calque.tokens.ragged import Ragged
from calque.tokens.store import PreviousSentences, TokenStore, write_store


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    with write_store(tmp_path / "side0", vocab_size=100) as append:
        append(Ragged.of([[5], [6, 7], [8, 9, 10], [11]]))
    return TokenStore.open(tmp_path / "side0")


@pytest.mark.parametrize("dtype", [np.int64, np.uint32])
def test_it_gives_the_sentence_before(store: TokenStore, dtype: type) -> None:
    before = PreviousSentences(store)
    assert len(before) == 4
    assert before.lengths(np.arange(4).astype(dtype)).tolist() == [0, 1, 2, 3]
    found = before.gather(np.array([3, 1], dtype=dtype))
    assert (found.ids.tolist(), found.lengths.tolist()) == ([8, 9, 10, 5], [3, 1])
    with pytest.raises(AssertionError, match="nothing comes before"):
        before.gather(np.array([0]))


def test_it_travels_as_a_path(store: TokenStore) -> None:
    again = pickle.loads(pickle.dumps(PreviousSentences(store)))
    assert again.gather(np.array([2])).ids.tolist() == [6, 7]
    assert len(pickle.dumps(PreviousSentences(store))) < 400
