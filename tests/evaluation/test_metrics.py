"""Nearest neighbors against a plain double loop, correlations against SciPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import assume, given
from hypothesis import strategies as st

from calque.errors import InputError
from calque.evaluation import metrics
from calque.evaluation.metrics import (
    find_nearest,
    harmonic_mean,
    pearson_correlation,
    retrieval_hits,
    spearman_correlation,
)


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


@given(st.integers(2, 12), st.integers(2, 12), st.integers(1, 4), st.integers(0, 2**31))
def test_margin_matches_a_double_loop(
    n_queries: int, n_candidates: int, neighbors: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    # All cosines are positive, so that all means are.
    queries = np.abs(random.standard_normal((n_queries, 5))).astype(np.float32)
    candidates = np.abs(random.standard_normal((n_candidates, 5))).astype(np.float32)
    table = [[cosine(q, c) for c in candidates.tolist()] for q in queries.tolist()]

    def mean_of_best(cosines: list[float]) -> float:
        k = min(neighbors, n_queries, n_candidates)
        return sum(sorted(cosines)[-k:]) / k

    row_means = [mean_of_best(row) for row in table]
    column_means = [mean_of_best(list(column)) for column in zip(*table, strict=True)]
    for row, mean, found in zip(
        table, row_means, find_nearest(queries, candidates, neighbors), strict=True
    ):
        ratios = [c / ((mean + other) / 2) for c, other in zip(row, column_means, strict=True)]
        assert ratios[found] == pytest.approx(max(ratios), abs=1e-5)


def test_ties_go_to_the_first_candidate() -> None:
    same = np.ones((4, 3), dtype=np.float32)
    assert find_nearest(same, same).tolist() == [0, 0, 0, 0]
    assert [hits.mean() for hits in retrieval_hits(same, same)] == [0.25, 0.25]


def test_zero_vectors_are_valid_queries() -> None:
    zero, some = np.zeros((1, 2), dtype=np.float32), np.eye(2, dtype=np.float32)
    assert find_nearest(zero, some).tolist() == [0]


def test_blocks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    queries, candidates = random.standard_normal((2, 50, 8)).astype(np.float32)
    whole = [find_nearest(queries, candidates, k) for k in (None, 4)]
    assert (whole[0] != whole[1]).any()
    monkeypatch.setattr(metrics, "BLOCK_ROWS", 7)
    for k, expected in zip((None, 4), whole, strict=True):
        np.testing.assert_array_equal(find_nearest(queries, candidates, k), expected)


def test_accuracy_by_hand() -> None:
    # src at 0°, 90°, 200°; tgt at 10°, 20°, 190°: src 1 (90°) finds tgt 1, tgt 1 finds src 0.
    src, tgt = (
        np.array([[math.cos(a), math.sin(a)] for a in np.radians(angles)], dtype=np.float32)
        for angles in ([0, 90, 200], [10, 20, 190])
    )
    assert [hits.tolist() for hits in retrieval_hits(src, tgt)] == [[1, 1, 1], [1, 0, 1]]


@pytest.mark.parametrize("shapes", [(2, 3), (0, 0)])
def test_unpaired_vectors_raise(shapes: tuple[int, int]) -> None:
    with pytest.raises(InputError, match="paired"):
        retrieval_hits(*(np.ones((n, 2), dtype=np.float32) for n in shapes))


# Few different values, so that there are many ties.
TIED = st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=3, max_size=30)
FLOATS = st.lists(
    st.tuples(st.floats(-1e6, 1e6), st.floats(-1, 1)), min_size=3, max_size=30, unique=True
)


@given(TIED | FLOATS)
def test_correlations_agree_with_scipy(pairs: list[tuple[float, float]]) -> None:
    x, y = (np.array(side, dtype=np.float64) for side in zip(*pairs, strict=True))
    assume(np.ptp(x) > 1e-3 and np.ptp(y) > 1e-3)  # SciPy warns where rounding decides
    expected = scipy.stats.pearsonr(x, y).statistic
    assert pearson_correlation(x, y) == pytest.approx(expected, abs=1e-9)
    expected = scipy.stats.spearmanr(x, y).statistic
    assert spearman_correlation(x, y) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("correlate", [pearson_correlation, spearman_correlation])
def test_constants_have_correlation_zero(correlate: object) -> None:
    assert callable(correlate)
    assert correlate([0.1, 0.1, 0.1], [1, 2, 3]) == 0.0
    assert correlate([1], [1]) == correlate([], []) == 0.0
    with pytest.raises(InputError, match=r"\(2,\) and \(3,\) cannot be paired"):
        correlate([1, 2], [1, 2, 3])


@given(st.floats(0.01, 1), st.floats(0.01, 1))
def test_harmonic_mean_agrees_with_scipy(x: float, y: float) -> None:
    assert harmonic_mean(x, y) == pytest.approx(scipy.stats.hmean([x, y]))
    assert harmonic_mean(-x, y) == harmonic_mean(x, -y) == harmonic_mean(-x, -y) == 0.0
