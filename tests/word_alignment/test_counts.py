"""The lexicon of links: counts against a plain count and by hand."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from calque.word_alignment import counts
from calque.word_alignment.counts import LinkLexicon, pad_rows
from calque.word_alignment.numbered_text import WordNumbering, number_pairs
from calque.word_alignment.packed_links import PackedLinks

LinkLists = list[list[tuple[int, int]]]

PAIRS = [(["Das", "Haus"], ["the", "house"]), (["das", "Buch"], ["the", "book"])]
LINKS: LinkLists = [[(0, 0), (1, 1)], [(0, 0), (1, 1)]]


def pack(links: LinkLists) -> PackedLinks:
    ends = np.array([link for pair in links for link in pair])
    return PackedLinks.of([(ends, np.array([len(pair) for pair in links]))])


def count(*directions: LinkLists) -> LinkLexicon:
    src, tgt = WordNumbering(), WordNumbering()
    numbered = number_pairs(PAIRS, src, tgt)
    return LinkLexicon.count(src, tgt, numbered, [pack(links) for links in directions])


def test_a_link_of_one_direction_counts_half() -> None:
    lexicon = count(LINKS, [[(0, 0)], [(0, 0), (0, 1)]])
    das, haus, buch = 0, 1, 2
    the, house, book = 0, 1, 2
    numbers = np.arange(3, dtype=np.int32)
    expected = np.zeros((3, 3))
    expected[das, the], expected[haus, house], expected[buch, book] = 2, 0.5, 0.5
    expected[das, book] = 0.5
    np.testing.assert_array_equal(lexicon.look_up(numbers[:, None], numbers), expected)
    assert lexicon.src_totals.tolist() == [2.5, 0.5, 0.5]
    assert lexicon.tgt_totals.tolist() == [2, 0.5, 1]


def test_unknown_words_were_never_linked() -> None:
    numbers = np.array([-1, 0], dtype=np.int32)
    assert count(LINKS).look_up(numbers[:, None], numbers).tolist() == [[0, 0], [0, 2]]
    empty = count([[], []])
    assert len(empty) == 0
    assert empty.look_up(numbers, numbers).tolist() == [0, 0]


@given(st.data())
def test_counts_match_a_plain_count(data: st.DataObject) -> None:
    side = st.lists(st.sampled_from("abcd"), max_size=4)
    pairs = data.draw(st.lists(st.tuples(side, side), min_size=1, max_size=6))
    links = [
        sorted(data.draw(st.sets(st.sampled_from(cells)))) if cells else []
        for cells in ([(i, j) for i in range(len(a)) for j in range(len(b))] for a, b in pairs)
    ]
    src, tgt = WordNumbering(), WordNumbering()
    numbered = number_pairs(pairs, src, tgt)
    whole, chunk = counts.CHUNK_PAIRS, data.draw(st.integers(1, 7))
    try:
        counts.CHUNK_PAIRS = chunk
        lexicon = LinkLexicon.count(src, tgt, numbered, [pack(links)])
    finally:
        counts.CHUNK_PAIRS = whole
    found = {
        (src.words[key // len(tgt)], tgt.words[key % len(tgt)]): count
        for key, count in zip(lexicon.keys.tolist(), lexicon.counts.tolist(), strict=True)
    }
    words = [(a[i], b[j]) for (a, b), one in zip(pairs, links, strict=True) for i, j in one]
    assert found == Counter(words)
    assert lexicon.src_totals.sum() == lexicon.tgt_totals.sum() == len(words)


def test_rows_are_padded() -> None:
    text = WordNumbering(["a", "b"]).find([["b"], [], ["a", "new"]])
    assert pad_rows(text).tolist() == [[1, -1], [-1, -1], [0, -1]]


def test_saved_and_loaded(tmp_path: Path) -> None:
    lexicon = count(LINKS)
    lexicon.write(tmp_path)
    loaded = LinkLexicon.read(tmp_path, lowercase=True, stem=0)
    np.testing.assert_array_equal(loaded.keys, lexicon.keys)
    np.testing.assert_array_equal(loaded.counts, lexicon.counts)
    assert loaded.src.words == ["das", "haus", "buch"]
