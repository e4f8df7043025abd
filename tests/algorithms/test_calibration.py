"""Calibrated probabilities and their reliability, compared with scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from calque.algorithms.calibration import Calibration, bin_reliability, fit_calibration
from calque.errors import InputError


def draw_scores(n_scores: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Draw scores, and what is right with the probability σ(0.7 · log-odds − 0.5)."""
    generator = np.random.default_rng(seed)
    log_odds = generator.normal(-3, 4, size=n_scores)
    is_right = generator.random(n_scores) < 1 / (1 + np.exp(-(0.7 * log_odds - 0.5)))
    return (1 / (1 + np.exp(-log_odds))).astype(np.float32), is_right


@pytest.mark.parametrize("n_scores", [40, 20_000])
def test_the_fit_is_that_of_scikit_learn(n_scores: int) -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    scores, is_right = draw_scores(n_scores)
    found = fit_calibration(scores, is_right)
    log_odds = torch.logit(torch.from_numpy(scores).double(), eps=1e-6).numpy()
    # A target t is t times a right and 1 − t times a wrong item.
    n_right, n_wrong = is_right.sum(), (~is_right).sum()
    targets = np.where(is_right, (n_right + 1) / (n_right + 2), 1 / (n_wrong + 2))
    model = linear_model.LogisticRegression(C=np.inf, tol=1e-10, max_iter=1000).fit(
        np.tile(log_odds, 2)[:, None],
        np.repeat([1, 0], n_scores),
        sample_weight=np.concatenate([targets, 1 - targets]),
    )
    assert found.slope == pytest.approx(model.coef_[0, 0], rel=1e-4)
    assert found.intercept == pytest.approx(model.intercept_[0], rel=1e-4)
    probabilities = found.apply(torch.from_numpy(scores)).numpy()
    expected = model.predict_proba(log_odds[:, None])[:, 1]
    np.testing.assert_allclose(probabilities, expected, atol=1e-4)


def test_drawn_probabilities_are_found() -> None:
    found = fit_calibration(*draw_scores(200_000))
    assert (found.slope, found.intercept) == (
        pytest.approx(0.7, abs=0.02),
        pytest.approx(-0.5, abs=0.03),
    )


def test_scores_that_separate_right_from_wrong_have_a_fit() -> None:
    scores = np.array([0.1, 0.2, 0.3, 0.8, 0.9], dtype=np.float32)
    found = fit_calibration(scores, scores > 0.5)
    probabilities = found.apply(torch.from_numpy(scores)).tolist()
    assert probabilities == sorted(probabilities)
    assert 0.01 < probabilities[2] < 0.5 < probabilities[3] < 0.99


@pytest.mark.parametrize("n_right", [0, 3])
def test_one_kind_of_pairs_is_not_enough(n_right: int) -> None:
    is_right = np.arange(3) < n_right
    with pytest.raises(InputError, match=f"{n_right} word pairs are gold links and {3 - n_right}"):
        fit_calibration(np.full(3, 0.5, dtype=np.float32), is_right)


def test_probabilities_by_hand() -> None:
    found = Calibration(slope=0.5, intercept=1.0).apply(torch.tensor([0.2, 0.0, 1.0]))
    assert found[0].item() == pytest.approx(1 / (1 + np.exp(-1.0) * np.sqrt(0.8 / 0.2)))
    assert 0 < found[1] < 0.01 and 0.99 < found[2] < 1


def test_bins_are_those_of_scikit_learn() -> None:
    calibration = pytest.importorskip("sklearn.calibration")
    probabilities, is_right = draw_scores(5000, seed=1)
    found = bin_reliability(probabilities, is_right)
    right, mean = calibration.calibration_curve(is_right, probabilities, n_bins=10)
    np.testing.assert_allclose(found.right, right)
    np.testing.assert_allclose(found.probability, mean, rtol=1e-5)
    assert found.n_items.sum() == 5000


def test_calibration_error_by_hand() -> None:
    probabilities = np.array([0.9, 1.0, 0.5, 0.3], dtype=np.float32)
    found = bin_reliability(probabilities, np.array([True, False, True, False]), 2)
    # 0.9, 1.0 and 0.5 have the mean 0.8, of which 2 of 3 are right; 0.3 is not right.
    assert found.n_items.tolist() == [1, 3]
    assert found.error == pytest.approx((3 * (0.8 - 2 / 3) + 0.3) / 4)
    assert bin_reliability(np.zeros(0, np.float32), np.zeros(0, bool)).error == 0
