"""Noise: exactly the share asked for is hidden, and what is kept is kept in order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calque.tokens.masking import draw_spans, infill_spans, permute_sentences
from calque.tokens.ragged import Ragged

MASK = 99
TEXTS = st.lists(st.lists(st.integers(3, 50), max_size=30), max_size=6)


def split(text: Ragged) -> list[list[int]]:
    ends = np.cumsum(text.lengths)
    return [text.ids[end - n : end].tolist() for end, n in zip(ends, text.lengths, strict=True)]


def is_subsequence(part: list[int], whole: list[int]) -> bool:
    rest = iter(whole)
    return all(token in rest for token in part)


@given(TEXTS, st.integers(0, 1000), st.floats(0.05, 0.95), st.floats(0.5, 6))
def test_a_share_is_hidden_and_the_rest_stays_in_order(
    texts: list[list[int]], seed: int, rate: float, mean: float
) -> None:
    generator = np.random.default_rng(seed)
    found = split(infill_spans(Ragged.of(texts), MASK, generator, rate=rate, mean_span=mean))
    assert len(found) == len(texts)
    for text, noisy in zip(texts, found, strict=True):
        kept = [token for token in noisy if token != MASK]
        assert is_subsequence(kept, text)
        n_hidden = len(text) - len(kept)
        assert n_hidden == min(len(text), max(1, int(np.rint(rate * len(text)))))
        assert (MASK in noisy) == (len(text) > 0)
        assert len(noisy) <= len(text)


@given(st.lists(st.integers(0, 40), max_size=8), st.floats(0.3, 8), st.integers(0, 99))
def test_spans_sum_to_their_totals(totals: list[int], mean: float, seed: int) -> None:
    spans = split(draw_spans(np.array(totals, dtype=np.int64), mean, np.random.default_rng(seed)))
    assert [sum(lengths) for lengths in spans] == totals


def test_spans_are_poisson_distributed() -> None:
    """But for one that is cut, against the distribution's own moments."""
    spans = draw_spans(np.array([200_000]), 3.5, np.random.default_rng(0)).ids
    assert spans.mean() == pytest.approx(3.5, abs=0.05)
    assert spans.var() == pytest.approx(3.5, abs=0.1)
    assert (spans == 0).mean() == pytest.approx(np.exp(-3.5), abs=0.005)


def test_beginnings_and_ends_are_hidden_alike() -> None:
    text = Ragged.of([list(range(10))] * 20_000)
    noisy = infill_spans(text, MASK, np.random.default_rng(1), rate=0.3, mean_span=2.0)
    kept = np.bincount(noisy.ids[noisy.ids != MASK], minlength=10) / 20_000
    assert kept.mean() == pytest.approx(0.7)
    np.testing.assert_allclose(kept, kept[::-1], atol=0.015)


@given(TEXTS, st.integers(0, 1000))
def test_sentences_change_places_whole(texts: list[list[int]], seed: int) -> None:
    text = Ragged.of(texts)
    found = permute_sentences(text, text.ids % 5 == 0, np.random.default_rng(seed))
    assert found.lengths.tolist() == text.lengths.tolist()
    for before, after in zip(split(text), split(found), strict=True):
        if before and before[-1] % 5 == 0:  # else the last has no end, and joins the next
            assert sorted(cut(after)) == sorted(cut(before))
        assert sorted(after) == sorted(before)


def cut(tokens: list[int]) -> list[list[int]]:
    sentences: list[list[int]] = [[]]
    for token in tokens:
        sentences[-1].append(token)
        if token % 5 == 0:
            sentences.append([])
    return [sentence for sentence in sentences if sentence]


def test_orders_are_all_met() -> None:
    text = Ragged.of([[1, 5, 2, 5, 3, 5]] * 200)
    found = split(permute_sentences(text, text.ids == 5, np.random.default_rng(0)))
    assert len({tuple(row) for row in found}) == 6
