"""Filters of word links: worked by hand, against a search in pure Python, and their laws."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calque.algorithms.symmetrize import (
    keep_pairs,
    mark_identical,
    mark_linked_pairs,
    mark_one_to_one,
    select_links,
)
from calque.types import Links

Table = list[set[tuple[int, int]]]

tables = st.lists(st.sets(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=8), max_size=6)


def links_of(table: Table) -> Links:
    rows = sorted((pair, i, j) for pair, links in enumerate(table) for i, j in links)
    columns = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    scores = np.linspace(0, 1, len(rows), dtype=np.float32)
    return Links(columns[0], columns[1], columns[2], scores, len(table))


def table_of(links: Links) -> Table:
    return [set(found) for found in links.to_lists()]


def number(sentences: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Number words by their code: no more than a letter each."""
    words = [ord(word) for sentence in sentences for word in sentence.split()]
    lengths = [len(sentence.split()) for sentence in sentences]
    return np.array(words, dtype=np.int64), np.cumsum([0, *lengths])


def keep_one_to_one(links: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """Do it by definition: count the links of every word."""
    src, tgt = Counter(i for i, _ in links), Counter(j for _, j in links)
    return {(i, j) for i, j in links if src[i] == tgt[j] == 1}


def test_identical_words_by_hand() -> None:
    src, tgt = number(["a b c", "x", "d e"]), number(["b a", "x y", "E d e"])
    links = links_of([{(0, 0), (0, 1), (1, 0), (2, 1)}, {(0, 0), (0, 1)}, {(0, 1), (1, 0), (1, 2)}])
    # Pair 0: a-b a-a b-b c-a; pair 1: x-x x-y; pair 2: d-d e-E e-e
    expected = [False, True, True, False, True, False, True, False, True]
    assert mark_identical(links, src, tgt).tolist() == expected


def test_one_to_one_by_hand() -> None:
    links = links_of([{(0, 0), (1, 1), (1, 2)}, {(0, 2), (1, 2), (2, 0), (3, 3)}, set(), {(1, 1)}])
    assert table_of(select_links(links, mark_one_to_one(links))) == [
        {(0, 0)},
        {(2, 0), (3, 3)},
        set(),
        {(1, 1)},
    ]


def test_a_chain_of_links_goes_whole() -> None:
    links = links_of([{(0, 0), (1, 0), (1, 1), (2, 1), (3, 2)}])
    assert table_of(select_links(links, mark_one_to_one(links))) == [{(3, 2)}]


def test_pairs_by_hand() -> None:
    links = links_of([set(), {(0, 1), (2, 0)}, set(), {(4, 4)}, set()])
    linked = mark_linked_pairs(links)
    assert linked.tolist() == [False, True, False, True, False]
    left = keep_pairs(links, linked)
    assert table_of(left) == [{(0, 1), (2, 0)}, {(4, 4)}]
    assert left.scores.tolist() == links.scores.tolist()
    assert table_of(keep_pairs(links, ~linked)) == [set(), set(), set()]


def test_the_order_of_the_filters_matters() -> None:
    """Tom links with Tom and, wrongly, with schob: without the first, schob is one-to-one."""
    src, tgt = number(["T p"]), number(["T s"])
    links = links_of([{(0, 0), (0, 1)}])
    identical = mark_identical(links, src, tgt)
    first = select_links(links, ~identical)
    assert table_of(select_links(first, mark_one_to_one(first))) == [{(0, 1)}]
    single = mark_one_to_one(links)
    assert table_of(select_links(links, single & ~identical)) == [set()]


@given(tables)
def test_one_to_one_is_what_counting_finds(table: Table) -> None:
    links = links_of(table)
    found = select_links(links, mark_one_to_one(links))
    assert table_of(found) == list(map(keep_one_to_one, table))


@given(tables)
def test_one_to_one_uses_no_word_twice_and_is_done_at_once(table: Table) -> None:
    links = links_of(table)
    found = select_links(links, mark_one_to_one(links))
    for side in (found.src, found.tgt):
        words = list(zip(found.pairs.tolist(), side.tolist(), strict=True))
        assert len(set(words)) == len(words)
    assert mark_one_to_one(found).all()
    assert all(left <= before for left, before in zip(table_of(found), table, strict=True))


@given(tables, st.lists(st.text("ab", min_size=6, max_size=6), min_size=12, max_size=12))
def test_identical_is_what_comparing_finds(table: Table, sentences: list[str]) -> None:
    words = [" ".join(sentence) for sentence in sentences]
    src, tgt = words[: len(table)], words[6 : 6 + len(table)]
    links = links_of(table)
    identical = mark_identical(links, number(src), number(tgt))
    expected = [
        {(i, j) for i, j in found if a.split()[i] == b.split()[j]}
        for found, a, b in zip(table, src, tgt, strict=True)
    ]
    assert table_of(select_links(links, identical)) == expected


@given(tables)
def test_dropping_pairs_keeps_the_others_as_they_are(table: Table) -> None:
    links = links_of(table)
    left = keep_pairs(links, mark_linked_pairs(links))
    assert table_of(left) == [found for found in table if found]
    assert mark_linked_pairs(left).all()


def test_links_are_told_apart_in_long_sentences() -> None:
    """Word 1 of pair 0 must not be taken for a word of pair 1, however long sentences are."""
    links = links_of([{(1, 70_000)}, {(0, 1), (70_000, 0)}])
    assert mark_one_to_one(links).all()


@pytest.mark.parametrize("n_pairs", [0, 2])
def test_no_links_at_all(n_pairs: int) -> None:
    links = links_of([set()] * n_pairs)
    assert mark_one_to_one(links).tolist() == []
    assert mark_identical(links, number(["a"] * n_pairs), number(["a"] * n_pairs)).tolist() == []
    assert keep_pairs(links, mark_linked_pairs(links)).n_pairs == 0
