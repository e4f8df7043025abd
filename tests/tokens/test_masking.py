"""Masking: exact counts, shares against their distribution, purity."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from calque.tokens.masking import MaskingRules, choose_masked, find_maskable, mask_tokens

SPECIAL = (0, 1, 2, 99)
RULES = MaskingRules(mask_id=99, vocab_size=100, special_ids=SPECIAL)
ORDINARY = [token for token in range(100) if token not in SPECIAL]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def chi_square(observed: list[int], shares: list[float]) -> float:
    """Pearson's statistic: about its degrees of freedom if the shares are right."""
    expected = [share * sum(observed) for share in shares]
    return sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))


@given(
    st.lists(st.booleans(), max_size=200),
    st.floats(0.01, 0.99),
    st.integers(0, 2**32),
)
def test_chooses_an_exact_share_of_what_may_be_masked(
    flags: list[bool], probability: float, seed: int
) -> None:
    chosen = choose_masked(torch.tensor(flags, dtype=torch.bool), probability, generator(seed))
    wanted = max(1, round(probability * sum(flags))) if any(flags) else 0
    assert len(chosen) == wanted
    assert chosen.tolist() == sorted(set(chosen.tolist()))
    assert all(flags[place] for place in chosen.tolist())


def test_chooses_every_place_equally_often() -> None:
    source, maskable = generator(), torch.ones(20, dtype=torch.bool)
    draws = torch.cat([choose_masked(maskable, 0.15, source) for _ in range(4000)])
    counts = draws.bincount(minlength=20).tolist()
    # Drawn without replacement, the counts vary less than Pearson expects; 43.8 is the
    # 0.1 % point of 19 degrees of freedom.
    assert chi_square(counts, [1 / 20] * 20) < 43.8
    assert sum(counts) == 4000 * 3


def test_fates_are_eighty_ten_ten() -> None:
    # All tokens are a special one, which is never drawn: what became of each is plain to see.
    ids = torch.zeros(200_000, dtype=torch.long)
    corrupted, masked, _ = mask_tokens(
        ids, torch.ones_like(ids, dtype=torch.bool), RULES, generator()
    )
    fates = corrupted[masked]
    n_masked, n_kept = int((fates == 99).sum()), int((fates == 0).sum())
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
def test_labels_tell_what_stood_there_and_the_rest_is_untouched(ids: list[int], seed: int) -> None:
    before = torch.tensor(ids)
    maskable = find_maskable(before, SPECIAL)
    corrupted, masked, labels = mask_tokens(before, maskable, RULES, generator(seed))
    assert before.tolist() == ids  # the argument itself is not changed
    restored = corrupted.clone()
    restored[masked] = labels
    assert restored.tolist() == ids
    assert maskable.tolist() == [token not in SPECIAL for token in ids]


def test_depends_on_its_generator_alone() -> None:
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
