"""Bounds that hold for every word, and candidates that miss none above their ceiling."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from calque.algorithms.nearest import GROUP, bound_csls, dot_products, look_at

seeds = st.integers(0, 1000)


def draw(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def hubness(scores: Tensor, k: int) -> Tensor:
    """Each column's mean of its k highest."""
    return torch.from_numpy(np.sort(scores.numpy(), axis=0)[-k:].mean(axis=0))


@given(st.integers(1, 25), st.integers(1, 90), st.integers(1, 25), st.integers(1, 9), seeds)
def test_nothing_exceeds_its_bound(
    n_queries: int, n_keys: int, k: int, width: int, seed: int
) -> None:
    """Of rows of any length, and with floors that come from other queries of the language."""
    queries, keys = draw(n_queries, width, seed=seed), draw(n_keys, width, seed=seed + 1)
    k = min(k, n_queries)
    bounds = bound_csls(queries, keys, k)
    scores = queries @ keys.mT
    r = hubness(scores, k)
    assert bool((bounds.floors - bounds.slack <= r).all())
    groups = torch.arange(n_keys) % bounds.scores.shape[1]
    assert bool((bounds.scores[:, groups] + 3 * bounds.slack >= 2 * scores - r).all())
    assert bounds.similarities is not None
    assert bool((bounds.similarities[:, groups] + bounds.slack >= scores).all())
    more = draw(3, width, seed=seed + 2)
    lent = bound_csls(more, keys, k, floors=bounds.floors, similarities=False)
    assert lent.similarities is None
    r = hubness(torch.cat([queries, more]) @ keys.mT, k)
    assert bool((lent.scores[:, groups] + 3 * bounds.slack >= 2 * more @ keys.mT - r).all())


@given(st.integers(1, 12), st.integers(1, 90), st.integers(1, 15), seeds)
def test_candidates_are_exact_and_others_below_the_ceiling(
    n_queries: int, n_keys: int, n_groups: int, seed: int
) -> None:
    queries, keys = draw(n_queries, 4, seed=seed), draw(n_keys, 4, seed=seed + 1)
    bounds = bound_csls(queries, keys, 1)
    assert bounds.similarities is not None
    seen = look_at(queries, keys, bounds.similarities, n_groups)
    scores = queries @ keys.mT
    for row, (members, products) in enumerate(zip(seen.keys, seen.similarities, strict=True)):
        exists = members < n_keys
        assert len(set(members.tolist())) == len(members)
        assert bool((products[~exists] == -torch.inf).all())
        torch.testing.assert_close(products[exists], scores[row, members[exists]])
        unseen = sorted({*range(n_keys)} - {*members.tolist()})
        assert len(unseen) <= max(0, -(-n_keys // GROUP) - n_groups) * GROUP
        assert bool((scores[row, unseen] <= seen.ceiling[row] + bounds.slack).all())
        if not unseen:
            assert seen.ceiling[row] == -torch.inf


@given(st.integers(0, 9), st.integers(1, 20), st.integers(1, 5), seeds)
def test_products_of_each_query_with_its_own_keys(
    n_queries: int, n_keys: int, n_each: int, seed: int
) -> None:
    queries, keys = draw(n_queries, 3, seed=seed), draw(n_keys, 3, seed=seed + 1)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(n_keys, (n_queries, n_each), generator=generator)
    expected = np.einsum("qh,qkh->qk", queries.numpy(), keys.numpy()[rows.numpy()])
    np.testing.assert_allclose(dot_products(queries, keys, rows).numpy(), expected, atol=1e-12)
