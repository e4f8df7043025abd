"""Words as numbers, and long pairs in parts: nothing is lost, nothing is found twice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calque.types import Links
from calque.word_alignment import numbered_text
from calque.word_alignment.numbered_text import (
    NumberedPairs,
    SplitPairs,
    WordNumbering,
    find_pairs,
    number_pairs,
    split_long_pairs,
)

sentences = st.lists(st.lists(st.text("aAbßİΣ", max_size=3), max_size=4), max_size=6)


@given(sentences, st.booleans(), st.integers(0, 2), st.integers(1, 7))
def test_numbers_are_in_order_of_first_occurrence(
    text: list[list[str]], lowercase: bool, stem: int, chunk: int
) -> None:
    words = WordNumbering(lowercase=lowercase, stem=stem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numbered_text, "CHUNK_PAIRS", chunk)
        numbered = number_pairs(zip(text, text, strict=True), words, words).src
        found = list(numbered.sentences())
        assert list(numbered.sentences(1, 3)) == found[1:3]
    folded = [[word.lower() if lowercase else word for word in sentence] for sentence in text]
    folded = [[word[: stem or None] for word in sentence] for sentence in folded]
    assert [[words.words[k] for k in sentence] for sentence in found] == folded
    assert words.words == list(dict.fromkeys(word for sentence in folded for word in sentence))
    again = WordNumbering(words.words, lowercase=lowercase, stem=stem)
    np.testing.assert_array_equal(again.find(text).ids, numbered.ids)


def test_unknown_words() -> None:
    src, tgt = WordNumbering(["das", "haus"]), WordNumbering(["The"], lowercase=False)
    pairs = find_pairs([(["DAS", "neue", "Haus"], ["The", "the"]), ([], [])], src, tgt)
    assert pairs.src.ids.tolist() == [0, -1, 1]
    assert pairs.tgt.ids.tolist() == [0, -1]
    assert pairs.src.lengths.tolist() == [3, 0]
    assert (len(src), len(tgt)) == (2, 1)


def test_empty_text() -> None:
    pairs = number_pairs([], WordNumbering(), WordNumbering())
    assert len(pairs) == 0 and pairs.src.ids.dtype == np.int32
    assert list(pairs.src.sentences()) == []


def make_pairs(sizes: list[tuple[int, int]]) -> NumberedPairs:
    """Return pairs with these numbers of words, all different."""
    words = [[[f"{k}.{i}" for i in range(n)] for n in size] for k, size in enumerate(sizes)]
    return number_pairs([(src, tgt) for src, tgt in words], WordNumbering(), WordNumbering())


def link_all(pairs: NumberedPairs) -> Links:
    """Link every word with every word."""
    cells = [
        (k, i, j)
        for k, (n, m) in enumerate(zip(pairs.src.lengths, pairs.tgt.lengths, strict=True))
        for i in range(n)
        for j in range(m)
    ]
    table = np.array(cells, dtype=np.int64).reshape(-1, 3)
    return Links(*table.T, np.ones(len(table), dtype=np.float32), len(pairs))


def test_short_pairs_stay_whole_and_empty_ones_are_left_out() -> None:
    pairs = make_pairs([(2, 3), (0, 4), (1, 0), (0, 0), (1023, 1)])
    parts, split = split_long_pairs(pairs)
    assert parts.src.ids.tolist() == pairs.src.ids[:2].tolist() + pairs.src.ids[3:].tolist()
    assert split.count_parts(0, 5).tolist() == [1, 0, 0, 0, 1]
    assert len(split.cuts) == 0
    merged = split.merge(link_all(parts), 0, 5)
    assert merged.n_pairs == 5
    assert np.unique(merged.pairs).tolist() == [0, 4]


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=5), st.data())
def test_parts_fit_and_each_link_is_merged_once(
    sizes: list[tuple[int, int]], data: st.DataObject
) -> None:
    pairs = make_pairs(sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numbered_text, "MAX_WORDS", data.draw(st.integers(5, 20)))
        parts, split = split_long_pairs(pairs)
        for text in (parts.src, parts.tgt):
            assert text.lengths.max(initial=0) <= numbered_text.MAX_WORDS
            assert text.lengths.min(initial=1) >= 1
        is_long = np.array(
            [min(s) > 0 and max(s) > numbered_text.MAX_WORDS for s in sizes], dtype=bool
        )
    np.testing.assert_array_equal(split.count_parts(0, len(sizes)) > 1, is_long)
    start = data.draw(st.integers(0, len(sizes)))
    stop = data.draw(st.integers(start, len(sizes)))
    first, last = split.starts[[start, stop]].tolist()
    chosen = NumberedPairs(
        parts.src.select(np.arange(first, last), *bounds(parts.src.lengths[first:last])),
        parts.tgt.select(np.arange(first, last), *bounds(parts.tgt.lengths[first:last])),
    )
    linked = link_all(chosen)
    merged = split.merge(linked, start, stop)
    rows = list(zip(merged.pairs.tolist(), merged.src.tolist(), merged.tgt.tolist(), strict=True))
    assert rows == sorted(set(rows))
    # Linked words are those that were in the same part, numbered as in the pair.
    for number, (n_src, n_tgt) in enumerate(sizes[start:stop]):
        mine = [(i, j) for k, i, j in rows if k == number]
        if is_long[start + number]:
            longer = 0 if n_src >= n_tgt else 1
            assert {link[longer] for link in mine} == set(range(max(n_src, n_tgt)))
            ratio = n_tgt / n_src
            assert all(abs(j - i * ratio) <= 20 * max(ratio, 1) + 2 for i, j in mine)
        else:
            assert len(mine) == n_src * n_tgt


def bounds(lengths: np.ndarray[tuple[int], np.dtype[np.int64]]) -> tuple[object, object]:
    return np.zeros_like(lengths), lengths


def test_links_of_a_part_count_in_its_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 and 10 words in segments of at most 5: four, so three parts of two segments each."""
    monkeypatch.setattr(numbered_text, "MAX_WORDS", 12)
    parts, split = split_long_pairs(make_pairs([(20, 10)]))
    assert parts.src.lengths.tolist() == [10, 10, 10]
    assert parts.tgt.lengths.tolist() == [5, 6, 5]
    assert split.cuts.tolist() == [
        [0, 0, 0, 0, 7, 0, 5],
        [1, 5, 2, 7, 12, 2, 8],
        [2, 10, 5, 12, 20, 5, 10],
    ]


def test_saved_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbered_text, "MAX_WORDS", 12)
    _, split = split_long_pairs(make_pairs([(20, 10), (0, 1), (3, 3)]))
    split.write(tmp_path)
    loaded = SplitPairs.read(tmp_path)
    np.testing.assert_array_equal(loaded.starts, split.starts)
    np.testing.assert_array_equal(loaded.cuts, split.cuts)
