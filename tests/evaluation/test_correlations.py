"""Correlations against SciPy, ranks and precision against plain sets."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
from hypothesis import assume, given
from hypothesis import strategies as st

from calque.errors import InputError
from calque.evaluation.metrics import (
    find_ranks,
    harmonic_mean,
    pearson_correlation,
    precision_at_k,
    spearman_correlation,
)

# Few different values, so that there are many ties.
TIED = st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=3, max_size=30)
FLOATS = st.lists(
    st.tuples(st.floats(-1e6, 1e6), st.floats(-1, 1)), min_size=3, max_size=30, unique=True
)


@given(TIED | FLOATS)
def test_correlations_are_scipys(pairs: list[tuple[float, float]]) -> None:
    x, y = (np.array(side, dtype=np.float64) for side in zip(*pairs, strict=True))
    assume(np.ptp(x) > 1e-3 and np.ptp(y) > 1e-3)  # SciPy warns where rounding decides
    expected = scipy.stats.pearsonr(x, y).statistic
    assert pearson_correlation(x, y) == pytest.approx(expected, abs=1e-9)
    expected = scipy.stats.spearmanr(x, y).statistic
    assert spearman_correlation(x, y) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("correlate", [pearson_correlation, spearman_correlation])
def test_constants_correlate_with_nothing(correlate: object) -> None:
    assert callable(correlate)
    assert correlate([0.1, 0.1, 0.1], [1, 2, 3]) == 0.0
    assert correlate([1], [1]) == correlate([], []) == 0.0
    with pytest.raises(InputError, match=r"\(2,\) and \(3,\) cannot be paired"):
        correlate([1, 2], [1, 2, 3])


@given(st.floats(0.01, 1), st.floats(0.01, 1))
def test_harmonic_mean_is_scipys(x: float, y: float) -> None:
    assert harmonic_mean(x, y) == pytest.approx(scipy.stats.hmean([x, y]))
    assert harmonic_mean(-x, y) == harmonic_mean(x, -y) == harmonic_mean(-x, -y) == 0.0


@given(st.integers(1, 8), st.integers(1, 5), st.data())
def test_ranks_are_those_of_sets(n_queries: int, width: int, data: st.DataObject) -> None:
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
