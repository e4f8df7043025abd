"""RCSLS against autograd, and what it is for: better retrieval than the orthogonal map."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from calque.algorithms.nearest import csls_nearest_neighbors, normalize_rows
from calque.algorithms.procrustes import IndexPairs, normalize_space, solve_rotation
from calque.algorithms.rcsls import RcslsSettings, fit_rcsls, rcsls_loss_and_gradient
from calque.errors import InputError

seeds = st.integers(0, 1000)


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def make_pair(n_words: int, hidden: int, noise: float) -> tuple[Tensor, Tensor]:
    """Two languages, the first rotated, stretched and noisy."""
    tgt = draw(n_words, hidden) * torch.linspace(2, 0.3, hidden)
    turn, _ = torch.linalg.qr(draw(hidden, hidden, seed=1))
    stretch = torch.linspace(0.1, 1.9, hidden) ** 2
    src = tgt @ turn * stretch + noise * draw(n_words, hidden, seed=2)
    return normalize_space(src)[0], normalize_space(tgt)[0]


def first(n_words: int) -> IndexPairs:
    return IndexPairs(torch.arange(n_words), torch.arange(n_words))


def dense_loss(src: Tensor, tgt: Tensor, pairs: IndexPairs, W: Tensor, k: int) -> Tensor:
    """The loss as the paper writes it, with all similarities at once."""
    x, y = src[pairs.src] @ W, tgt[pairs.tgt]
    near_x = (x @ tgt.T).topk(k).values.mean(dim=1)
    near_y = (y @ (src @ W).T).topk(k).values.mean(dim=1)
    return (-2 * (x * y).sum(dim=1) + near_x + near_y).mean()


def precision(src: Tensor, tgt: Tensor, n_train: int) -> float:
    src, tgt = normalize_rows(src), normalize_rows(tgt)
    found = csls_nearest_neighbors(src[n_train:], tgt, 10, sources=src)[1][:, 0]
    return float((found == torch.arange(n_train, len(src))).double().mean())


def test_the_gradient_equals_autograd() -> None:
    src, tgt = make_pair(60, 5, 0.3)
    W = (solve_rotation(src, tgt, first(40)) + 0.1 * draw(5, 5, seed=7)).requires_grad_()
    loss = dense_loss(src, tgt, first(40), W, 3)
    loss.backward()
    found, gradient = rcsls_loss_and_gradient(
        src, tgt, first(40), W.detach(), RcslsSettings(n_neighbors=3)
    )
    assert found == pytest.approx(loss.item())
    torch.testing.assert_close(gradient, W.grad)


@given(st.integers(1, 6), st.integers(1, 9), st.integers(1, 12), st.integers(12, 20), seeds)
def test_loss_and_gradient_equal_those_of_the_paper(
    hidden: int, k: int, n_pairs: int, n_words: int, seed: int
) -> None:
    """Pairs may come twice, in any order; the dense formula is differentiated by torch."""
    src, tgt = draw(n_words, hidden, seed=seed), draw(n_words, hidden, seed=seed + 1)
    generator = torch.Generator().manual_seed(seed)
    pairs = IndexPairs(*torch.randint(n_words, (2, n_pairs), generator=generator))
    W = draw(hidden, hidden, seed=seed + 2).requires_grad_()
    loss = dense_loss(src, tgt, pairs, W, k)
    loss.backward()
    found, gradient = rcsls_loss_and_gradient(
        src, tgt, pairs, W.detach(), RcslsSettings(n_neighbors=k)
    )
    assert found == pytest.approx(loss.item(), abs=1e-9)
    torch.testing.assert_close(gradient, W.grad)


@given(seeds, st.floats(0.0, 1.0), st.floats(0.1, 10.0))
def test_the_loss_is_convex(seed: int, share: float, size: float) -> None:
    """Below every chord, and above every tangent."""
    src, tgt = make_pair(50, 4, 0.3)
    settings = RcslsSettings(n_neighbors=3)
    a, b = size * draw(4, 4, seed=seed), draw(4, 4, seed=seed + 50)
    (at_a, slope), (at_b, _), (between, _) = (
        rcsls_loss_and_gradient(src, tgt, first(30), W, settings)
        for W in (a, b, share * a + (1 - share) * b)
    )
    assert between <= share * at_a + (1 - share) * at_b + 1e-9
    assert at_b >= at_a + float((slope * (b - a)).sum()) - 1e-9


@settings(max_examples=20)
@given(seeds, st.sampled_from(["none", "spectral"]), st.floats(1e-3, 1e3))
def test_no_step_raises_the_loss(seed: int, constraint: str, rate: float) -> None:
    src, tgt = (normalize_space(draw(40, 4, seed=seed + n))[0] for n in (0, 1))
    chosen = RcslsSettings(n_neighbors=3, n_rounds=4, rate=rate, constraint=constraint)  # type: ignore[arg-type]
    fit = fit_rcsls(src, tgt, first(20), chosen)
    assert fit.losses == sorted(fit.losses, reverse=True)
    last = float(dense_loss(src, tgt, first(20), fit.map, 3))
    assert last == pytest.approx(fit.losses[-1], abs=1e-9)
    if constraint == "spectral":
        assert float(torch.linalg.matrix_norm(fit.map, 2)) <= 1 + 1e-9


def test_retrieval_improves_on_the_orthogonal_map() -> None:
    src, tgt = make_pair(1200, 30, 1.5)
    pairs = first(600)
    fit = fit_rcsls(src, tgt, pairs, RcslsSettings())
    orthogonal = precision(src @ solve_rotation(src, tgt, pairs), tgt, 600)
    relaxed = precision(src @ fit.map, tgt, 600)
    assert 0.2 < orthogonal < 0.8
    assert relaxed > orthogonal + 0.05
    assert len(fit.losses) > 2
    assert all(after < before for before, after in zip(fit.losses, fit.losses[1:], strict=False))


def test_a_noisy_rotation_is_found() -> None:
    tgt = normalize_space(draw(400, 20))[0]
    turn, _ = torch.linalg.qr(draw(20, 20, seed=1))
    src = normalize_space(tgt @ turn.T + 0.1 * draw(400, 20, seed=2))[0]
    fit = fit_rcsls(src, tgt, first(200), RcslsSettings())
    assert precision(src @ fit.map, tgt, 200) > 0.98


def test_the_spectral_constraint_holds() -> None:
    src, tgt = make_pair(200, 10, 0.2)
    free = fit_rcsls(src, tgt, first(150), RcslsSettings()).map
    held = fit_rcsls(src, tgt, first(150), RcslsSettings(constraint="spectral")).map
    assert float(torch.linalg.matrix_norm(free, 2)) > 1.1
    assert float(torch.linalg.matrix_norm(held, 2)) <= 1 + 1e-9


def test_the_result_is_deterministic() -> None:
    src, tgt = (side.float() for side in make_pair(200, 10, 0.2))
    maps = [fit_rcsls(src, tgt, first(150), RcslsSettings()).map for _ in range(2)]
    assert torch.equal(*maps)


@pytest.mark.parametrize("settings", [RcslsSettings(n_words=6), RcslsSettings(n_neighbors=999)])
def test_with_few_words_all_are_neighbors(settings: RcslsSettings) -> None:
    src, tgt = make_pair(20, 3, 0.1)
    W, n_words = solve_rotation(src, tgt, first(5)), min(20, settings.n_words)
    x, y = src[:5] @ W, tgt[:5]
    near = (x @ tgt[:n_words].T).mean(dim=1) + (y @ (src[:n_words] @ W).T).mean(dim=1)
    found, _ = rcsls_loss_and_gradient(src, tgt, first(5), W, settings)
    assert found == pytest.approx((near - 2 * (x * y).sum(dim=1)).mean().item())
    losses = fit_rcsls(src, tgt, first(5), settings).losses
    assert losses[-1] < losses[0]


def test_no_pairs() -> None:
    src, tgt = make_pair(20, 3, 0.1)
    with pytest.raises(InputError, match="no pair whose words"):
        fit_rcsls(src, tgt, first(0), RcslsSettings())
