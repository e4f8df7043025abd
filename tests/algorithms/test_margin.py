"""Margins and mined pairs against their definitions, thresholds against trying all of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import f1_score

from calque.algorithms.margin import Margin, MinedPairs, find_best_threshold, mine_pairs
from calque.algorithms.nearest import Neighbors, UnitRows, find_neighbors


def random_sides(
    seed: int, n_src: int, n_tgt: int, width: int = 8
) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    src = random.standard_normal((n_src, width)).astype(np.float32)
    tgt = random.standard_normal((n_tgt, width)).astype(np.float32)
    n_true = min(n_src, n_tgt) // 2
    tgt[:n_true] = src[:n_true] + 0.2 * tgt[:n_true]
    return src, tgt


def cosines_of(src: np.ndarray, tgt: np.ndarray) -> np.ndarray:
    left, right = (side / np.linalg.norm(side, axis=1, keepdims=True) for side in (src, tgt))
    return np.asarray(left.astype(np.float64) @ right.astype(np.float64).T)


def brute_force(cosines: np.ndarray, k: int, margin: Margin) -> np.ndarray:
    """The margin of every pair, neighbors or not."""
    src_means = np.sort(cosines, axis=1)[:, -k:].mean(axis=1)
    tgt_means = np.sort(cosines, axis=0)[-k:].mean(axis=0)
    means = (src_means[:, None] + tgt_means) / 2
    if margin == "ratio":
        return np.asarray(cosines / np.maximum(means, 1e-6))
    return np.asarray(cosines - means if margin == "distance" else cosines)


def greedy(scores: dict[tuple[int, int], float]) -> list[tuple[int, int]]:
    src_taken, tgt_taken, taken = set(), set(), []
    for (i, j), _ in sorted(scores.items(), key=lambda item: (-item[1], item[0])):
        if i not in src_taken and j not in tgt_taken:
            src_taken.add(i)
            tgt_taken.add(j)
            taken.append((i, j))
    return taken


def pairs_of(found: MinedPairs) -> list[tuple[int, int]]:
    return list(zip(found.src.tolist(), found.tgt.tolist(), strict=True))


@given(st.integers(0, 10_000), st.integers(5, 40), st.integers(5, 40), st.integers(1, 5))
@pytest.mark.parametrize("margin", ["ratio", "distance", "absolute"])
def test_mined_pairs_by_definition(
    margin: Margin, seed: int, n_src: int, n_tgt: int, k: int
) -> None:
    src, tgt = random_sides(seed, n_src, n_tgt)
    neighbors = find_neighbors(UnitRows(src), UnitRows(tgt), k)
    cosines = cosines_of(src, tgt)
    scores = brute_force(cosines, k, margin)
    # Only neighbors are candidates: the best target of a source is one of its k nearest.
    among = np.argsort(-cosines, axis=1)[:, :k]
    forward = {(i, int(among[i][scores[i, among[i]].argmax()])) for i in range(n_src)}
    among = np.argsort(-cosines, axis=0)[:k]
    backward = {(int(among[:, j][scores[among[:, j], j].argmax()]), j) for j in range(n_tgt)}
    expected = {
        "forward": forward,
        "backward": backward,
        "intersect": forward & backward,
        "max": set(greedy({pair: scores[pair] for pair in forward | backward})),
    }
    for retrieval, wanted in expected.items():
        found = mine_pairs(neighbors, margin, retrieval)  # type: ignore[arg-type]
        assert set(pairs_of(found)) == wanted
        assert len(found) == len(wanted)
        assert (np.diff(found.scores) <= 0).all()
        exact = [scores[pair] for pair in pairs_of(found)]
        np.testing.assert_allclose(found.scores, exact, rtol=2e-4, atol=2e-6)


def test_ratio_by_hand() -> None:
    neighbors = Neighbors(
        np.float32([[0.9, 0.5], [0.6, 0.6]]),
        np.array([[0, 1], [1, 0]]),
        np.float32([[0.9, 0.6], [0.6, 0.5]]),
        np.array([[0, 1], [1, 0]]),
    )
    found = mine_pairs(neighbors)
    assert pairs_of(found) == [(0, 0), (1, 1)]
    # Means: sources 0.7 and 0.6, targets 0.75 and 0.55.
    np.testing.assert_allclose(found.scores, [0.9 / 0.725, 0.6 / 0.575], rtol=1e-6)
    assert pairs_of(found.above(1.1)) == [(0, 0)]


def test_ratios_over_negative_means_keep_the_order() -> None:
    neighbors = Neighbors(
        np.float32([[-0.1], [-0.3]]),
        np.array([[0], [0]]),
        np.float32([[-0.1]]),
        np.array([[0]]),
    )
    scores = mine_pairs(neighbors, "ratio", "forward")
    assert pairs_of(scores) == [(0, 0), (1, 0)]


@given(
    st.lists(st.tuples(st.integers(-5, 5), st.booleans()), min_size=1, max_size=30),
    st.integers(0, 5),
)
def test_no_threshold_has_a_better_f1(pairs: list[tuple[int, bool]], n_not_found: int) -> None:
    scores = np.float32([score / 3 for score, _ in pairs])
    is_gold = np.array([gold for _, gold in pairs])
    n_gold = int(is_gold.sum()) + n_not_found
    best = find_best_threshold(scores, is_gold, n_gold)
    # Gold pairs that were never found are pairs no threshold can keep.
    truth = np.concatenate([is_gold, np.ones(n_not_found, dtype=bool)])

    def score(threshold: float) -> float:
        kept = np.concatenate([scores >= np.float64(threshold), np.zeros(n_not_found, dtype=bool)])
        return float(f1_score(truth, kept, zero_division=0.0))

    highest = max(score(float(threshold)) for threshold in [*scores, np.inf])
    assert np.isclose(best.f1, highest)
    assert np.isclose(score(best.threshold), highest)
    assert best.n_kept == np.count_nonzero(scores >= np.float64(best.threshold))


def test_threshold_by_hand() -> None:
    best = find_best_threshold(
        np.float32([0.1, 0.5, 0.4, 0.2]), np.array([True, True, False, True]), 4
    )
    # Keep 1: 2/5; 2: 2/6; 3: 4/7; 4: 6/8.
    assert (best.n_kept, best.n_correct, best.f1) == (4, 3, 0.75)
    assert (best.precision, best.recall) == (0.75, 0.75)
    assert np.isclose(best.threshold, 0.1)
    nothing = find_best_threshold(np.float32([0.1]), np.array([False]), 4)
    assert (nothing.n_kept, nothing.f1, nothing.precision) == (0, 0.0, 0.0)
