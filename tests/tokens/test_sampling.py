"""Sampling: exact shares, epochs without repetition, blocks that are pure functions."""

from __future__ import annotations

import pickle
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calque.tokens.sampling import BlockSampler, language_probabilities


def test_probabilities_by_hand() -> None:
    # 10^6 to the power 0.3 is 63.0957, 10^3 to the power 0.3 is 7.9433.
    found = language_probabilities({"en": 1e6, "sw": 1e3, "xx": 0}, alpha=0.3)
    assert found == pytest.approx({"en": 0.88818, "sw": 0.11182}, abs=1e-5)
    assert language_probabilities({"en": 3, "sw": 1}, alpha=1) == {"en": 0.75, "sw": 0.25}
    assert language_probabilities({"en": 3, "sw": 1}, alpha=0) == {"en": 0.5, "sw": 0.5}
    assert language_probabilities({}, alpha=0.5) == {}


corpora = st.lists(st.tuples(st.integers(1, 40), st.floats(0.01, 1.0)), min_size=1, max_size=4).map(
    lambda pairs: ([size for size, _ in pairs], [share for _, share in pairs])
)


@given(corpora, st.integers(1, 50), st.integers(0, 2**63), st.integers(1, 12))
def test_epochs_repeat_nothing_and_shares_are_exact(
    sizes_and_shares: tuple[list[int], list[float]], block_size: int, seed: int, n_blocks: int
) -> None:
    sizes, shares = sizes_and_shares
    sampler = BlockSampler(sizes, shares, block_size, seed)
    blocks = [sampler.block(number) for number in range(n_blocks)]
    corpus_of = np.concatenate([corpora for corpora, _ in blocks])
    examples = np.concatenate([examples for _, examples in blocks])
    for corpus, (size, share) in enumerate(zip(sizes, shares, strict=True)):
        mine = examples[corpus_of == corpus]
        assert abs(len(mine) - share / sum(shares) * block_size * n_blocks) < 1 + 1e-6
        counts = Counter(mine.tolist())
        assert set(counts) <= set(range(size))
        # After k whole epochs and a part of one, every example was drawn k or k + 1 times.
        assert {counts[example] for example in range(size)} <= {
            len(mine) // size,
            -(-len(mine) // size),
        }


def test_blocks_do_not_depend_on_earlier_blocks() -> None:
    def sampler(seed: int = 5) -> BlockSampler:
        return BlockSampler([7, 100, 13], [0.5, 0.3, 0.2], 40, seed)

    forward, backward = sampler(), sampler()
    there = {number: forward.block(number) for number in range(9)}
    back = {number: backward.block(number) for number in reversed(range(9))}
    for number, block in there.items():
        for one, other in zip(block, back[number], strict=True):
            np.testing.assert_array_equal(one, other)
        assert not np.array_equal(block[1], sampler(seed=6).block(number)[1])


def test_epochs_have_different_orders_and_corpora_are_mixed() -> None:
    sampler = BlockSampler([50], [1.0], 25, seed=0)  # two blocks per epoch
    halves = [frozenset(sampler.block(number)[1].tolist()) for number in range(10)]
    assert len(set(halves)) == 10
    assert all(halves[k] | halves[k + 1] == set(range(50)) for k in range(0, 10, 2))
    corpora, _ = BlockSampler([500, 500], [1.0, 1.0], 1000, seed=0).block(0)
    # 250 of either half are expected from each corpus, with a deviation of 8.
    assert abs(int(corpora[:500].sum()) - 250) < 48


def test_distant_blocks_are_computed_directly() -> None:
    corpora, examples = BlockSampler([10, 1000], [0.9, 0.1], 100, seed=0).block(10**9)
    assert Counter(corpora.tolist()) == {0: 90, 1: 10}
    assert set(examples[corpora == 0].tolist()) == set(range(10))


def test_a_pickled_sampler_draws_the_same() -> None:
    sampler = BlockSampler([30, 20], [0.7, 0.3], 25, seed=3)
    sampler.block(0)
    copy = pickle.loads(pickle.dumps(sampler))
    for number in range(4):
        for one, other in zip(sampler.block(number), copy.block(number), strict=True):
            np.testing.assert_array_equal(one, other)
