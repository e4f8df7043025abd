"""Removing language directions: hand-worked cases, projections by QR, properties."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from calque.errors import InputError
from calque.models.neutral_space import find_language_directions, remove_directions

MEANS = arrays(
    np.float32,
    st.tuples(st.integers(2, 6), st.integers(6, 10)),
    elements=st.floats(-8, 8, width=16),
)


def test_three_languages_by_hand() -> None:
    means = np.float32([[1, 0, 5], [-1, 0, 5], [0, 0, 5]])
    mean, directions = find_language_directions(means)
    np.testing.assert_allclose(mean, [0, 0, 5])
    np.testing.assert_allclose(np.abs(directions), [[1, 0, 0]], atol=1e-6)
    np.testing.assert_allclose(
        remove_directions(np.float32([[7, 3, 9]]), mean, directions), [[0, 3, 4]], atol=1e-6
    )


def test_same_projection_as_by_qr() -> None:
    generator = np.random.default_rng(0)
    means, vectors = generator.normal(size=(5, 12)), generator.normal(size=(20, 12))
    differences = (means[1:] - means[0]).T  # spans what the centred means span
    basis, _ = np.linalg.qr(differences)
    centered = vectors - means.mean(axis=0)
    expected = centered - centered @ basis @ basis.T
    found = remove_directions(np.float32(vectors), *find_language_directions(np.float32(means)))
    np.testing.assert_allclose(found, expected, atol=1e-5)


@given(MEANS)
def test_all_language_means_coincide_afterwards(means: np.ndarray) -> None:
    mean, directions = find_language_directions(means)
    assert len(directions) < len(means)
    np.testing.assert_allclose(directions @ directions.T, np.eye(len(directions)), atol=1e-4)
    neutral = remove_directions(means, mean, directions)
    np.testing.assert_allclose(neutral[means.any(axis=1)], 0, atol=1e-3)


@given(MEANS, st.integers(0, 100))
def test_removing_twice_is_removing_once(means: np.ndarray, seed: int) -> None:
    mean, directions = find_language_directions(means)
    shape = (4, means.shape[1])
    vectors = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    once = remove_directions(vectors, mean, directions)
    np.testing.assert_allclose(once @ directions.T, 0, atol=1e-4)
    again = remove_directions(once, np.zeros_like(mean), directions)
    np.testing.assert_allclose(again, once, atol=1e-4)


def test_equal_means_leave_nothing_to_remove() -> None:
    mean, directions = find_language_directions(np.ones((3, 4), dtype=np.float32))
    assert directions.shape == (0, 4)
    vectors = np.float32([[2, 2, 2, 5]])
    np.testing.assert_allclose(remove_directions(vectors, mean, directions), vectors - 1)


def test_zero_vectors_stay_zero() -> None:
    mean, directions = find_language_directions(np.float32([[1, 2], [3, 4]]))
    assert not remove_directions(np.zeros((2, 2), dtype=np.float32), mean, directions).any()


def test_one_language_is_an_error() -> None:
    with pytest.raises(InputError, match="give at least two languages"):
        find_language_directions(np.ones((1, 4), dtype=np.float32))
