"""Nearest neighbours against a plain double loop."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calque.tasks import metrics
from calque.tasks.metrics import find_nearest, retrieval_accuracy
from calque.types import InputError


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
