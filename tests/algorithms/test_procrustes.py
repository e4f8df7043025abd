"""Linear maps against SciPy and NumPy, and sums in pieces against all pairs at once."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from calque.algorithms.procrustes import (
    PairSums,
    orthogonalize_step,
    solve_least_squares,
    solve_procrustes,
    step_limit,
)

sizes = st.integers(1, 12)
seeds = st.integers(0, 1000)


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def rotation(hidden: int, seed: int = 0) -> Tensor:
    """Some orthogonal matrix."""
    q, _ = torch.linalg.qr(draw(hidden, hidden, seed=seed))
    return q


def sums_of(src: Tensor, tgt: Tensor, weights: Tensor | None = None) -> PairSums:
    sums = PairSums.zeros((), src.shape[1])
    sums.add((), src, tgt, weights)
    return sums


def measure(src: Tensor, tgt: Tensor, W: Tensor) -> float:
    """‖S − T W‖² / n, directly."""
    return float((src - tgt @ W).square().sum() / len(src))


def test_procrustes_is_scipys() -> None:
    src, tgt = draw(50, 7, seed=1), draw(50, 7, seed=2)
    expected, _ = scipy.linalg.orthogonal_procrustes(tgt.numpy(), src.numpy())
    found = solve_procrustes(sums_of(src, tgt).cross)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-12)


def test_least_squares_is_numpys() -> None:
    src, tgt = draw(50, 7, seed=1), draw(50, 7, seed=2)
    sums = sums_of(src, tgt)
    assert sums.gram is not None
    expected, *_ = np.linalg.lstsq(tgt.numpy(), src.numpy(), rcond=None)
    np.testing.assert_allclose(
        solve_least_squares(sums.gram, sums.cross).numpy(), expected, atol=1e-12
    )


@pytest.mark.parametrize("n_pairs", [1, 3, 6])
def test_few_pairs_have_the_least_squares_of_smallest_norm(n_pairs: int) -> None:
    src, tgt = draw(n_pairs, 7, seed=1), draw(n_pairs, 7, seed=2)
    sums = sums_of(src, tgt)
    assert sums.gram is not None
    expected, *_ = scipy.linalg.lstsq(tgt.numpy(), src.numpy())
    found = solve_least_squares(sums.gram, sums.cross).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-9)


@pytest.mark.parametrize(("cutoff", "rank"), [(None, 5), (1e-6, 4), (1e-2, 3), (1e-20, 5)])
def test_weak_directions_may_be_left_out(cutoff: float | None, rank: int) -> None:
    values = torch.tensor([1.0, 0.5, 0.1, 1e-3, 3e-7], dtype=torch.float64)
    tgt, src = rotation(5, 1) @ values.diag() @ rotation(5, 2), draw(5, 5)
    sums = sums_of(src, tgt)
    assert sums.gram is not None
    found = solve_least_squares(sums.gram, sums.cross, cutoff)
    least = 1e-8 if cutoff is None else max(cutoff, 1e-8)
    expected, _, found_rank, _ = np.linalg.lstsq(tgt.numpy(), src.numpy(), rcond=least)
    assert torch.linalg.matrix_rank(found, rtol=1e-9).item() == found_rank == rank
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-2)


def test_a_stack_is_solved_like_its_parts() -> None:
    crosses, grams = draw(2, 3, 5, 5), draw(2, 3, 5, 5, seed=1)
    grams = grams @ grams.mT
    crosses[1, 2] = 0
    for solve, arguments in (
        (solve_procrustes, (crosses,)),
        (solve_least_squares, (grams, crosses)),
    ):
        found = solve(*arguments)  # type: ignore[operator]
        for place in np.ndindex(2, 3):
            alone = solve(*(a[place] for a in arguments))  # type: ignore[operator]
            torch.testing.assert_close(found[place], alone)


@given(sizes, st.integers(1, 40), seeds)
def test_procrustes_lies_between_least_squares_and_any_rotation(
    hidden: int, n_pairs: int, seed: int
) -> None:
    src, tgt = draw(n_pairs, hidden, seed=seed), draw(n_pairs, hidden, seed=seed + 1)
    sums = sums_of(src, tgt)
    assert sums.gram is not None
    W, free = solve_procrustes(sums.cross), solve_least_squares(sums.gram, sums.cross)
    torch.testing.assert_close(W.mT @ W, torch.eye(hidden, dtype=torch.float64))
    best = measure(src, tgt, W)
    assert measure(src, tgt, free) <= best * (1 + 1e-9)
    for other in (torch.eye(hidden, dtype=torch.float64), rotation(hidden, seed)):
        assert best <= measure(src, tgt, other) * (1 + 1e-9)


@given(sizes, seeds, st.booleans())
def test_a_known_rotation_is_found(hidden: int, seed: int, mirrored: bool) -> None:
    W = rotation(hidden, seed)
    W[0] = -W[0] if mirrored else W[0]
    tgt = draw(3 * hidden, hidden, seed=seed + 1)
    sums = sums_of(tgt @ W, tgt)
    assert sums.gram is not None
    torch.testing.assert_close(solve_procrustes(sums.cross), W)
    torch.testing.assert_close(solve_least_squares(sums.gram, sums.cross), W)
    assert sums.residuals(W).item() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("n_pairs", [0, 1, 4])
def test_directions_without_pairs_are_left_as_they_are(n_pairs: int) -> None:
    """Of all orthogonal matrices with the least error, that with the largest trace."""
    src, tgt = draw(n_pairs, 6, seed=1), draw(n_pairs, 6, seed=2)
    sums = sums_of(src, tgt)
    W = solve_procrustes(sums.cross)
    torch.testing.assert_close(W.mT @ W, torch.eye(6, dtype=torch.float64))
    strengths = torch.linalg.svdvals(sums.cross)
    assert (W * sums.cross).sum().item() == pytest.approx(strengths.sum().item())
    if n_pairs == 0:
        assert torch.equal(W, torch.eye(6, dtype=torch.float64))
    # Any turn inside the free directions fits as well, and leads further from the identity.
    u, _, v = torch.linalg.svd(sums.cross)
    for seed in range(20):
        turn = rotation(6 - n_pairs, seed)
        other = u[:, :n_pairs] @ v[:n_pairs] + u[:, n_pairs:] @ turn @ v[n_pairs:]
        assert (other * sums.cross).sum().item() == pytest.approx(strengths.sum().item())
        assert W.trace() >= other.trace() - 1e-9


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 6), seeds, st.booleans())
def test_sums_in_pieces_are_those_of_all_pairs(
    pieces: list[int], hidden: int, seed: int, gram: bool
) -> None:
    """Batch by batch, and by two processes that add theirs up."""
    n_pairs = sum(pieces)
    src, tgt = draw(n_pairs, hidden, seed=seed), draw(n_pairs, hidden, seed=seed + 1)
    weights = draw(n_pairs, seed=seed + 2).abs()
    halves = [PairSums.zeros((2, 1), hidden, gram=gram) for _ in range(2)]
    start = 0
    for number, size in enumerate(pieces):
        rows = slice(start, start + size)
        halves[number % 2].add((1, 0), src[rows], tgt[rows], weights[rows])
        start += size
    halves[0].merge(halves[1])
    found = halves[0]
    S, T, w = src.numpy(), tgt.numpy(), weights.numpy()
    np.testing.assert_allclose(found.cross[1, 0].numpy(), T.T @ (w[:, None] * S), atol=1e-12)
    assert (found.gram is not None) == gram
    if found.gram is not None:
        np.testing.assert_allclose(found.gram[1, 0].numpy(), T.T @ (w[:, None] * T), atol=1e-12)
    assert found.weights[1, 0].item() == pytest.approx(w.sum())
    assert not any(tensor[0].any() for tensor in found.tensors())


@given(st.integers(1, 8), st.integers(1, 30), seeds)
def test_residuals_come_from_sums_alone(hidden: int, n_pairs: int, seed: int) -> None:
    src, tgt = draw(n_pairs, hidden, seed=seed), draw(n_pairs, hidden, seed=seed + 1)
    weights, W = draw(n_pairs, seed=seed).abs() + 0.1, draw(hidden, hidden, seed=seed + 2)
    whole, lean = sums_of(src, tgt, weights), PairSums.zeros((), hidden, gram=False)
    lean.add((), src, tgt, weights)

    def mean(W: Tensor) -> float:
        return float((weights @ (src - tgt @ W).square().sum(1)) / weights.sum())

    Q, eye = rotation(hidden, seed), torch.eye(hidden, dtype=torch.float64)
    assert whole.residuals(W).item() == pytest.approx(mean(W))
    for sums in (whole, lean):
        assert sums.residuals(Q).item() == pytest.approx(mean(Q))
        assert sums.residuals().item() == pytest.approx(mean(eye))


def test_no_pairs_have_no_residual() -> None:
    assert math.isnan(PairSums.zeros((), 3).residuals().item())


def test_weak_directions_survive_a_strong_one() -> None:
    """A direction 10⁵ times as strong, as encoders have: float32 sums would lose the others."""
    W, tgt = rotation(8, 3), draw(4000, 8, seed=4)
    tgt[:, 0] = 1e5 * (1 + tgt[:, 0] / 10)
    src = tgt @ W
    sums = PairSums.zeros((), 8)
    for rows in torch.arange(4000).split(64):
        sums.add((), src[rows], tgt[rows])
    torch.testing.assert_close(solve_procrustes(sums.cross), W, atol=1e-8, rtol=0)
    coarse = sum(tgt[r].float().mT @ src[r].float() for r in torch.arange(4000).split(64))
    assert isinstance(coarse, Tensor)
    assert (solve_procrustes(coarse.double()) - W).abs().max() > 1e-4


# The orthogonal step.


@given(st.integers(1, 8), st.sampled_from([0.001, 0.01, 0.1]), seeds)
def test_a_step_is_the_papers_where_it_is_safe(hidden: int, beta: float, seed: int) -> None:
    W = draw(hidden, hidden, seed=seed)
    W = W * 0.9 * step_limit(beta) / (W @ W.mT).abs().sum(1).max().sqrt()
    expected = (1 + beta) * W - beta * ((W @ W.mT) @ W)
    assert torch.equal(orthogonalize_step(W, beta), expected)


def test_singular_values_move_as_the_formula_says() -> None:
    values = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)
    W = rotation(3, 1) @ values.diag() @ rotation(3, 2)
    found = torch.linalg.svdvals(orthogonalize_step(W, 0.01)).flip(0)
    torch.testing.assert_close(found, values * (1.01 - 0.01 * values.square()))


@settings(max_examples=25)
@given(
    st.integers(1, 8),
    st.sampled_from([0.01, 0.1, 0.5]),
    st.sampled_from([0.01, 1.0, 5.8, 10.0, 14.2, 100.0, 1e6]),
    seeds,
)
def test_steps_lead_to_the_nearest_orthogonal_matrix_from_anywhere(
    hidden: int, beta: float, norm: float, seed: int
) -> None:
    values = torch.linspace(0.1, 1, hidden, dtype=torch.float64)
    values = values / values.max() * norm
    W = rotation(hidden, seed) @ values.diag() @ rotation(hidden, seed + 1)
    nearest, _ = scipy.linalg.polar(W.numpy())
    for _ in range(int(25 / beta)):
        W = orthogonalize_step(W, beta)
    np.testing.assert_allclose(W.numpy(), nearest, atol=1e-6)


@pytest.mark.parametrize(("norm", "grows"), [(14.1, False), (14.3, True)])
def test_without_the_guard_it_would_diverge(norm: float, grows: bool) -> None:
    """Past √((2 + β)/β) the plain formula grows without end."""
    value = norm
    for _ in range(60):
        value = value * (1.01 - 0.01 * value * value) if abs(value) < 1e9 else value
    assert (abs(value) > 1e9) == grows
    guarded = torch.tensor([[norm]], dtype=torch.float64)
    for _ in range(2000):
        guarded = orthogonalize_step(guarded, 0.01)
    assert guarded.item() == pytest.approx(1)


def test_a_stack_takes_steps_each_for_itself() -> None:
    stack = draw(2, 2, 4, 4)
    stack[0, 1] *= 1000
    stack[1, 1] = 0
    found = orthogonalize_step(stack, 0.01)
    for place in np.ndindex(2, 2):
        torch.testing.assert_close(found[place], orthogonalize_step(stack[place], 0.01))
    assert not found[1, 1].any()
