"""Nearest neighbours against a plain double loop, alignment error rates against plain sets."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calque.errors import InputError
from calque.evaluation import metrics
from calque.evaluation.metrics import find_nearest, retrieval_accuracy
from calque.io.links import make_links
from calque.types import Links
from calque.word_alignment.scoring import LinkCounts, count_links


def cosine(left: list[float], right: list[float]) -> float:
    dot = math.fsum(a * b for a, b in zip(left, right, strict=True))
    return dot / (math.hypot(*left) * math.hypot(*right))


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 2**31))
def test_nearest_matches_a_double_loop(n_queries: int, n_candidates: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    queries = random.standard_normal((n_queries, 5)).astype(np.float32)
    candidates = random.standard_normal((n_candidates, 5)).astype(np.float32)
    for query, found in zip(queries.tolist(), find_nearest(queries, candidates), strict=True):
        scores = [cosine(query, candidate) for candidate in candidates.tolist()]
        assert scores[found] == pytest.approx(max(scores), abs=1e-6)


def test_of_equals_the_first_wins() -> None:
    same = np.ones((4, 3), dtype=np.float32)
    assert find_nearest(same, same).tolist() == [0, 0, 0, 0]
    assert retrieval_accuracy(same, same) == (0.25, 0.25)


def test_zero_vectors_find_something() -> None:
    zero, some = np.zeros((1, 2), dtype=np.float32), np.eye(2, dtype=np.float32)
    assert find_nearest(zero, some).tolist() == [0]


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    queries, candidates = random.standard_normal((2, 50, 8)).astype(np.float32)
    whole = find_nearest(queries, candidates)
    monkeypatch.setattr(metrics, "BLOCK_ROWS", 7)
    np.testing.assert_array_equal(find_nearest(queries, candidates), whole)


def test_accuracy_by_hand() -> None:
    # src at 0°, 90°, 200°; tgt at 10°, 20°, 190°: src 1 (90°) finds tgt 1, tgt 1 finds src 0.
    src, tgt = (
        np.array([[math.cos(a), math.sin(a)] for a in np.radians(angles)], dtype=np.float32)
        for angles in ([0, 90, 200], [10, 20, 190])
    )
    assert retrieval_accuracy(src, tgt) == (1.0, pytest.approx(2 / 3))


@pytest.mark.parametrize("shapes", [(2, 3), (0, 0)])
def test_what_is_not_paired_is_an_error(shapes: tuple[int, int]) -> None:
    with pytest.raises(InputError, match="paired"):
        retrieval_accuracy(*(np.ones((n, 2), dtype=np.float32) for n in shapes))


# Word links

Triple = tuple[int, int, int]


def links_of(rows: set[Triple], n_pairs: int) -> Links:
    return make_links(sorted(rows), n_pairs)


def test_error_rate_by_hand() -> None:
    # Two pairs in the manner of WPT-2003. Links A: 4 and 3; sure: 3 and 2; possible in all: 5, 3.
    sure = {(0, 0, 0), (0, 1, 1), (0, 2, 3), (1, 0, 1), (1, 1, 0)}
    possible = sure | {(0, 2, 2), (0, 3, 3), (1, 1, 1)}
    found = {(0, 0, 0), (0, 1, 1), (0, 2, 2), (0, 3, 0), (1, 0, 1), (1, 1, 1), (1, 2, 2)}
    counts = count_links(links_of(found, 2), links_of(sure, 2), links_of(possible, 2))
    # In S: 0-0, 1-1 of the first and 0-1 of the second. In P besides: 2-2 and 1-1.
    assert counts == LinkCounts(n_links=7, n_sure=5, n_sure_found=3, n_possible_found=5)
    assert counts.precision == pytest.approx(5 / 7)
    assert counts.recall == pytest.approx(3 / 5)
    assert counts.f1 == pytest.approx(2 * (5 / 7) * (3 / 5) / (5 / 7 + 3 / 5))
    assert counts.aer == pytest.approx(1 - (3 + 5) / (7 + 5))


triples = st.sets(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 5)))


@given(triples, triples, triples)
def test_counts_match_plain_sets(found: set[Triple], sure: set[Triple], more: set[Triple]) -> None:
    possible = sure | more
    want = LinkCounts(len(found), len(sure), len(found & sure), len(found & possible))
    # Whether the sure links are listed among the possible ones or not, they are possible.
    for others in (possible, more):
        groups = (links_of(rows, 4) for rows in (found, sure, others))
        assert count_links(*groups) == want
    assert 0 <= want.aer <= 1
    assert sum((count_part(found, sure, possible, k) for k in range(4)), LinkCounts()) == want
    if not more - sure:  # without possible links the error rate is 1 − F1
        assert want.aer == pytest.approx(1 - want.f1)


def count_part(found: set[Triple], sure: set[Triple], possible: set[Triple], k: int) -> LinkCounts:
    groups = ({(0, i, j) for pair, i, j in rows if pair == k} for rows in (found, sure, possible))
    return count_links(*(links_of(rows, 1) for rows in groups))


def test_a_link_named_twice_counts_once() -> None:
    twice = make_links([(0, 1, 1), (0, 1, 1)], 1)
    assert count_links(twice, twice, twice) == LinkCounts(1, 1, 1, 1)


def test_rates_of_nothing() -> None:
    nothing, something = make_links([], 1), make_links([(0, 0, 0)], 1)
    empty = count_links(nothing, nothing, nothing)
    assert (empty.precision, empty.recall, empty.f1, empty.aer) == (1, 1, 1, 0)
    silent = count_links(nothing, something, something)
    assert (silent.precision, silent.recall, silent.f1, silent.aer) == (1, 0, 0, 1)
    wrong = count_links(something, make_links([(0, 1, 1)], 1), make_links([(0, 1, 1)], 1))
    assert (wrong.precision, wrong.recall, wrong.f1, wrong.aer) == (0, 0, 0, 1)


def test_words_far_apart_do_not_overflow() -> None:
    far = make_links([(10**6, 10**8, 10**8), (10**6, 10**8, 10**8 + 1)], 10**6 + 1)
    assert count_links(far, far, far) == LinkCounts(2, 2, 2, 2)


def test_links_of_other_pairs_are_an_error() -> None:
    one, two = make_links([], 1), make_links([], 2)
    with pytest.raises(InputError, match="links of 2 pairs, gold of 1"):
        count_links(two, one, one)
