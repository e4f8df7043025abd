"""The chosen threshold against trying every one."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import f1_score

from calque.algorithms.margin import find_best_threshold


@given(
    st.lists(st.tuples(st.integers(-5, 5), st.booleans()), min_size=1, max_size=30),
    st.integers(0, 5),
)
def test_no_threshold_is_better(pairs: list[tuple[int, bool]], n_unfound: int) -> None:
    scores = np.float32([score / 3 for score, _ in pairs])
    is_gold = np.array([gold for _, gold in pairs])
    n_gold = int(is_gold.sum()) + n_unfound
    cut = find_best_threshold(scores, is_gold, n_gold)
    # Gold pairs that were never found are pairs no threshold can keep.
    truth = np.concatenate([is_gold, np.ones(n_unfound, dtype=bool)])

    def score(threshold: float) -> float:
        kept = np.concatenate([scores >= np.float64(threshold), np.zeros(n_unfound, dtype=bool)])
        return float(f1_score(truth, kept, zero_division=0.0))

    best = max(score(float(threshold)) for threshold in [*scores, np.inf])
    assert np.isclose(cut.f1, best)
    assert np.isclose(score(cut.threshold), best)
    assert cut.n_kept == np.count_nonzero(scores >= np.float64(cut.threshold))


def test_by_hand() -> None:
    cut = find_best_threshold(
        np.float32([0.1, 0.5, 0.4, 0.2]), np.array([True, True, False, True]), 4
    )
    # Keep 1: 2/5; 2: 2/6; 3: 4/7; 4: 6/8.
    assert (cut.n_kept, cut.n_hits, cut.f1) == (4, 3, 0.75)
    assert (cut.precision, cut.recall) == (0.75, 0.75)
    assert np.isclose(cut.threshold, 0.1)
    nothing = find_best_threshold(np.float32([0.1]), np.array([False]), 4)
    assert (nothing.n_kept, nothing.f1, nothing.precision) == (0, 0.0, 0.0)
