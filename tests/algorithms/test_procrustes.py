"""Linear maps against SciPy, NumPy and VecMap's steps written out with NumPy."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from calque.algorithms import procrustes
from calque.algorithms.nearest import nearest_neighbors, normalize_rows
from calque.algorithms.procrustes import (
    IndexPairs,
    PairMoments,
    PairSums,
    apply_map,
    collect_moments,
    normalize_space,
    orthogonalize_step,
    polar_factor,
    solve_joint_maps,
    solve_least_squares,
    solve_procrustes,
    solve_rotation,
    step_limit,
)
from calque.errors import InputError

Array = npt.NDArray[np.float64]
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


def test_procrustes_agrees_with_scipy() -> None:
    src, tgt = draw(50, 7, seed=1), draw(50, 7, seed=2)
    expected, _ = scipy.linalg.orthogonal_procrustes(tgt.numpy(), src.numpy())
    found = solve_procrustes(sums_of(src, tgt).cross)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-12)


def test_least_squares_agrees_with_numpy() -> None:
    src, tgt = draw(50, 7, seed=1), draw(50, 7, seed=2)
    sums = sums_of(src, tgt)
    assert sums.gram is not None
    expected, *_ = np.linalg.lstsq(tgt.numpy(), src.numpy(), rcond=None)
    np.testing.assert_allclose(
        solve_least_squares(sums.gram, sums.cross).numpy(), expected, atol=1e-12
    )


@pytest.mark.parametrize("n_pairs", [1, 3, 6])
def test_few_pairs_give_the_minimum_norm_solution(n_pairs: int) -> None:
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


def test_a_stack_of_maps() -> None:
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
def test_directions_without_pairs_are_not_changed(n_pairs: int) -> None:
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
def test_sums_in_parts_agree_with_all_pairs(
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
def test_residuals_from_sums(hidden: int, n_pairs: int, seed: int) -> None:
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


def test_residuals_without_pairs_are_nan() -> None:
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
def test_steps_are_those_of_the_paper_where_safe(hidden: int, beta: float, seed: int) -> None:
    W = draw(hidden, hidden, seed=seed)
    W = W * 0.9 * step_limit(beta) / (W @ W.mT).abs().sum(1).max().sqrt()
    expected = (1 + beta) * W - beta * ((W @ W.mT) @ W)
    assert torch.equal(orthogonalize_step(W, beta), expected)


def test_singular_values_follow_the_formula() -> None:
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
def test_steps_converge_to_the_nearest_orthogonal_matrix(
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


def test_steps_of_a_stack_are_independent() -> None:
    stack = draw(2, 2, 4, 4)
    stack[0, 1] *= 1000
    stack[1, 1] = 0
    found = orthogonalize_step(stack, 0.01)
    for place in np.ndindex(2, 2):
        torch.testing.assert_close(found[place], orthogonalize_step(stack[place], 0.01))
    assert not found[1, 1].any()


# Polar factors.


def draw_conditioned(hidden: int, condition: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    u, v = (
        torch.linalg.qr(torch.randn(hidden, hidden, generator=generator, dtype=torch.float64))[0]
        for _ in range(2)
    )
    return u @ torch.diag(torch.logspace(0, -math.log10(condition), hidden).double()) @ v


@given(
    hidden=st.integers(1, 24),
    log_condition=st.floats(0, 6),
    scale=st.floats(1e-6, 1e6),
    seed=st.integers(0, 1000),
)
def test_polar_factor_agrees_with_the_svd(
    hidden: int, log_condition: float, scale: float, seed: int
) -> None:
    matrix = draw_conditioned(hidden, 10**log_condition, seed)
    u, _, v = torch.linalg.svd(matrix)
    found = polar_factor(scale * matrix)
    assert found is not None
    torch.testing.assert_close(found, u @ v, rtol=0, atol=1e-8)


@pytest.mark.parametrize("rank", [0, 1, 5])
def test_singular_matrices_have_no_polar_factor(rank: int) -> None:
    matrix = draw_conditioned(6, 10.0, 0)
    matrix[:, rank:] = 0
    assert polar_factor(matrix) is None


def test_nan_has_no_polar_factor() -> None:
    assert polar_factor(torch.full((3, 3), math.nan, dtype=torch.float64)) is None


# Maps of word vectors.


def same(n_words: int) -> IndexPairs:
    return IndexPairs(torch.arange(n_words), torch.arange(n_words))


def make_languages(n_words: int, hidden: int, n_languages: int, noise: float) -> list[Tensor]:
    """Rotated and stretched versions of one space, with noise; words in the same order."""
    common = draw(n_words, hidden, seed=99) * torch.linspace(2, 0.5, hidden)
    spaces = []
    for seed in range(n_languages):
        stretch = torch.linspace(0.7, 1.3, hidden)[torch.randperm(hidden)] if seed else 1.0
        own = common @ rotation(hidden, seed) * stretch + noise * draw(n_words, hidden, seed=seed)
        spaces.append(normalize_space(own)[0])
    return spaces


def precision(src: Tensor, tgt: Tensor) -> float:
    found = nearest_neighbors(normalize_rows(src), normalize_rows(tgt), 1)[1][:, 0]
    return float((found == torch.arange(len(src))).double().mean())


def vecmap(x: Array, z: Array, reweight: float) -> tuple[Array, Array]:
    """Whiten, map orthogonally, re-weight and de-whiten, as Artetxe et al. (2018a) describe."""

    def whitening(matrix: Array) -> Array:
        _, s, vt = np.linalg.svd(matrix, full_matrices=False)
        return vt.T @ np.diag(1 / s) @ vt

    wx1, wz1 = whitening(x), whitening(z)
    wx2, s, wz2t = np.linalg.svd((x @ wx1).T @ (z @ wz1))
    wz2 = wz2t.T
    xw, zw = x @ wx1 @ wx2 * s**reweight, z @ wz1 @ wz2 * s**reweight
    xw = xw @ wx2.T @ np.linalg.inv(wx1) @ wx2
    zw = zw @ wz2.T @ np.linalg.inv(wz1) @ wz2
    return xw, zw


# Normalization.


def test_normalization_by_hand() -> None:
    rows, mean = normalize_space(torch.tensor([[0.0, 2.0], [3.0, 0.0], [0.0, 0.0]]))
    assert mean.tolist() == [0.5, 0.5]  # of [0, 1] and [1, 0]: zeros do not count
    root = 0.5**0.5
    torch.testing.assert_close(rows, torch.tensor([[-root, root], [root, -root], [0.0, 0.0]]))


@given(st.integers(2, 40), st.integers(1, 8), seeds)
def test_normalization_agrees_with_numpy(n_words: int, hidden: int, seed: int) -> None:
    matrix = draw(n_words, hidden, seed=seed) + 1
    rows, mean = normalize_space(matrix)
    unit = matrix.numpy() / np.linalg.norm(matrix.numpy(), axis=1, keepdims=True)
    np.testing.assert_allclose(mean.numpy(), unit.mean(axis=0), atol=1e-12)
    centered = unit - unit.mean(axis=0)
    lengths = np.linalg.norm(centered, axis=1, keepdims=True)
    np.testing.assert_allclose(rows.numpy() * lengths, centered, atol=1e-9)


def test_normalization_does_not_change_its_input() -> None:
    matrix = draw(5, 3)
    before = matrix.clone()
    normalize_space(matrix)
    assert torch.equal(matrix, before)


def test_other_normalization_steps() -> None:
    matrix = draw(5, 3)
    assert torch.equal(normalize_space(matrix, ())[0], matrix)
    centered, mean = normalize_space(matrix, ("center",))
    torch.testing.assert_close(centered + mean, matrix)


# Orthogonal maps.


def test_rotations_agree_with_scipy() -> None:
    src, tgt = draw(60, 7, seed=1), draw(60, 7, seed=2)
    expected, _ = scipy.linalg.orthogonal_procrustes(src.numpy(), tgt.numpy())
    for found in (
        solve_procrustes(collect_moments(src, tgt, same(60)).cross),
        solve_rotation(src, tgt, same(60)),
    ):
        np.testing.assert_allclose(found.numpy(), expected, atol=1e-10)


@given(st.integers(1, 10), st.integers(1, 40), seeds)
def test_rotations_are_orthogonal(hidden: int, n_pairs: int, seed: int) -> None:
    src, tgt = draw(50, hidden, seed=seed), draw(50, hidden, seed=seed + 1)
    generator = torch.Generator().manual_seed(seed)
    pairs = IndexPairs(*torch.randint(50, (2, n_pairs), generator=generator))
    for W in (
        solve_rotation(src, tgt, pairs),
        solve_procrustes(collect_moments(src, tgt, pairs).cross),
    ):
        torch.testing.assert_close(W.mT @ W, torch.eye(hidden, dtype=torch.float64))


def test_moments_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    src, tgt = draw(40, 5).float(), draw(30, 5, seed=1).float()
    pairs = IndexPairs(torch.arange(25) % 40, torch.arange(25) % 30)
    monkeypatch.setattr(procrustes, "BLOCK", 4)
    moments = collect_moments(src, tgt, pairs)
    x, z = src[pairs.src].double(), tgt[pairs.tgt].double()
    for found, expected in ((moments.src, x.mT @ x), (moments.tgt, z.mT @ z)):
        torch.testing.assert_close(found, expected / 25)
    torch.testing.assert_close(moments.cross, x.mT @ z / 25)


# One space for all.


@pytest.mark.parametrize("reweight", [0.0, 0.5, 1.0])
def test_two_languages_have_the_similarities_of_vecmap(reweight: float) -> None:
    x, z = make_languages(300, 8, 2, 0.5)
    pairs = IndexPairs(torch.arange(200), torch.arange(200))
    maps = solve_joint_maps([collect_moments(x, z, pairs)], reweight)
    found_x, found_z = x @ maps.others[0], z @ maps.pivot
    # VecMap decomposes the rows of the dictionary; its maps apply to all words.
    a, b = x.numpy(), z.numpy()
    wx, wz = vecmap_maps(a[:200], b[:200], reweight)
    for ours, theirs in (
        (found_x @ found_z.T, a @ wx @ (b @ wz).T),
        (found_x @ found_x.T, a @ wx @ (a @ wx).T),
        (found_z @ found_z.T, b @ wz @ (b @ wz).T),
    ):
        np.testing.assert_allclose(ours.numpy(), theirs, atol=1e-8)


def vecmap_maps(x: Array, z: Array, reweight: float) -> tuple[Array, Array]:
    """The matrices by which VecMap's steps multiply."""
    mapped_x, mapped_z = vecmap(x, z, reweight)
    return np.linalg.lstsq(x, mapped_x, rcond=None)[0], np.linalg.lstsq(z, mapped_z, rcond=None)[0]


def test_many_languages_share_one_space() -> None:
    """Pairs without the pivot match as well as those with it, though no dictionary has them."""
    pivot, *others = make_languages(600, 12, 4, 0.3)
    pairs = IndexPairs(torch.arange(300), torch.arange(300))
    maps = solve_joint_maps([collect_moments(space, pivot, pairs) for space in others])
    spaces = [pivot @ maps.pivot, *(x @ W for x, W in zip(others, maps.others, strict=True))]
    held_out = [space[300:] for space in spaces]
    scores = {
        (i, j): precision(held_out[i], held_out[j])
        for i in range(len(spaces))
        for j in range(len(spaces))
        if i != j
    }
    assert min(scores.values()) > 0.9, scores
    assert precision(pivot[300:], others[0][300:]) < 0.1


def test_pairwise_maps_would_not_share_one_space() -> None:
    """What the joint solution is for: the pivot's basis differs between two runs of pairs."""
    pivot, first, second = make_languages(600, 12, 3, 0.3)
    pairs = IndexPairs(torch.arange(300), torch.arange(300))

    def run(space: Tensor) -> tuple[Array, Array]:
        wx, wz = vecmap_maps(space[:300].numpy(), pivot[:300].numpy(), 0.5)
        return space.numpy() @ wx, pivot.numpy() @ wz

    mapped_first, pivot_first = run(first)
    mapped_second, pivot_second = run(second)
    assert np.abs(pivot_first - pivot_second).max() > 0.1
    assert precision(torch.tensor(mapped_first[300:]), torch.tensor(mapped_second[300:])) < 0.5
    maps = solve_joint_maps([collect_moments(space, pivot, pairs) for space in (first, second)])
    assert precision((first @ maps.others[0])[300:], (second @ maps.others[1])[300:]) > 0.9


@given(st.integers(1, 8), st.floats(0.0, 1.0), seeds)
def test_the_space_does_not_depend_on_a_languages_own_basis(
    hidden: int, reweight: float, seed: int
) -> None:
    """Rotating a language does not change the mapped positions of its words."""
    x, y, z = (draw(40, hidden, seed=seed + number) for number in range(3))
    turn = rotation(hidden, seed + 3)

    def places(x: Tensor, z: Tensor) -> list[Tensor]:
        maps = solve_joint_maps([collect_moments(side, z, same(30)) for side in (x, y)], reweight)
        return [x @ maps.others[0], y @ maps.others[1], z @ maps.pivot]

    before, turned, around = places(x, z), places(x @ turn, z), places(x, z @ turn)
    for one, other in zip(before, turned, strict=True):
        torch.testing.assert_close(other, one, atol=1e-7, rtol=1e-7)
    for one, other in zip(before, around, strict=True):  # the pivot takes all others with it
        torch.testing.assert_close(other, one @ turn, atol=1e-7, rtol=1e-7)


@given(st.integers(1, 8), st.integers(1, 3), seeds)
def test_without_reweighting_languages_are_rotated_to_a_fixed_pivot(
    hidden: int, n_languages: int, seed: int
) -> None:
    pivot = draw(40, hidden, seed=seed)
    others = [draw(40, hidden, seed=seed + number) for number in range(1, n_languages + 1)]
    maps = solve_joint_maps([collect_moments(x, pivot, same(40)) for x in others], reweight=0.0)
    identity = torch.eye(hidden, dtype=torch.float64)
    torch.testing.assert_close(maps.pivot, identity, atol=1e-7, rtol=0)
    for W in maps.others:
        torch.testing.assert_close(W.mT @ W, identity, atol=1e-7, rtol=0)


@given(st.integers(2, 8), st.integers(1, 4), seeds)
def test_the_order_of_languages_does_not_matter(hidden: int, n_languages: int, seed: int) -> None:
    pivot = draw(40, hidden, seed=seed)
    moments = [
        collect_moments(draw(40, hidden, seed=seed + number), pivot, same(40))
        for number in range(1, n_languages + 1)
    ]
    there, back = solve_joint_maps(moments), solve_joint_maps(moments[::-1])
    torch.testing.assert_close(there.pivot, back.pivot, atol=1e-9, rtol=0)
    for one, other in zip(there.others, back.others[::-1], strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=0)


def test_a_repeated_language_changes_nothing() -> None:
    """Of two equal languages, the mean agreement is that of one."""
    x, z = make_languages(300, 8, 2, 0.5)
    moments = collect_moments(x, z, same(300))
    one, two = solve_joint_maps([moments]), solve_joint_maps([moments, moments])
    torch.testing.assert_close(two.pivot, one.pivot)
    for W in two.others:
        torch.testing.assert_close(W, one.others[0])


def test_the_space_of_the_pivot_keeps_its_distances() -> None:
    pivot, *others = make_languages(400, 10, 3, 0.3)
    for space in others:
        W = solve_procrustes(collect_moments(space, pivot, same(400)).cross)
        torch.testing.assert_close(torch.cdist(space @ W, space @ W), torch.cdist(space, space))
        assert precision(space @ W, pivot) > 0.9


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_rotation_of_words_is_found(noise: float) -> None:
    z = normalize_space(draw(500, 20))[0]
    turn = rotation(20, seed=3)
    x = normalize_space(z @ turn.T + noise * draw(500, 20, seed=4))[0]
    moments = collect_moments(x, z, IndexPairs(torch.arange(200), torch.arange(200)))
    W = solve_procrustes(moments.cross)
    # Normalization moves the mean a little, and noise turns the best map a little.
    assert float((W - turn).abs().max()) < (1e-2 if noise == 0 else 0.2)
    maps = solve_joint_maps([moments])
    assert precision(x[200:] @ W, z[200:]) > 0.98
    assert precision(x[200:] @ maps.others[0], z[200:] @ maps.pivot) > 0.98


def test_too_few_pairs_for_whitening() -> None:
    moments = PairMoments(torch.eye(5), torch.eye(5), torch.eye(5), 4)
    with pytest.raises(InputError, match=r"needs 5 or more different words, .* has 4"):
        solve_joint_maps([moments])


@pytest.mark.parametrize("side", ["src", "tgt"])
def test_repeated_words_do_not_count_for_whitening(side: str) -> None:
    """A hundred entries of four words determine only four directions."""
    x, z = draw(60, 5), draw(60, 5, seed=1)
    few, many = torch.arange(100) % 4, torch.arange(100) % 60
    pairs = IndexPairs(few, many) if side == "src" else IndexPairs(many, few)
    with pytest.raises(InputError, match=r"needs 5 or more different words, .* has 4"):
        solve_joint_maps([collect_moments(x, z, pairs)])


@given(st.integers(1, 5), st.integers(2, 8), seeds)
def test_directions_without_pairs_are_not_amplified(rank: int, hidden: int, seed: int) -> None:
    """The pairs span a few directions, other words all of them."""
    rank = min(rank, hidden - 1)
    x, z = draw(60, hidden, seed=seed), draw(60, hidden, seed=seed + 1)
    x[:40] @= _project(hidden, rank, seed + 2)
    z[:40] @= _project(hidden, rank, seed + 3)
    maps = solve_joint_maps([collect_moments(x, z, same(40))])
    for rows, W in ((x, maps.others[0]), (z, maps.pivot)):
        assert float((rows @ W).norm(dim=1).max()) < 30 * float(rows.norm(dim=1).max())


def _project(hidden: int, rank: int, seed: int) -> Tensor:
    frame = rotation(hidden, seed)[:, :rank]
    return frame @ frame.mT


def test_a_direction_without_variance_stays_finite() -> None:
    x, z = draw(50, 4), draw(50, 4, seed=1)
    x[:, 3] = 0
    maps = solve_joint_maps([collect_moments(x, z, same(50))])
    for W in (maps.pivot, *maps.others):
        assert bool(W.isfinite().all())
        assert float((x @ W).abs().max()) < 100


# Applying maps.


def test_single_precision_is_used_only_if_exact_enough() -> None:
    """A map that subtracts large numbers would lose everything in single precision."""
    # Both columns vary, so that a fused multiplication and addition is inexact, too.
    rows = 1 + torch.arange(10)[:, None] * torch.tensor([1e-5, 2e-5])
    W = torch.tensor([[1e5, 0.0], [-1e5, 1.0]], dtype=torch.float64)
    exact = rows.double() @ W
    assert float((rows @ W.float() - exact).abs().max()) > 1e-3  # what it would have been
    # Lengths are about 1.4, so that an error of 1e-4 of them is seen.
    torch.testing.assert_close(apply_map(rows, W).double(), exact, atol=1e-6, rtol=1e-6)


@given(st.integers(1, 30), st.integers(1, 6), st.integers(0, 9), st.floats(-3, 6), seeds)
def test_maps_are_applied_as_in_double_precision(
    n_words: int, hidden: int, n_zero: int, power: float, seed: int
) -> None:
    """Also maps of directions so unequal that single precision would lose the weak ones."""
    strengths = 10.0 ** torch.linspace(-abs(power), power, hidden, dtype=torch.float64)
    W = rotation(hidden, seed) * strengths @ rotation(hidden, seed + 1)
    rows = draw(n_words, hidden, seed=seed + 2).float()
    rows[:n_zero] = 0
    exact = rows.double() @ W
    wrong = (apply_map(rows, W).double() - exact).norm(dim=1)
    # All rows are checked here; the result is rounded to single precision.
    assert bool((wrong <= (procrustes.PRECISION_TOLERANCE + 1e-6) * exact.norm(dim=1)).all())


def test_maps_are_applied_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, W = draw(50, 6).float(), draw(6, 6, seed=1)
    whole = apply_map(rows, W)
    monkeypatch.setattr(procrustes, "BLOCK", 7)
    torch.testing.assert_close(apply_map(rows, W), whole)
    torch.testing.assert_close(whole, rows @ W.float())


def test_infinite_results_are_an_error() -> None:
    with pytest.raises(InputError, match="not finite"):
        apply_map(torch.full((3, 2), torch.inf), torch.eye(2))
