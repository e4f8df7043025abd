from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from calque.models.tag_probe import fit_tagger


def draw(n_words: int, n_features: int, n_classes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """States of unequal spread and place, and labels that depend on them in part."""
    generator = np.random.default_rng(seed)
    states = generator.normal(size=(n_words, n_features)).astype(np.float32)
    scores = states @ generator.normal(size=(n_features, n_classes))
    labels = (scores + generator.gumbel(size=scores.shape)).argmax(axis=1)
    labels[:n_classes] = np.arange(n_classes)
    states = states * generator.uniform(0.1, 5, n_features) + generator.normal(size=n_features)
    return states.astype(np.float32), labels


@settings(max_examples=10)
@given(st.integers(2, 5), st.integers(0, 100), st.sampled_from([0.003, 0.03, 0.3]))
def test_it_is_scikit_learns_logistic_regression(n_classes: int, seed: int, penalty: float) -> None:
    states, labels = draw(200, 6, n_classes, seed)
    tagger = fit_tagger(
        torch.from_numpy(states),
        torch.from_numpy(labels),
        n_classes,
        penalty=penalty,
        max_iterations=300,
    )
    scaler = StandardScaler().fit(states.astype(np.float64))
    # Two classes are one score there, and two here: that halves the penalty.
    strength = 1 / (penalty * len(states)) * (2 if n_classes == 2 else 1)
    peer = LogisticRegression(C=strength, tol=1e-8, max_iter=2000)
    peer.fit(scaler.transform(states.astype(np.float64)), labels)
    mine = torch.softmax(torch.from_numpy(states) @ tagger.weight + tagger.bias, dim=1).numpy()
    theirs = peer.predict_proba(scaler.transform(states.astype(np.float64)))
    np.testing.assert_allclose(mine, theirs, atol=2e-3)
    found = tagger.predict(torch.from_numpy(states)).numpy()
    assert (found == peer.predict(scaler.transform(states.astype(np.float64)))).mean() > 0.97


def test_a_feature_that_never_varies_does_no_harm() -> None:
    states, labels = draw(100, 4, 3, seed=1)
    wide = np.concatenate([states, np.full((100, 1), 7.0, dtype=np.float32)], axis=1)
    for inputs in (states, wide):
        tagger = fit_tagger(torch.from_numpy(inputs), torch.from_numpy(labels), 3)
        found = tagger.predict(torch.from_numpy(inputs)).numpy()
        assert (found == labels).mean() > 0.6
        assert bool(tagger.weight.isfinite().all())


def test_the_same_states_give_the_same_tagger_and_draw_nothing() -> None:
    states, labels = (torch.from_numpy(array) for array in draw(150, 5, 4, seed=2))
    before = torch.random.get_rng_state()
    first, second = (fit_tagger(states, labels, 4) for _ in range(2))
    assert torch.equal(first.weight, second.weight)
    assert torch.equal(first.bias, second.bias)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_half_precision_around_it_changes_nothing() -> None:
    states, labels = (torch.from_numpy(array) for array in draw(150, 5, 4, seed=3))
    with torch.autocast("cpu", torch.bfloat16):
        inside = fit_tagger(states, labels, 4)
        found = inside.predict(states)
    outside = fit_tagger(states, labels, 4)
    assert torch.equal(inside.weight, outside.weight)
    assert torch.equal(inside.bias, outside.bias)
    assert torch.equal(found, outside.predict(states))
