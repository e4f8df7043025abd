"""Words that look alike: cases with a known answer, and a slow plain version."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calque.tools.string_similarity import MAX_CHARACTERS, same_string


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("Paris", "PARIS", 1),
        ("Straße", "STRASSE", 1),
        ("nation", "Nationen", 6 / 8),
        ("information", "informační", 7 / 11),
        ("haus", "house", 0),
        ("the", "then", 0),  # too short a beginning
        ("1,000", "1.000", 1),
        ("2005", "२००५", 1),  # Devanagari
        ("10%", "10", 1),
        ("b2b", "2", 0),
        ("²", "2", 1),
        (".", ".", 1),
        (".", ",", 0),
        ("", "", 1),
        ("x" * 40 + "y", "x" * 40 + "z", MAX_CHARACTERS / 41),
    ],
)
def test_known_answers(one: str, other: str, alike: float) -> None:
    assert same_string([([one], [other])]).item() == pytest.approx(alike)
    assert same_string([([other], [one])]).item() == pytest.approx(alike)


@given(st.data())
def test_equals_a_plain_version(data: st.DataObject) -> None:
    word = st.text("aABbcé1", min_size=1, max_size=7)
    pairs = data.draw(st.lists(st.tuples(st.lists(word, max_size=4), st.lists(word, max_size=4))))
    found = same_string(pairs)
    assert found.dtype == np.float32
    n_src = max((len(pair[0]) for pair in pairs), default=0)
    n_tgt = max((len(pair[1]) for pair in pairs), default=0)
    assert found.shape == (len(pairs), n_src, n_tgt)
    expected = np.zeros(found.shape)
    for number, (src, tgt) in enumerate(pairs):
        for i, one in enumerate(src):
            for j, other in enumerate(tgt):
                expected[number, i, j] = compare(one.casefold(), other.casefold())
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def compare(one: str, other: str) -> float:
    if one == other:
        return 1
    digits = ["".join(c for c in word if c.isdigit()) for word in (one, other)]
    if digits[0] and digits[0] == digits[1] and not any(map(str.isalpha, one + other)):
        return 1
    common = 0
    while one[common : common + 1] == other[common : common + 1] != "":
        common += 1
    return common / max(len(one), len(other)) if common >= 4 else 0
