"""Margins against their formula, pairs against a plain reading of the definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from calque.algorithms.margin import Margin, MinedPairs, Neighbors, mine_pairs
from calque.algorithms.nearest import UnitRows, find_neighbors
from calque.errors import InputError


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
def test_pairs_by_definition(margin: Margin, seed: int, n_src: int, n_tgt: int, k: int) -> None:
    src, tgt = random_sides(seed, n_src, n_tgt)
    near = find_neighbors(UnitRows(src), UnitRows(tgt), k)
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
        found = mine_pairs(near, margin, retrieval)  # type: ignore[arg-type]
        assert set(pairs_of(found)) == wanted
        assert len(found) == len(wanted)
        assert (np.diff(found.scores) <= 0).all()
        exact = [scores[pair] for pair in pairs_of(found)]
        np.testing.assert_allclose(found.scores, exact, rtol=2e-4, atol=2e-6)


def test_ratio_by_hand() -> None:
    near = Neighbors(
        np.float32([[0.9, 0.5], [0.6, 0.6]]),
        np.array([[0, 1], [1, 0]]),
        np.float32([[0.9, 0.6], [0.6, 0.5]]),
        np.array([[0, 1], [1, 0]]),
    )
    found = mine_pairs(near)
    assert pairs_of(found) == [(0, 0), (1, 1)]
    # Means: sources 0.7 and 0.6, targets 0.75 and 0.55.
    np.testing.assert_allclose(found.scores, [0.9 / 0.725, 0.6 / 0.575], rtol=1e-6)
    assert pairs_of(found.above(1.1)) == [(0, 0)]


def test_a_ratio_over_a_negative_mean_keeps_the_order() -> None:
    near = Neighbors(
        np.float32([[-0.1], [-0.3]]),
        np.array([[0], [0]]),
        np.float32([[-0.1]]),
        np.array([[0]]),
    )
    scores = mine_pairs(near, "ratio", "forward")
    assert pairs_of(scores) == [(0, 0), (1, 0)]


def test_neighbors_of_arrays_on_disk_and_of_some_rows(tmp_path: object) -> None:
    src, tgt = random_sides(3, 50, 30)
    np.save(f"{tmp_path}/src.npy", src.astype(np.float16))
    mapped = np.load(f"{tmp_path}/src.npy", mmap_mode="r")
    rows = np.arange(0, 50, 3)
    seen: list[int] = []
    near = find_neighbors(UnitRows(mapped, rows), UnitRows(tgt), 4, on_rows=seen.append)
    cosines = torch.from_numpy(cosines_of(mapped[rows].astype(np.float32), tgt))
    assert np.array_equal(near.src_places, cosines.topk(4, dim=1).indices.numpy())
    assert np.array_equal(near.tgt_places, cosines.topk(4, dim=0).indices.T.numpy())
    assert sum(seen) == len(rows) + 30


def test_faiss_agrees_where_it_is_exact() -> None:
    pytest.importorskip("faiss")
    src, tgt = random_sides(4, 300, 200, 16)
    exact = find_neighbors(UnitRows(src), UnitRows(tgt), 4)
    for index in ("Flat", "IVF4,Flat"):
        found = find_neighbors(UnitRows(src), UnitRows(tgt), 4, index=index, probes=4)
        assert np.array_equal(found.src_places, exact.src_places)
        assert np.array_equal(found.tgt_places, exact.tgt_places)
        np.testing.assert_allclose(found.src_cosines, exact.src_cosines, atol=1e-5)


def test_bad_choices() -> None:
    pytest.importorskip("faiss")
    src, tgt = random_sides(4, 6, 5)
    with pytest.raises(InputError, match="k=6, of 6 and 5"):
        find_neighbors(UnitRows(src), UnitRows(tgt), 6)
    with pytest.raises(InputError, match="no index is called 'Nonsense'"):
        find_neighbors(UnitRows(src), UnitRows(tgt), 2, index="Nonsense")
