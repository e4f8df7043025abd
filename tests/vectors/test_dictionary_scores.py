"""Translations of dictionaries: precision counted by hand, ranks against plain sets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calque.errors import InputError
from calque.vectors.lexicon import (
    LexiconSettings,
    WordTranslator,
    find_ranks,
    precision_at_k,
    score_dictionary,
)
from calque.vectors.static import VectorSpace, WordVectors

# On a circle, in degrees: each English word's nearest German ones are known by their difference.
ENGLISH = {"dog": 0, "cat": 40, "cow": 80, "pig": 120}
GERMAN = {"Hund": 1, "Katze": 47, "Kater": 44, "Kuh": 60, "Rind": 88, "Huhn": 119, "Sau": 137}


def on_circle(degrees: dict[str, int]) -> WordVectors:
    angles = np.radians(list(degrees.values()))
    matrix = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    return WordVectors(list(degrees), 3 * matrix)


def translators() -> list[WordTranslator]:
    spaces = (VectorSpace.from_vectors(on_circle(w), name) for w, name in ((ENGLISH, "en"), (GERMAN, "de")))
    return [WordTranslator.build(*spaces, LexiconSettings("nn"))]


def test_a_word_counts_once_and_any_translation_is_right() -> None:
    entries = [
        ("dog", "Hund"),  # found first
        ("cat", "Katze"),  # found second,
        ("cat", "Kater"),  # but this one first
        ("cow", "Kuh"),  # found second, after Rind
        ("pig", "Sau"),  # found second, after Huhn
        ("dog", "Hund"),  # a repetition changes nothing
    ]
    result = score_dictionary(translators(), entries)
    assert result.ranks["nn"].tolist() == [0, 0, 1, 1]
    assert (result.n_words, result.n_known, result.coverage) == (4, 4, 1.0)
    assert result.precision("nn", 1) == 0.5
    assert result.precision("nn", 5) == 1.0


def test_unknown_words_are_wrong_or_left_out() -> None:
    entries = [
        ("dog", "Hund"),
        ("cow", "Kuh"),
        ("cow", "Muhkuh"),  # unknown, but Kuh is not
        ("pig", "Ferkel"),  # unknown: so pig cannot be right
        ("gnu", "Hund"),  # has no vector
        ("emu", "Emu"),
    ]
    result = score_dictionary(translators(), entries)
    assert (result.n_words, result.n_unknown_src, result.n_unknown_tgt) == (5, 2, 1)
    assert result.coverage == 2 / 5
    assert result.precision("nn", 1) == 1 / 5
    assert result.precision("nn", 1, known=True) == 1 / 2
    assert result.precision("nn", 10) == 2 / 5
    assert result.precision("nn", 10, known=True) == 1.0


def test_nothing_known() -> None:
    result = score_dictionary(translators(), [("gnu", "Gnu"), ("pig", "Ferkel")])
    assert (result.n_known, result.n_unknown_src, result.n_unknown_tgt) == (0, 1, 1)
    assert result.precision("nn", 1) == result.precision("nn", 1, known=True) == 0.0
    with pytest.raises(InputError, match="no entries"):
        score_dictionary(translators(), [])


@given(st.integers(1, 8), st.integers(1, 5), st.data())
def test_ranks_agree_with_plain_sets(n_queries: int, width: int, data: st.DataObject) -> None:
    row = st.lists(st.integers(0, 9), min_size=width, max_size=width, unique=True)
    found = [data.draw(row) for _ in range(n_queries)]
    gold = [data.draw(st.lists(st.integers(0, 9), max_size=4)) for _ in range(n_queries)]
    entries = [(query, answer) for query, answers in enumerate(gold) for answer in answers]
    queries, answers = np.array(entries, dtype=np.int64).reshape(-1, 2).T
    ranks = find_ranks(np.array(found), queries, answers)
    for k in range(1, width + 1):
        hits = [bool(set(mine[:k]) & set(right)) for mine, right in zip(found, gold, strict=True)]
        assert precision_at_k(ranks, k) == pytest.approx(sum(hits) / n_queries)
        assert precision_at_k(ranks, k, n_queries + 2) == pytest.approx(sum(hits) / (n_queries + 2))


def test_precision_of_nothing_is_zero() -> None:
    assert precision_at_k(np.zeros(0, dtype=np.int64), 1) == 0.0
