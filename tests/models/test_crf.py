from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from calque.models.crf import (
    ConditionalRandomField,
    allowed_span_transitions,
    log_partition,
    score_tags,
)


def draw(
    seed: int, n_sequences: int, n_words: int, n_tags: int
) -> tuple[ConditionalRandomField, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    chain = ConditionalRandomField(n_tags).double()
    with torch.no_grad():
        for weight in chain.parameters():
            weight.normal_(generator=generator)
    shape = (n_sequences, n_words, n_tags)
    return chain, torch.randn(shape, generator=generator, dtype=torch.float64)


def enumerate_scores(
    chain: ConditionalRandomField, emissions: Tensor
) -> dict[tuple[int, ...], float]:
    """Score every sequence of tags of one sentence by the definition."""
    start, end, follow = chain.start.tolist(), chain.end.tolist(), chain.transitions.tolist()
    words, found = emissions.tolist(), {}
    for tags in product(range(emissions.shape[1]), repeat=len(words)):
        score = start[tags[0]] + end[tags[-1]]
        score += sum(word[tag] for word, tag in zip(words, tags, strict=True))
        found[tags] = score + sum(follow[a][b] for a, b in pairwise(tags))
    return found


def mask_of(lengths: list[int], n_words: int) -> Tensor:
    return torch.arange(n_words) < torch.tensor(lengths)[:, None]


@given(
    seed=st.integers(0, 1000),
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    n_tags=st.integers(1, 3),
)
def test_against_enumeration(seed: int, lengths: list[int], n_tags: int) -> None:
    chain, emissions = draw(seed, len(lengths), 4, n_tags)
    mask = mask_of(lengths, 4)
    tags = torch.randint(n_tags, (len(lengths), 4), generator=torch.Generator().manual_seed(seed))
    losses, best = chain(emissions, tags, mask), chain.decode(emissions, mask)
    for row, length in enumerate(lengths):
        scores = enumerate_scores(chain, emissions[row, :length])
        total = torch.tensor(list(scores.values())).double().logsumexp(0)
        gold = tuple(tags[row, :length].tolist())
        assert losses[row].item() == pytest.approx(float(total) - scores[gold], abs=1e-6)
        assert scores[tuple(best[row, :length].tolist())] == pytest.approx(max(scores.values()))


def test_gradients() -> None:
    chain, emissions = draw(0, 2, 3, 3)
    tags, mask = torch.tensor([[0, 1, 2], [2, 0, 0]]), mask_of([3, 2], 3)

    def loss(emissions: Tensor, transitions: Tensor, start: Tensor, end: Tensor) -> Tensor:
        weights = (transitions, start, end)
        return log_partition(emissions, mask, *weights) - score_tags(
            emissions, tags, mask, *weights
        )

    inputs = [w.detach().requires_grad_() for w in (emissions, *chain.parameters())]
    assert torch.autograd.gradcheck(loss, inputs)


def test_a_row_without_words_costs_nothing() -> None:
    chain, emissions = draw(1, 2, 3, 2)
    mask = mask_of([0, 3], 3)
    losses = chain(emissions, torch.zeros(2, 3, dtype=torch.long), mask).tolist()
    assert losses[0] == 0 and losses[1] > 0


NAMES = ["B-LOC", "B-PER", "I-LOC", "I-PER", "O"]


@given(seed=st.integers(0, 1000))
def test_only_valid_spans_are_found_and_the_best_of_them(seed: int) -> None:
    chain, emissions = draw(seed, 1, 4, len(NAMES))
    follows, begins = allowed_span_transitions(NAMES)
    best = chain.decode(emissions, mask_of([4], 4), (follows, begins))[0].tolist()
    scores = enumerate_scores(chain, emissions[0])
    valid = {
        tags: score
        for tags, score in scores.items()
        if begins[tags[0]] and all(follows[a, b] for a, b in pairwise(tags))
    }
    assert valid[tuple(best)] == pytest.approx(max(valid.values()))
