"""Nearest neighbors against dense formulas, torch.topk and values computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from calque.algorithms import nearest
from calque.algorithms.nearest import (
    UnitRows,
    compute_hubness,
    csls_nearest_neighbors,
    csls_scores,
    find_neighbors,
    log_sum_exp_both_ways,
    merge_topk,
    nearest_neighbors,
    nearest_neighbors_both_ways,
    normalize_rows,
    topk_in_columns,
    topk_in_rows,
)
from calque.errors import InputError

seeds = st.integers(0, 1000)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def unit(n_words: int, hidden: int = 6, seed: int = 0) -> Tensor:
    return normalize_rows(draw(n_words, hidden, seed=seed))


def dense_csls(src: Tensor, tgt: Tensor, k: int) -> Tensor:
    """The formula, word by word."""
    scores = torch.empty(len(src), len(tgt), dtype=torch.float64)
    similar = src.double() @ tgt.double().T
    for i in range(len(src)):
        for j in range(len(tgt)):
            r_src = sum(sorted(similar[i].tolist())[-k:]) / k
            r_tgt = sum(sorted(similar[:, j].tolist())[-k:]) / k
            scores[i, j] = 2 * similar[i, j] - r_src - r_tgt
    return scores


# Top-k through groups.


@given(st.integers(1, 30), st.integers(1, 400), st.integers(1, 20), seeds)
def test_same_values_as_torch_topk(n_rows: int, n_columns: int, k: int, seed: int) -> None:
    scores, k = draw(n_rows, n_columns, seed=seed), min(k, n_columns)
    values, places = topk_in_rows(scores, k)
    torch.testing.assert_close(values, scores.topk(k).values, rtol=0, atol=0)
    torch.testing.assert_close(scores.gather(1, places), values, rtol=0, atol=0)
    values, places = topk_in_columns(scores.T.contiguous(), k)
    torch.testing.assert_close(values, scores.topk(k).values, rtol=0, atol=0)
    torch.testing.assert_close(scores.gather(1, places), values, rtol=0, atol=0)


def test_the_maximum_is_found_in_every_column() -> None:
    """Including the columns that belong to no group."""
    for n_columns in range(1, 200):
        scores = torch.eye(n_columns)
        assert topk_in_rows(scores, 1)[1][:, 0].tolist() == list(range(n_columns))
        assert topk_in_columns(scores, 1)[1][:, 0].tolist() == list(range(n_columns))


def test_equal_scores_are_found_once_each() -> None:
    values, places = topk_in_rows(torch.zeros(2, 300), 5)
    assert values.tolist() == [[0.0] * 5] * 2
    assert all(len(set(row)) == 5 for row in places.tolist())


def test_minus_infinity_may_be_among_the_top_k() -> None:
    scores = torch.full((1, 100), -torch.inf)
    scores[0, 7] = 1.0
    values, places = topk_in_rows(scores, 3)
    assert values.tolist() == [[1.0, -torch.inf, -torch.inf]]
    assert places[0, 0] == 7


@given(st.integers(1, 8), st.lists(st.integers(1, 30), min_size=1, max_size=5), seeds, st.data())
def test_merging_blocks(n_rows: int, widths: list[int], seed: int, data: st.DataObject) -> None:
    scores = draw(n_rows, sum(widths), seed=seed)
    k = data.draw(st.integers(1, sum(widths)))
    best, start = None, 0
    for part in scores.split(widths, dim=1):
        values, places = topk_in_rows(part, min(k, part.shape[1]))
        best = merge_topk(best, (values, places + start), k)
        start += part.shape[1]
    assert best is not None
    expected = scores.topk(k)
    assert torch.equal(best[0], expected.values)
    assert torch.equal(best[1], expected.indices)


def test_merge_by_hand() -> None:
    first = torch.tensor([[0.9, 0.1]]), torch.tensor([[4, 2]])
    second = torch.tensor([[0.5]]), torch.tensor([[7]])
    values, places = merge_topk(first, second, 2)
    assert values.tolist() == [[pytest.approx(0.9), 0.5]]
    assert places.tolist() == [[4, 7]]


# Cosines.


@given(st.integers(1, 20), st.integers(1, 9), st.floats(1e-6, 1e6), seeds)
def test_unit_rows_keep_their_direction(n_rows: int, hidden: int, scale: float, seed: int) -> None:
    rows = draw(n_rows, hidden, seed=seed).double()
    found = normalize_rows(scale * rows)
    torch.testing.assert_close(found.norm(dim=1), torch.ones(n_rows).double())
    torch.testing.assert_close(found * rows.norm(dim=1, keepdim=True), rows)


def test_zero_rows_stay_zero() -> None:
    rows = normalize_rows(torch.tensor([[0.0, 0.0], [3.0, 4.0]]))
    torch.testing.assert_close(rows, torch.tensor([[0.0, 0.0], [0.6, 0.8]]))


@given(st.integers(1, 40), st.integers(1, 90), st.integers(1, 12), st.integers(1, 50), seeds)
def test_blocks_give_the_same_neighbors(
    n_queries: int, n_keys: int, k: int, block: int, seed: int
) -> None:
    queries, keys = unit(n_queries, seed=seed), unit(n_keys, seed=seed + 1)
    k = min(k, n_keys)
    expected = (queries @ keys.T).topk(k)
    scores, places = nearest_neighbors(queries, keys, k, block=block)
    torch.testing.assert_close(scores, expected.values)
    torch.testing.assert_close((queries @ keys.T).gather(1, places), expected.values)
    means = compute_hubness(queries, keys, k, block=block)
    torch.testing.assert_close(means, expected.values.mean(dim=1))


def test_no_queries() -> None:
    scores, places = nearest_neighbors(unit(0), unit(5), 2)
    assert scores.shape == places.shape == (0, 2)


@pytest.mark.parametrize("k", [0, 6])
def test_invalid_k(k: int) -> None:
    with pytest.raises(InputError, match=f"k is {k}, but there are 5 vectors .* 1 to 5"):
        nearest_neighbors(unit(3), unit(5), k)


# CSLS.


def test_csls_by_hand() -> None:
    """The hub is nearest to both queries; CSLS gives one of them to another word."""
    similar = torch.tensor([[0.9, 0.8, 0.1], [0.7, 0.2, 0.3]])
    # k = 1: r(x) = 0.9, 0.7; r(y) = 0.9, 0.8, 0.3.
    expected = torch.tensor([[0.0, -0.1, -1.0], [-0.2, -1.1, -0.4]])
    torch.testing.assert_close(csls_scores(similar, 1), expected)
    # k = 2: r(x) = 0.85, 0.5; r(y) = 0.8, 0.5, 0.2.
    expected = torch.tensor([[0.15, 0.25, -0.85], [0.1, -0.6, -0.1]])
    torch.testing.assert_close(csls_scores(similar, 2), expected)


def test_csls_nearest_by_hand() -> None:
    # Cosines 0.8 and 0.6 with the hub; 0.6 and 0.8 with a word near to the second query alone.
    queries = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    keys = torch.tensor([[0.8, 0.6], [0.6, 0.8], [-1.0, 0.0]])
    scores, places = csls_nearest_neighbors(queries, keys, k_neighbors=1, k=2)
    assert places.tolist() == [[0, 1], [1, 0]]
    # 2·0.8 − 0.8 − 0.8, 2·0.6 − 0.8 − 0.8
    torch.testing.assert_close(scores, torch.tensor([[0.0, -0.4], [0.0, -0.4]]))


@given(st.integers(3, 12), st.integers(3, 20), st.integers(1, 3), seeds)
def test_csls_is_the_dense_formula(n_src: int, n_tgt: int, k: int, seed: int) -> None:
    src, tgt = unit(n_src, seed=seed), unit(n_tgt, seed=seed + 1)
    expected = dense_csls(src, tgt, k)
    torch.testing.assert_close(csls_scores(src @ tgt.T, k).double(), expected, atol=1e-6, rtol=0)
    for sources in (None, src):
        scores, places = csls_nearest_neighbors(src, tgt, k, n_tgt, sources=sources)
        torch.testing.assert_close(expected.gather(1, places), scores.double(), atol=1e-6, rtol=0)
        assert bool((scores[:, :-1] >= scores[:, 1:]).all())


@given(st.integers(5, 60), st.integers(20, 300), st.integers(1, 8), st.booleans(), seeds)
def test_csls_neighbors_are_those_of_the_dense_scores(
    n_queries: int, n_keys: int, k: int, order_only: bool, seed: int
) -> None:
    queries, keys = unit(n_queries, seed=seed), unit(n_keys, seed=seed + 1)
    expected = csls_scores(queries @ keys.T, 5)
    if order_only:
        expected = expected + compute_hubness(queries, keys, 5)[:, None]
    scores, places = csls_nearest_neighbors(queries, keys, 5, k, order_only=order_only)
    torch.testing.assert_close(scores, expected.topk(k).values, atol=2e-6, rtol=0)
    torch.testing.assert_close(expected.gather(1, places), scores, atol=2e-6, rtol=0)


def test_csls_in_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nearest, "CSLS_BLOCK_SCORES", 70 * 17)
    queries, keys = unit(70), unit(200, seed=1)
    expected = csls_scores(queries @ keys.T, 10).topk(2)
    scores, places = csls_nearest_neighbors(queries, keys, 10, 2)
    torch.testing.assert_close(scores, expected.values)
    assert places.tolist() == expected.indices.tolist()


def test_hubness_from_more_words_than_the_queries() -> None:
    sources, keys = unit(80), unit(150, seed=1)
    all_scores = csls_scores(sources @ keys.T, 10)
    scores, places = csls_nearest_neighbors(sources[20:25], keys, 10, 4, sources=sources)
    torch.testing.assert_close(scores, all_scores[20:25].topk(4).values)
    assert places.tolist() == all_scores[20:25].topk(4).indices.tolist()


# Both directions.


def draw_sides(n_src: int, n_tgt: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    src = torch.randn(n_src, 6, generator=generator, dtype=torch.float64)
    return src, torch.randn(n_tgt, 6, generator=generator, dtype=torch.float64)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 60), st.integers(0, 9), st.data())
def test_both_ways_against_all_scores(
    n_src: int, n_tgt: int, block: int, seed: int, data: st.DataObject
) -> None:
    src, tgt = draw_sides(n_src, n_tgt, seed)
    k_src = data.draw(st.integers(1, min(3, n_tgt)) | st.integers(1, n_tgt))
    k_tgt = data.draw(st.integers(0, min(3, n_src)) | st.integers(0, n_src))
    penalties = torch.linspace(-1, 2, n_src).double(), torch.linspace(1, -1, n_tgt).double()
    n_done: list[int] = []
    forward, backward = nearest_neighbors_both_ways(
        src,
        tgt,
        k_src,
        k_tgt,
        scale=1.5,
        src_penalties=penalties[0],
        tgt_penalties=penalties[1],
        block=block,
        on_rows=n_done.append,
    )
    scores = 1.5 * src.numpy() @ tgt.numpy().T
    by_src, by_tgt = scores - penalties[1].numpy(), scores.T - penalties[0].numpy()
    for (values, places), expected, k in ((forward, by_src, k_src), (backward, by_tgt, k_tgt)):
        assert values.shape == places.shape == (len(expected), k)
        np.testing.assert_allclose(values.numpy(), -np.sort(-expected)[:, :k], atol=1e-12)
        np.testing.assert_array_equal(places.numpy(), np.argsort(-expected)[:, :k])
    assert sum(n_done) == n_src


@given(st.integers(1, 30), st.integers(1, 30), st.integers(1, 40))
def test_log_sum_exp(n_src: int, n_tgt: int, block: int) -> None:
    src, tgt = draw_sides(n_src, n_tgt, 1)
    n_done: list[int] = []
    rows, columns = log_sum_exp_both_ways(src, tgt, 30.0, block=block, on_rows=n_done.append)
    scores = 30 * src @ tgt.mT
    torch.testing.assert_close(rows, scores.logsumexp(1))
    torch.testing.assert_close(columns, scores.logsumexp(0))
    assert sum(n_done) == n_src


def test_more_neighbors_than_vectors() -> None:
    src, tgt = draw_sides(3, 4, 0)
    with pytest.raises(InputError, match=r"k is 5, .* 4 vectors \(choose k from 1 to 4\)"):
        nearest_neighbors_both_ways(src, tgt, 5)
    with pytest.raises(InputError, match="k is 4, but there are 3 vectors"):
        nearest_neighbors_both_ways(src, tgt, 1, 4)


# Low precision.


def test_low_precision_only_where_the_hardware_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nearest, "_cpu_has_bfloat16", lambda: True)
    assert nearest.fast_dtype(torch.ones(1)) == torch.bfloat16
    assert nearest.fast_dtype(torch.ones(1, dtype=torch.float64)) == torch.float64
    assert nearest.fast_dtype(torch.ones(1, device="meta")) == torch.float32
    monkeypatch.setattr(nearest, "_cpu_has_bfloat16", lambda: False)
    assert nearest.fast_dtype(torch.ones(1)) == torch.float32


# Sentences: exact search and FAISS.


def test_neighbors_of_some_rows_of_an_array_on_disk(tmp_path: object) -> None:
    src, tgt = draw(50, 8).numpy(), draw(30, 8, seed=1).numpy()
    np.save(f"{tmp_path}/src.npy", src.astype(np.float16))
    mapped = np.load(f"{tmp_path}/src.npy", mmap_mode="r")
    rows = np.arange(0, 50, 3)
    n_done: list[int] = []
    near = find_neighbors(UnitRows(mapped, rows), UnitRows(tgt), 4, on_rows=n_done.append)
    left, right = (
        torch.from_numpy(np.array(side, dtype=np.float64)) for side in (mapped[rows], tgt)
    )
    cosines = normalize_rows(left) @ normalize_rows(right).T
    assert np.array_equal(near.src_indices, cosines.topk(4, dim=1).indices.numpy())
    assert np.array_equal(near.tgt_indices, cosines.topk(4, dim=0).indices.T.numpy())
    assert sum(n_done) == len(rows) + 30


def test_exact_faiss_indexes_agree() -> None:
    pytest.importorskip("faiss")
    src, tgt = draw(300, 16).numpy(), draw(200, 16, seed=1).numpy()
    exact = find_neighbors(UnitRows(src), UnitRows(tgt), 4)
    for index in ("Flat", "IVF4,Flat"):
        found = find_neighbors(UnitRows(src), UnitRows(tgt), 4, index=index, probes=4)
        assert np.array_equal(found.src_indices, exact.src_indices)
        assert np.array_equal(found.tgt_indices, exact.tgt_indices)
        np.testing.assert_allclose(found.src_cosines, exact.src_cosines, atol=1e-5)
    with pytest.raises(InputError, match=r"more clusters than there are sentences \(200\).*IVF5"):
        find_neighbors(UnitRows(src), UnitRows(tgt), 4, index="IVF256,Flat")


def test_invalid_choices() -> None:
    pytest.importorskip("faiss")
    src, tgt = draw(6, 8).numpy(), draw(5, 8, seed=1).numpy()
    with pytest.raises(InputError, match="k is 6, but there are 6 and 5"):
        find_neighbors(UnitRows(src), UnitRows(tgt), 6)
    with pytest.raises(InputError, match="FAISS has no index 'Nonsense'"):
        find_neighbors(UnitRows(src), UnitRows(tgt), 2, index="Nonsense")
