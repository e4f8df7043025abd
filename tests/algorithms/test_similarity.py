"""Nearest words against dense formulas, torch and numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from calque.algorithms import nearest as csls_bounds
from calque.algorithms import nearest as precision
from calque.algorithms import nearest as similarity
from calque.algorithms.nearest import (
    bound_csls,
    compute_hubness,
    csls_nearest_neighbors,
    csls_scores,
    inverted_softmax_nearest,
    merge_topk,
    nearest_neighbors,
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


# The highest scores, found through groups.


@given(st.integers(1, 30), st.integers(1, 400), st.integers(1, 20), seeds)
def test_best_are_topks(n_rows: int, n_columns: int, k: int, seed: int) -> None:
    scores, k = draw(n_rows, n_columns, seed=seed), min(k, n_columns)
    values, places = topk_in_rows(scores, k)
    torch.testing.assert_close(values, scores.topk(k).values, rtol=0, atol=0)
    torch.testing.assert_close(scores.gather(1, places), values, rtol=0, atol=0)
    values, places = topk_in_columns(scores.T.contiguous(), k)
    torch.testing.assert_close(values, scores.topk(k).values, rtol=0, atol=0)
    torch.testing.assert_close(scores.gather(1, places), values, rtol=0, atol=0)


def test_best_is_found_wherever_it_stands() -> None:
    """Whatever is left over by equal groups must count as well."""
    for n_columns in range(1, 200):
        scores = torch.eye(n_columns)
        assert topk_in_rows(scores, 1)[1][:, 0].tolist() == list(range(n_columns))
        assert topk_in_columns(scores, 1)[1][:, 0].tolist() == list(range(n_columns))


def test_equal_scores_are_found_once_each() -> None:
    values, places = topk_in_rows(torch.zeros(2, 300), 5)
    assert values.tolist() == [[0.0] * 5] * 2
    assert all(len(set(row)) == 5 for row in places.tolist())


def test_minus_infinity_may_be_among_the_best() -> None:
    scores = torch.full((1, 100), -torch.inf)
    scores[0, 7] = 1.0
    values, places = topk_in_rows(scores, 3)
    assert values.tolist() == [[1.0, -torch.inf, -torch.inf]]
    assert places[0, 0] == 7


@given(st.integers(1, 8), st.lists(st.integers(1, 30), min_size=1, max_size=5), seeds, st.data())
def test_parts_merged_are_the_whole(
    n_rows: int, widths: list[int], seed: int, data: st.DataObject
) -> None:
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


def test_merge_keeps_the_best_of_both() -> None:
    first = torch.tensor([[0.9, 0.1]]), torch.tensor([[4, 2]])
    second = torch.tensor([[0.5]]), torch.tensor([[7]])
    values, places = merge_topk(first, second, 2)
    assert values.tolist() == [[pytest.approx(0.9), 0.5]]
    assert places.tolist() == [[4, 7]]


# Cosines.


@given(st.integers(1, 20), st.integers(1, 9), st.floats(1e-6, 1e6), seeds)
def test_rows_of_length_one_keep_their_direction(
    n_rows: int, hidden: int, scale: float, seed: int
) -> None:
    rows = draw(n_rows, hidden, seed=seed).double()
    found = normalize_rows(scale * rows)
    torch.testing.assert_close(found.norm(dim=1), torch.ones(n_rows).double())
    torch.testing.assert_close(found * rows.norm(dim=1, keepdim=True), rows)


def test_zero_rows_stay_zero() -> None:
    rows = normalize_rows(torch.tensor([[0.0, 0.0], [3.0, 4.0]]))
    torch.testing.assert_close(rows, torch.tensor([[0.0, 0.0], [0.6, 0.8]]))


@given(st.integers(1, 40), st.integers(1, 90), st.integers(1, 12), st.integers(1, 50), seeds)
def test_blocks_are_as_good_as_all_at_once(
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
def test_k_must_fit(k: int) -> None:
    with pytest.raises(InputError, match=f"k={k}, of 5 words .choose k from 1 to 5"):
        nearest_neighbors(unit(3), unit(5), k)


# CSLS.


def test_csls_by_hand() -> None:
    """The hub, nearest to both queries, loses one of them to a word that only it is near to."""
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
def test_bounds_miss_nothing(
    n_queries: int, n_keys: int, k: int, order_only: bool, seed: int
) -> None:
    queries, keys = unit(n_queries, seed=seed), unit(n_keys, seed=seed + 1)
    expected = csls_scores(queries @ keys.T, 5)
    if order_only:
        expected = expected + compute_hubness(queries, keys, 5)[:, None]
    scores, places = csls_nearest_neighbors(queries, keys, 5, k, order_only=order_only)
    torch.testing.assert_close(scores, expected.topk(k).values, atol=2e-6, rtol=0)
    torch.testing.assert_close(expected.gather(1, places), scores, atol=2e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bounds_hold_in_low_precision(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    for module in (precision, csls_bounds):
        monkeypatch.setattr(module, "fast_dtype", lambda tensor: dtype)
    centers, noise = unit(12, 20), draw(2000, 20, seed=1)
    keys = normalize_rows(centers.repeat_interleave(2000 // 12 + 1, 0)[:2000] + 0.02 * noise)
    queries = normalize_rows(keys[::20] + 0.01 * draw(100, 20, seed=2))
    exact = queries @ keys.T
    hubness = compute_hubness(keys, queries, 10)
    bounds = bound_csls(queries, keys, 10)
    n_groups = bounds.scores.shape[1]
    groups = torch.arange(len(keys)) % n_groups
    ceilings = bounds.scores[:, groups] + 3 * bounds.slack
    assert bool((bounds.floors - bounds.slack <= hubness).all())
    assert bool((ceilings >= 2 * exact - hubness).all())
    assert bounds.similarities is not None
    assert bool((bounds.similarities[:, groups] + bounds.slack >= exact).all())
    scores, places = csls_nearest_neighbors(queries, keys, 10, 3)
    expected = csls_scores(exact, 10)
    torch.testing.assert_close(scores, expected.topk(3).values, atol=2e-6, rtol=0)
    torch.testing.assert_close(expected.gather(1, places), scores, atol=2e-6, rtol=0)


def test_many_queries_take_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(similarity, "CSLS_BLOCK", 16)
    queries, keys = unit(70), unit(200, seed=1)
    expected = csls_scores(queries @ keys.T, 10).topk(2)
    scores, places = csls_nearest_neighbors(queries, keys, 10, 2)
    torch.testing.assert_close(scores, expected.values)
    assert places.tolist() == expected.indices.tolist()


def test_the_neighborhood_may_be_larger_than_the_queries() -> None:
    sources, keys = unit(80), unit(150, seed=1)
    all_scores = csls_scores(sources @ keys.T, 10)
    scores, places = csls_nearest_neighbors(sources[20:25], keys, 10, 4, sources=sources, block=32)
    torch.testing.assert_close(scores, all_scores[20:25].topk(4).values)
    assert places.tolist() == all_scores[20:25].topk(4).indices.tolist()


# Inverted softmax.


@given(st.integers(1, 20), st.integers(1, 40), st.integers(1, 9), seeds)
def test_inverted_softmax_is_the_dense_formula(
    n_queries: int, n_keys: int, block: int, seed: int
) -> None:
    queries, keys = unit(n_queries, seed=seed), unit(n_keys, seed=seed + 1)
    expected = (queries @ keys.T / 0.1).log_softmax(dim=0)
    k = min(3, n_keys)
    scores, places = inverted_softmax_nearest(queries, keys, k, temperature=0.1, block=block)
    torch.testing.assert_close(scores, expected.topk(k).values, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(expected.gather(1, places), scores, atol=1e-5, rtol=1e-5)


def test_inverted_softmax_over_more_sources() -> None:
    sources, keys = unit(30), unit(20, seed=1)
    expected = (sources @ keys.T * 30).log_softmax(dim=0)[:4].topk(2)
    scores, places = inverted_softmax_nearest(sources[:4], keys, 2, sources=sources)
    torch.testing.assert_close(scores, expected.values, atol=1e-5, rtol=1e-5)
    assert places.tolist() == expected.indices.tolist()


# Low precision where it is fast.


def test_low_precision_only_where_the_hardware_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_cpu_has_it", lambda: True)
    assert precision.fast_dtype(torch.ones(1)) == torch.bfloat16
    assert precision.fast_dtype(torch.ones(1, dtype=torch.float64)) == torch.float64
    assert precision.fast_dtype(torch.ones(1, device="meta")) == torch.float32
    monkeypatch.setattr(precision, "_cpu_has_it", lambda: False)
    assert precision.fast_dtype(torch.ones(1)) == torch.float32
