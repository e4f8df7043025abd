"""Matching: SimAlign's own links, brute force, cases by hand and properties."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from calque.algorithms.matching import itermax, max_weight_matching, mutual_argmax
from calque.errors import MissingExtra

# The matrices, SimAlign's links for them, and the program that asked it.
CASES: list[dict[str, Any]] = json.loads(
    Path(__file__).with_name("simalign_cases.json").read_text("utf-8")
)["cases"]
MATCHERS = [mutual_argmax, itermax, max_weight_matching]
SHAPES = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=4)


def pad(matrices: list[np.ndarray], extra: int = 0) -> Tensor:
    """Stack matrices of scores, −inf around them."""
    n_src = max(len(matrix) for matrix in matrices) + extra
    n_tgt = max(matrix.shape[1] for matrix in matrices) + extra
    scores = torch.full((len(matrices), n_src, n_tgt), -torch.inf, dtype=torch.float64)
    for padded, matrix in zip(scores, matrices, strict=True):
        padded[: len(matrix), : matrix.shape[1]] = torch.from_numpy(matrix)
    return scores


def draw(shapes: list[tuple[int, int]], seed: int) -> list[np.ndarray]:
    """Random scores without ties."""
    generator = np.random.default_rng(seed)
    return [generator.random(shape) for shape in shapes]


def to_pharaoh(links: Tensor) -> list[str]:
    lines: list[list[str]] = [[] for _ in links]
    for pair, i, j in links.nonzero().tolist():
        lines[pair].append(f"{i}-{j}")
    return [" ".join(line) for line in lines]


def pad_cases(cases: list[dict[str, Any]]) -> Tensor:
    return pad([np.array(case["scores"]) for case in cases], extra=1)


def test_argmax_as_simalign() -> None:
    assert to_pharaoh(mutual_argmax(pad_cases(CASES))) == [case["argmax"] for case in CASES]


@pytest.mark.parametrize("n_rounds", [2, 3, 5])
def test_itermax_as_simalign(n_rounds: int) -> None:
    expected = [case["itermax"][str(n_rounds)] for case in CASES]
    assert expected != [case["argmax"] for case in CASES]
    assert to_pharaoh(itermax(pad_cases(CASES), n_rounds)) == expected


def test_match_as_simalign() -> None:
    cases = [case for case in CASES if "match" in case]  # where ties leave one best matching
    assert to_pharaoh(max_weight_matching(pad_cases(cases))) == [case["match"] for case in cases]


def test_ties_go_to_the_first_word() -> None:
    equal = torch.ones(2, 3, 40)
    equal[1, :2] = 0.5  # the last row is now the only best one
    assert to_pharaoh(mutual_argmax(equal)) == ["0-0", "2-0"]


def test_itermax_by_hand() -> None:
    scores = torch.tensor(
        [
            [9.0, 2.0, 1.0, 1.0],
            [3.0, 8.0, 1.0, 1.0],
            [7.0, 6.0, 6.5, 1.0],  # 0.9 × 7.0 is less than 6.5: the free word is better
            [7.9, 1.0, 2.0, 1.0],  # 0.9 × 7.9 is more than anything else
        ]
    )[None]
    assert to_pharaoh(itermax(scores, n_rounds=1)) == ["0-0 1-1"]
    assert to_pharaoh(itermax(scores)) == ["0-0 1-1 2-2 3-0"]
    assert to_pharaoh(itermax(scores, alpha=1.0)) == ["0-0 1-1 3-0"]  # 2 prefers 0, which 3 gets


def test_itermax_stops_when_a_side_is_linked() -> None:
    scores = torch.tensor([[9.0, 1.0, 1.0], [1.0, 9.0, 1.0], [1.0, 1.0, 9.0], [8.0, 1.0, 1.0]])
    assert to_pharaoh(itermax(scores[None], n_rounds=9)) == ["0-0 1-1 2-2"]


def test_itermax_of_negative_scores() -> None:
    scores = torch.tensor(
        [
            [-1.0, -8.0, -9.0, -9.0],
            [-7.0, -1.0, -9.0, -9.0],
            [-5.0, -8.0, -5.2, -9.0],  # 1.1 × −5.0 is less than −5.2: the free word is better
            [-2.0, -8.0, -8.0, -8.5],  # 1.1 × −2.0 is more than anything else
        ]
    )[None]
    assert to_pharaoh(itermax(scores)) == ["0-0 1-1 2-2 3-0"]


SMALL = arrays(
    np.float64,
    st.tuples(st.integers(1, 4), st.integers(1, 5)),
    elements=st.sampled_from([-3.0, -1.5, 0.0, 0.0, 0.25, 1.0, 2.0, 8.0]),
)


def measure_best_matching(scores: np.ndarray) -> tuple[int, float]:
    """Try all matchings; return the most links and the highest total score with that many."""
    if len(scores) > scores.shape[1]:
        scores = scores.T
    choices = (
        scores[np.arange(len(scores)), list(columns)]
        for columns in permutations(range(scores.shape[1]), len(scores))
    )
    return max((np.count_nonzero(chosen), float(chosen.sum())) for chosen in choices)


@given(st.lists(SMALL, min_size=1, max_size=3))
def test_no_matching_has_a_higher_total(matrices: list[np.ndarray]) -> None:
    scores = pad(matrices)
    for links, row, matrix in zip(max_weight_matching(scores), scores, matrices, strict=True):
        assert links.sum(dim=0).amax() <= 1 and links.sum(dim=1).amax() <= 1
        assert (row[links] != 0).all()
        found = (int(links.sum()), float(row[links].sum()))
        assert found == pytest.approx(measure_best_matching(matrix))


@pytest.mark.parametrize("matcher", MATCHERS)
@given(shapes=SHAPES, seed=st.integers(0, 1000))
def test_padding_changes_nothing(
    matcher: Callable[[Tensor], Tensor], shapes: list[tuple[int, int]], seed: int
) -> None:
    matrices = draw(shapes, seed)
    together = to_pharaoh(matcher(pad(matrices, extra=2)))
    assert together == [to_pharaoh(matcher(pad([matrix])))[0] for matrix in matrices]


@pytest.mark.parametrize("matcher", MATCHERS)
@given(shapes=SHAPES, seed=st.integers(0, 1000))
def test_sides_and_word_order_do_not_matter(
    matcher: Callable[[Tensor], Tensor], shapes: list[tuple[int, int]], seed: int
) -> None:
    scores = pad(draw(shapes, seed))
    links = matcher(scores)
    assert torch.equal(matcher(scores.mT.contiguous()), links.mT)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(scores.shape[1], generator=generator)
    columns = torch.randperm(scores.shape[2], generator=generator)
    moved = matcher(scores[:, rows][:, :, columns])
    assert torch.equal(moved, links[:, rows][:, :, columns])


@given(SHAPES, st.integers(0, 1000))
def test_rounds_only_add_links(shapes: list[tuple[int, int]], seed: int) -> None:
    scores = pad(draw(shapes, seed))
    earlier = itermax(scores, n_rounds=1)
    assert torch.equal(earlier, mutual_argmax(scores))
    for n_rounds in range(2, 6):
        later = itermax(scores, n_rounds)
        assert (earlier <= later).all() and not later[scores == -torch.inf].any()
        earlier = later


@pytest.mark.parametrize("matcher", MATCHERS)
@pytest.mark.parametrize("shape", [(0, 3, 3), (2, 0, 3), (2, 3, 0), (2, 3, 3)])
def test_empty_input(matcher: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> None:
    links = matcher(torch.full(shape, -torch.inf))
    assert links.shape == shape and links.dtype == torch.bool and not links.any()


def test_matching_needs_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(MissingExtra, match=r"calque\[align\]"):
        max_weight_matching(torch.ones(1, 2, 2))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("matcher", MATCHERS)
def test_same_links_on_the_gpu(matcher: Callable[[Tensor], Tensor]) -> None:
    for scores in (pad_cases(CASES), torch.ones(3, 70, 90)):
        assert torch.equal(matcher(scores.cuda()).cpu(), matcher(scores))
