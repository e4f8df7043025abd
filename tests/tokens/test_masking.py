"""Noise: exact counts, correct distributions, and no dependence on global state."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from calque.tokens.masking import (
    MaskingRules,
    choose_masked,
    draw_spans,
    find_maskable,
    infill_spans,
    mask_tokens,
    permute_sentences,
)
from calque.tokens.ragged import Ragged

SPECIAL = (0, 1, 2, 99)
RULES = MaskingRules(mask_id=99, vocab_size=100, special_ids=SPECIAL)
MASK = 99
TEXTS = st.lists(st.lists(st.integers(3, 50), max_size=30), max_size=6)
ORDINARY = [token for token in range(100) if token not in SPECIAL]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def chi_square(observed: list[int], shares: list[float]) -> float:
    """Return Pearson's statistic, about its degrees of freedom if the shares are right."""
    expected = [share * sum(observed) for share in shares]
    return sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))


@given(
    st.lists(st.booleans(), max_size=200),
    st.floats(0.01, 0.99),
    st.integers(0, 2**32),
)
def test_an_exact_fraction_of_the_maskable_tokens_is_chosen(
    flags: list[bool], probability: float, seed: int
) -> None:
    chosen = choose_masked(torch.tensor(flags, dtype=torch.bool), probability, generator(seed))
    wanted = max(1, round(probability * sum(flags))) if any(flags) else 0
    assert len(chosen) == wanted
    assert chosen.tolist() == sorted(set(chosen.tolist()))
    assert all(flags[k] for k in chosen.tolist())


def test_every_token_is_chosen_equally_often() -> None:
    source, maskable = generator(), torch.ones(20, dtype=torch.bool)
    draws = torch.cat([choose_masked(maskable, 0.15, source) for _ in range(4000)])
    counts = draws.bincount(minlength=20).tolist()
    # Drawn without replacement, the counts vary less than Pearson expects; 43.8 is the
    # 0.1 % point of 19 degrees of freedom.
    assert chi_square(counts, [1 / 20] * 20) < 43.8
    assert sum(counts) == 4000 * 3


def test_replacements_are_eighty_ten_ten() -> None:
    # All tokens are a special one, which is never drawn, so that the three cases can be told apart.
    ids = torch.zeros(200_000, dtype=torch.long)
    corrupted, masked, _ = mask_tokens(
        ids, torch.ones_like(ids, dtype=torch.bool), RULES, generator()
    )
    replaced = corrupted[masked]
    n_masked, n_kept = int((replaced == 99).sum()), int((replaced == 0).sum())
    assert len(masked) == 30_000
    # 13.8 is the 0.1 % point of 2 degrees of freedom.
    counts = [n_masked, n_kept, len(masked) - n_masked - n_kept]
    assert chi_square(counts, [0.8, 0.1, 0.1]) < 13.8


def test_random_tokens_are_uniform_over_the_ordinary_vocabulary() -> None:
    rules = MaskingRules(99, 100, SPECIAL, probability=0.5, keep=0.0, random=1.0)
    ids = torch.zeros(200_000, dtype=torch.long)
    corrupted, masked, _ = mask_tokens(
        ids, torch.ones_like(ids, dtype=torch.bool), rules, generator()
    )
    counts = corrupted[masked].bincount(minlength=100).tolist()
    assert [counts[token] for token in SPECIAL] == [0, 0, 0, 0]
    # 142 is the 0.1 % point of 95 degrees of freedom.
    assert chi_square([counts[token] for token in ORDINARY], [1 / 96] * 96) < 142


@pytest.mark.parametrize(("keep", "random", "expected"), [(0.0, 0.0, 99), (1.0, 0.0, 7)])
def test_all_masked_or_all_kept(keep: float, random: float, expected: int) -> None:
    rules = MaskingRules(99, 100, SPECIAL, keep=keep, random=random)
    ids = torch.full((400,), 7)
    corrupted, masked, _ = mask_tokens(ids, torch.ones(400, dtype=torch.bool), rules, generator())
    assert set(corrupted[masked].tolist()) == {expected}


@given(st.lists(st.integers(0, 99), min_size=1, max_size=100), st.integers(0, 2**32))
def test_labels_are_the_original_tokens_and_the_rest_is_unchanged(
    ids: list[int], seed: int
) -> None:
    before = torch.tensor(ids)
    maskable = find_maskable(before, SPECIAL)
    corrupted, masked, labels = mask_tokens(before, maskable, RULES, generator(seed))
    assert before.tolist() == ids  # the argument is not changed
    restored = corrupted.clone()
    restored[masked] = labels
    assert restored.tolist() == ids
    assert maskable.tolist() == [token not in SPECIAL for token in ids]


def test_masking_depends_only_on_its_generator() -> None:
    ids, maskable = torch.arange(3, 90), torch.ones(87, dtype=torch.bool)
    state = torch.get_rng_state()
    first = mask_tokens(ids, maskable, RULES, generator(1))
    torch.rand(5)
    again, other = (mask_tokens(ids, maskable, RULES, generator(seed)) for seed in (1, 2))
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[1], other[1])
    torch.set_rng_state(state)
    mask_tokens(ids, maskable, RULES, generator(1))
    assert torch.equal(torch.get_rng_state(), state)


def test_nothing_to_mask() -> None:
    ids = torch.tensor([0, 2])
    corrupted, masked, labels = mask_tokens(
        ids, torch.zeros(2, dtype=torch.bool), RULES, generator()
    )
    assert (corrupted.tolist(), masked.tolist(), labels.tolist()) == ([0, 2], [], [])


def split(text: Ragged) -> list[list[int]]:
    ends = np.cumsum(text.lengths)
    return [text.ids[end - n : end].tolist() for end, n in zip(ends, text.lengths, strict=True)]


def is_subsequence(part: list[int], whole: list[int]) -> bool:
    rest = iter(whole)
    return all(token in rest for token in part)


@given(TEXTS, st.integers(0, 1000), st.floats(0.05, 0.95), st.floats(0.5, 6))
def test_an_exact_fraction_is_infilled_and_the_rest_stays_in_order(
    texts: list[list[int]], seed: int, rate: float, mean: float
) -> None:
    generator = np.random.default_rng(seed)
    found = split(infill_spans(Ragged.of(texts), MASK, generator, rate=rate, mean_span=mean))
    assert len(found) == len(texts)
    for text, noisy in zip(texts, found, strict=True):
        kept = [token for token in noisy if token != MASK]
        assert is_subsequence(kept, text)
        n_masked = len(text) - len(kept)
        assert n_masked == min(len(text), max(1, int(np.rint(rate * len(text)))))
        assert (MASK in noisy) == (len(text) > 0)
        assert len(noisy) <= len(text)


@given(st.lists(st.integers(0, 40), max_size=8), st.floats(0.3, 8), st.integers(0, 99))
def test_spans_sum_to_their_totals(totals: list[int], mean: float, seed: int) -> None:
    spans = split(draw_spans(np.array(totals, dtype=np.int64), mean, np.random.default_rng(seed)))
    assert [sum(lengths) for lengths in spans] == totals


def test_spans_are_poisson_distributed() -> None:
    """Compare with the moments of the distribution; one span of many is shortened."""
    spans = draw_spans(np.array([200_000]), 3.5, np.random.default_rng(0)).ids
    assert spans.mean() == pytest.approx(3.5, abs=0.05)
    assert spans.var() == pytest.approx(3.5, abs=0.1)
    assert (spans == 0).mean() == pytest.approx(np.exp(-3.5), abs=0.005)


def test_starts_and_ends_are_masked_equally_often() -> None:
    text = Ragged.of([list(range(10))] * 20_000)
    noisy = infill_spans(text, MASK, np.random.default_rng(1), rate=0.3, mean_span=2.0)
    kept = np.bincount(noisy.ids[noisy.ids != MASK], minlength=10) / 20_000
    assert kept.mean() == pytest.approx(0.7)
    np.testing.assert_allclose(kept, kept[::-1], atol=0.015)


@given(TEXTS, st.integers(0, 1000))
def test_sentences_are_permuted_as_wholes(texts: list[list[int]], seed: int) -> None:
    text = Ragged.of(texts)
    found = permute_sentences(text, text.ids % 5 == 0, np.random.default_rng(seed))
    assert found.lengths.tolist() == text.lengths.tolist()
    for before, after in zip(split(text), split(found), strict=True):
        if before and before[-1] % 5 == 0:  # otherwise the last sentence has no end
            assert sorted(cut(after)) == sorted(cut(before))
        assert sorted(after) == sorted(before)


def cut(tokens: list[int]) -> list[list[int]]:
    sentences: list[list[int]] = [[]]
    for token in tokens:
        sentences[-1].append(token)
        if token % 5 == 0:
            sentences.append([])
    return [sentence for sentence in sentences if sentence]


def test_all_orders_occur() -> None:
    text = Ragged.of([[1, 5, 2, 5, 3, 5]] * 200)
    found = split(permute_sentences(text, text.ids == 5, np.random.default_rng(0)))
    assert len({tuple(row) for row in found}) == 6
