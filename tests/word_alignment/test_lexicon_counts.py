"""The lexicon: counts against a plain count, probabilities worked by hand, whatever the words."""

from __future__ import annotations

from collections import Counter
from math import log
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calque.word_alignment import counts as lexicon_counts
from calque.word_alignment.counts import Lexicon, PackedLinks, Vocabulary, number_pairs

LinkLists = list[list[tuple[int, int]]]

PAIRS = [(["Das", "Haus"], ["the", "house"]), (["das", "Buch"], ["the", "book"])]
LINKS: LinkLists = [[(0, 0), (1, 1)], [(0, 0), (1, 1)]]


def pack(links: LinkLists) -> PackedLinks:
    ends = np.array([link for pair in links for link in pair])
    return PackedLinks.of([(ends, np.array([len(pair) for pair in links]))])


def make_lexicon(*sets: LinkLists) -> Lexicon:
    src, tgt = Vocabulary(), Vocabulary()
    numbered = number_pairs(PAIRS, src, tgt)
    return Lexicon.count(src, tgt, numbered, [pack(links) for links in sets])


def test_probabilities_by_hand() -> None:
    """c(das, the) = 2, c(haus, house) = 1; three words and an unknown one on either side."""
    forward, backward = make_lexicon(LINKS).log_probabilities(
        [(["DAS", "neu"], ["the", "house", "new"]), (["Haus"], ["house"])], alpha=0.1
    )
    assert forward.shape == backward.shape == (2, 2, 3)
    assert forward.dtype == backward.dtype == np.float32
    assert forward[0, 0].tolist() == pytest.approx(
        [log(2.1 / 2.4), log(0.1 / 2.4), log(0.1 / 2.4)], abs=1e-6
    )
    assert forward[0, 1].tolist() == pytest.approx([log(1 / 4)] * 3, abs=1e-6)  # says nothing
    assert backward[0, 0].tolist() == pytest.approx(
        [log(2.1 / 2.4), log(0.1 / 1.4), log(1 / 4)], abs=1e-6
    )
    assert forward[1, 0, 0] == pytest.approx(log(1.1 / 1.4), abs=1e-6)


def test_a_link_of_one_direction_counts_half() -> None:
    lexicon = make_lexicon(LINKS, [[(0, 0)], [(0, 0), (0, 1)]])
    das, haus, buch = 0, 1, 2
    the, house, book = 0, 1, 2
    counts = lexicon.look_up(np.arange(3, dtype=np.int32)[:, None], np.arange(3, dtype=np.int32))
    expected = np.zeros((3, 3))
    expected[das, the], expected[haus, house], expected[buch, book] = 2, 0.5, 0.5
    expected[das, book] = 0.5
    np.testing.assert_array_equal(counts, expected)
    assert lexicon.src_totals.tolist() == [2.5, 0.5, 0.5]
    assert lexicon.tgt_totals.tolist() == [2, 0.5, 1]


@given(st.data())
def test_counts_are_those_of_a_plain_count(data: st.DataObject) -> None:
    side = st.lists(st.sampled_from("abcd"), max_size=4)
    pairs = data.draw(st.lists(st.tuples(side, side), min_size=1, max_size=6))
    links = [
        sorted(data.draw(st.sets(st.sampled_from(cells)))) if cells else []
        for cells in ([(i, j) for i in range(len(a)) for j in range(len(b))] for a, b in pairs)
    ]
    src, tgt = Vocabulary(), Vocabulary()
    numbered = number_pairs(pairs, src, tgt)
    whole, chunk = lexicon_counts.CHUNK_PAIRS, data.draw(st.integers(1, 7))
    try:
        lexicon_counts.CHUNK_PAIRS = chunk  # however few pairs are counted at a time
        lexicon = Lexicon.count(src, tgt, numbered, [pack(links)])
    finally:
        lexicon_counts.CHUNK_PAIRS = whole
    found = {
        (src.words[key // len(tgt)], tgt.words[key % len(tgt)]): count
        for key, count in zip(lexicon.keys.tolist(), lexicon.counts.tolist(), strict=True)
    }
    words = ((a[i], b[j]) for (a, b), one in zip(pairs, links, strict=True) for i, j in one)
    assert found == Counter(words)
    forward, backward = lexicon.log_probabilities(pairs)
    for number, (a, b) in enumerate(pairs):
        assert np.exp(forward[number, : len(a), : len(b)]).max(initial=0) <= 1 + 1e-6
        for i, s in enumerate(a):
            mass = sum(
                np.exp(lexicon.log_probabilities([([s], [t])])[0]).item()
                for t in [*tgt.words, "unknown"]
            )
            assert mass == pytest.approx(1, abs=1e-5)
            for j, t in enumerate(b):
                assert backward[number, i, j] == lexicon.log_probabilities([([s], [t])])[1]


def test_empty_batches_and_sides() -> None:
    lexicon = make_lexicon(LINKS)
    assert lexicon.log_probabilities([])[0].shape == (0, 0, 0)
    assert lexicon.log_probabilities([([], ["the"])])[0].shape == (1, 0, 1)
    nothing = make_lexicon([[], []])
    assert len(nothing) == 0
    forward, _ = nothing.log_probabilities(PAIRS)
    np.testing.assert_allclose(forward, log(1 / 4), rtol=1e-6)


def test_case_matters_on_demand() -> None:
    words = Vocabulary(["Sie", "sie"], lowercase=False)
    lexicon = Lexicon(words, Vocabulary(["you"]), np.array([0]), np.array([3], dtype=np.float32))
    forward, _ = lexicon.log_probabilities([(["Sie", "sie", "SIE"], ["you"])])
    assert forward[0, 0, 0] > -0.01
    assert forward[0, 1:, 0].tolist() == pytest.approx([log(1 / 2)] * 2)


def test_saved_and_loaded(tmp_path: Path) -> None:
    lexicon = make_lexicon(LINKS)
    lexicon.write(tmp_path)
    loaded = Lexicon.read(tmp_path, lowercase=True)
    np.testing.assert_array_equal(loaded.log_probabilities(PAIRS), lexicon.log_probabilities(PAIRS))
    assert loaded.src.words == ["das", "haus", "buch"]
