"""Long pairs in parts: nothing is lost, nothing twice, and short pairs are left alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calque.types import Links
from calque.word_alignment import counts as long_pairs
from calque.word_alignment.counts import NumberedPairs, Seams, Vocabulary, cut_long, number_pairs


def make_pairs(sizes: list[tuple[int, int]]) -> NumberedPairs:
    """Make pairs of so many words, no two alike."""
    words = [[[f"{k}.{i}" for i in range(n)] for n in size] for k, size in enumerate(sizes)]
    return number_pairs([(src, tgt) for src, tgt in words], Vocabulary(), Vocabulary())


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


def test_short_pairs_stay_whole_and_empty_ones_go() -> None:
    pairs = make_pairs([(2, 3), (0, 4), (1, 0), (0, 0), (1023, 1)])
    cut, seams = cut_long(pairs)
    assert cut.src.ids.tolist() == pairs.src.ids[:2].tolist() + pairs.src.ids[3:].tolist()
    assert seams.count_parts(0, 5).tolist() == [1, 0, 0, 0, 1]
    assert len(seams.cuts) == 0
    sewn = seams.sew(link_all(cut), 0, 5)
    assert sewn.n_pairs == 5
    assert np.unique(sewn.pairs).tolist() == [0, 4]


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=5), st.data())
def test_parts_fit_and_their_links_come_back_once(
    sizes: list[tuple[int, int]], data: st.DataObject
) -> None:
    pairs = make_pairs(sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_pairs, "LONGEST", data.draw(st.integers(5, 20)))
        cut, seams = cut_long(pairs)
        for text in (cut.src, cut.tgt):
            assert text.lengths.max(initial=0) <= long_pairs.LONGEST
            assert text.lengths.min(initial=1) >= 1
        is_long = np.array([min(s) > 0 and max(s) > long_pairs.LONGEST for s in sizes], dtype=bool)
    np.testing.assert_array_equal(seams.count_parts(0, len(sizes)) > 1, is_long)
    start = data.draw(st.integers(0, len(sizes)))
    stop = data.draw(st.integers(start, len(sizes)))
    first, last = seams.starts[[start, stop]].tolist()
    chosen = NumberedPairs(
        cut.src.cut(np.arange(first, last), *bounds(cut.src.lengths[first:last])),
        cut.tgt.cut(np.arange(first, last), *bounds(cut.tgt.lengths[first:last])),
    )
    linked = link_all(chosen)
    sewn = seams.sew(linked, start, stop)
    rows = list(zip(sewn.pairs.tolist(), sewn.src.tolist(), sewn.tgt.tolist(), strict=True))
    assert rows == sorted(set(rows))
    # The words linked are those that met in a part, under the names they have in the pair.
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


def test_each_part_answers_for_its_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 and 10 words in segments of at most 5: four, so three parts of two segments each."""
    monkeypatch.setattr(long_pairs, "LONGEST", 12)
    cut, seams = cut_long(make_pairs([(20, 10)]))
    assert cut.src.lengths.tolist() == [10, 10, 10]
    assert cut.tgt.lengths.tolist() == [5, 6, 5]
    assert seams.cuts.tolist() == [
        [0, 0, 0, 0, 7, 0, 5],
        [1, 5, 2, 7, 12, 2, 8],
        [2, 10, 5, 12, 20, 5, 10],
    ]


def test_saved_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_pairs, "LONGEST", 12)
    _, seams = cut_long(make_pairs([(20, 10), (0, 1), (3, 3)]))
    seams.write(tmp_path)
    loaded = Seams.read(tmp_path)
    np.testing.assert_array_equal(loaded.starts, seams.starts)
    np.testing.assert_array_equal(loaded.cuts, seams.cuts)
