"""Maps against SciPy, and against VecMap's steps written out with NumPy's decompositions."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import scipy.linalg
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from calque.algorithms import procrustes as mapping
from calque.algorithms.nearest import nearest_neighbors, normalize_rows
from calque.algorithms.procrustes import (
    IndexPairs,
    PairMoments,
    apply_map,
    collect_moments,
    normalize_space,
    solve_joint_maps,
    solve_orthogonal,
    solve_rotation,
)
from calque.errors import InputError

seeds = st.integers(0, 1000)
Array = npt.NDArray[np.float64]


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def rotation(hidden: int, seed: int = 0) -> Tensor:
    q, _ = torch.linalg.qr(draw(hidden, hidden, seed=seed))
    return q


def same(n_words: int) -> IndexPairs:
    return IndexPairs(torch.arange(n_words), torch.arange(n_words))


def make_languages(n_words: int, hidden: int, n_languages: int, noise: float) -> list[Tensor]:
    """Spaces that are turned and stretched versions of one, with noise; words in the same order."""
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
def test_normalized_rows_are_unit_and_its_steps_are_numpys(
    n_words: int, hidden: int, seed: int
) -> None:
    matrix = draw(n_words, hidden, seed=seed) + 1
    rows, mean = normalize_space(matrix)
    unit = matrix.numpy() / np.linalg.norm(matrix.numpy(), axis=1, keepdims=True)
    np.testing.assert_allclose(mean.numpy(), unit.mean(axis=0), atol=1e-12)
    centered = unit - unit.mean(axis=0)
    lengths = np.linalg.norm(centered, axis=1, keepdims=True)
    np.testing.assert_allclose(rows.numpy() * lengths, centered, atol=1e-9)


def test_normalization_leaves_its_input_alone() -> None:
    matrix = draw(5, 3)
    before = matrix.clone()
    normalize_space(matrix)
    assert torch.equal(matrix, before)


def test_other_steps() -> None:
    matrix = draw(5, 3)
    assert torch.equal(normalize_space(matrix, ())[0], matrix)
    centered, mean = normalize_space(matrix, ("center",))
    torch.testing.assert_close(centered + mean, matrix)


# Orthogonal maps.


def test_turns_are_scipys() -> None:
    src, tgt = draw(60, 7, seed=1), draw(60, 7, seed=2)
    expected, _ = scipy.linalg.orthogonal_procrustes(src.numpy(), tgt.numpy())
    for found in (
        solve_orthogonal(collect_moments(src, tgt, same(60))),
        solve_rotation(src, tgt, same(60)),
    ):
        np.testing.assert_allclose(found.numpy(), expected, atol=1e-10)


@given(st.integers(1, 10), st.integers(1, 40), seeds)
def test_turns_are_orthogonal(hidden: int, n_pairs: int, seed: int) -> None:
    src, tgt = draw(50, hidden, seed=seed), draw(50, hidden, seed=seed + 1)
    generator = torch.Generator().manual_seed(seed)
    pairs = IndexPairs(*torch.randint(50, (2, n_pairs), generator=generator))
    for W in (solve_rotation(src, tgt, pairs), solve_orthogonal(collect_moments(src, tgt, pairs))):
        torch.testing.assert_close(W.mT @ W, torch.eye(hidden, dtype=torch.float64))


def test_moments_in_blocks_are_those_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    src, tgt = draw(40, 5).float(), draw(30, 5, seed=1).float()
    pairs = IndexPairs(torch.arange(25) % 40, torch.arange(25) % 30)
    monkeypatch.setattr(mapping, "BLOCK", 4)
    moments = collect_moments(src, tgt, pairs)
    x, z = src[pairs.src].double(), tgt[pairs.tgt].double()
    for found, expected in ((moments.src, x.mT @ x), (moments.tgt, z.mT @ z)):
        torch.testing.assert_close(found, expected / 25)
    torch.testing.assert_close(moments.cross, x.mT @ z / 25)


# One space for all.


@pytest.mark.parametrize("reweight", [0.0, 0.5, 1.0])
def test_two_languages_are_as_near_as_vecmap_makes_them(reweight: float) -> None:
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
    assert precision(torch.tensor(mapped_first[300:]), torch.tensor(mapped_second[300:])) < 0.1
    maps = solve_joint_maps([collect_moments(space, pivot, pairs) for space in (first, second)])
    assert precision((first @ maps.others[0])[300:], (second @ maps.others[1])[300:]) > 0.9


@given(st.integers(1, 8), st.floats(0.0, 1.0), seeds)
def test_the_space_does_not_depend_on_a_languages_own_basis(
    hidden: int, reweight: float, seed: int
) -> None:
    """Whatever way a language is turned, its words come to lie in the same places."""
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
def test_without_weights_all_languages_are_turned_to_a_pivot_that_stays(
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


def test_an_equal_language_changes_nothing() -> None:
    """Of two equal languages, the mean agreement is that of one."""
    x, z = make_languages(300, 8, 2, 0.5)
    moments = collect_moments(x, z, same(300))
    one, two = solve_joint_maps([moments]), solve_joint_maps([moments, moments])
    torch.testing.assert_close(two.pivot, one.pivot)
    for W in two.others:
        torch.testing.assert_close(W, one.others[0])


def test_the_pivots_space_keeps_all_distances() -> None:
    pivot, *others = make_languages(400, 10, 3, 0.3)
    for space in others:
        W = solve_orthogonal(collect_moments(space, pivot, same(400)))
        torch.testing.assert_close(torch.cdist(space @ W, space @ W), torch.cdist(space, space))
        assert precision(space @ W, pivot) > 0.9


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_rotation_is_found(noise: float) -> None:
    z = normalize_space(draw(500, 20))[0]
    turn = rotation(20, seed=3)
    x = normalize_space(z @ turn.T + noise * draw(500, 20, seed=4))[0]
    moments = collect_moments(x, z, IndexPairs(torch.arange(200), torch.arange(200)))
    W = solve_orthogonal(moments)
    # Normalization moves the mean a little, and noise turns the best map a little.
    assert float((W - turn).abs().max()) < (1e-2 if noise == 0 else 0.2)
    maps = solve_joint_maps([moments])
    assert precision(x[200:] @ W, z[200:]) > 0.98
    assert precision(x[200:] @ maps.others[0], z[200:] @ maps.pivot) > 0.98


def test_too_few_pairs_for_whitening() -> None:
    moments = PairMoments(torch.eye(5), torch.eye(5), torch.eye(5), 4)
    with pytest.raises(InputError, match=r"pairs of 4 words cannot whiten 5 dim.* .give 5 "):
        solve_joint_maps([moments])


@pytest.mark.parametrize("side", ["src", "tgt"])
def test_repeated_words_do_not_make_few_pairs_many(side: str) -> None:
    """A hundred entries of four words know four directions, however often each comes."""
    x, z = draw(60, 5), draw(60, 5, seed=1)
    few, many = torch.arange(100) % 4, torch.arange(100) % 60
    pairs = IndexPairs(few, many) if side == "src" else IndexPairs(many, few)
    with pytest.raises(InputError, match="pairs of 4 words cannot whiten 5 dimensions"):
        solve_joint_maps([collect_moments(x, z, pairs)])


@given(st.integers(1, 5), st.integers(2, 8), seeds)
def test_directions_that_no_pair_has_are_not_blown_up(rank: int, hidden: int, seed: int) -> None:
    """The pairs lie in a few directions, other words in all; nothing is known of the rest."""
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


def test_single_precision_is_checked() -> None:
    """Where a map takes the difference of large numbers, single precision would be noise."""
    rows = torch.ones(10, 2)
    rows[:, 1] += torch.arange(10) * 1e-5
    W = torch.tensor([[1e5, 0.0], [-1e5, 1.0]], dtype=torch.float64)
    exact = rows.double() @ W
    assert float((rows @ W.float() - exact).abs().max()) > 1e-3  # what it would have been
    # Lengths are about 1.4, so that an error of 1e-4 of them is seen.
    torch.testing.assert_close(apply_map(rows, W).double(), exact, atol=1e-6, rtol=1e-6)


@given(st.integers(1, 30), st.integers(1, 6), st.integers(0, 9), st.floats(-3, 6), seeds)
def test_maps_apply_as_in_double_precision(
    n_words: int, hidden: int, n_zero: int, power: float, seed: int
) -> None:
    """Also maps of directions so unequal that single precision would lose the weak ones."""
    strengths = 10.0 ** torch.linspace(-abs(power), power, hidden, dtype=torch.float64)
    W = rotation(hidden, seed) * strengths @ rotation(hidden, seed + 1)
    rows = draw(n_words, hidden, seed=seed + 2).float()
    rows[:n_zero] = 0
    exact = rows.double() @ W
    wrong = (apply_map(rows, W).double() - exact).norm(dim=1)
    # A thousand rows are looked at, so here all of them; the result is rounded to single.
    assert bool((wrong <= (mapping.TOLERANCE + 1e-6) * exact.norm(dim=1)).all())


def test_maps_apply_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, W = draw(50, 6).float(), draw(6, 6, seed=1)
    whole = apply_map(rows, W)
    monkeypatch.setattr(mapping, "BLOCK", 7)
    torch.testing.assert_close(apply_map(rows, W), whole)
    torch.testing.assert_close(whole, rows @ W.float())


def test_infinite_results_are_refused() -> None:
    with pytest.raises(InputError, match="no finite result"):
        apply_map(torch.full((3, 2), torch.inf), torch.eye(2))
