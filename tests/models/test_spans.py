"""Best spans against trying all of them."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from calque.models.heads import find_best_spans


@given(st.integers(0, 1000), st.integers(1, 9), st.integers(1, 12))
def test_no_span_is_better(seed: int, n_places: int, longest: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    starts, ends = torch.randn(2, 4, n_places, generator=generator)
    may_answer = torch.rand(4, n_places, generator=generator) < 0.7
    firsts, lasts, scores = find_best_spans(starts, ends, may_answer, longest)
    for row in range(4):
        places = [place for place in range(n_places) if may_answer[row, place]]
        spans = {
            (first, last): float(starts[row, first] + ends[row, last])
            for first in places
            for last in places
            if first <= last < first + longest
        }
        if spans:
            found = (int(firsts[row]), int(lasts[row]))
            assert spans[found] == max(spans.values()) == float(scores[row])
        else:
            assert scores[row] == -torch.inf


def test_the_first_and_shortest_of_equals() -> None:
    zeros, every = torch.zeros(1, 5), torch.ones(1, 5, dtype=torch.bool)
    first, last, score = find_best_spans(zeros, zeros, every, 3)
    assert (int(first), int(last), float(score)) == (0, 0, 0)
