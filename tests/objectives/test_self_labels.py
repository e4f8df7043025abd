"""Self-labels: several pairs per block against single pairs, the plan against its equations."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from calque.algorithms.matching import itermax, mutual_argmax
from calque.objectives.self_labels import (
    LEFT,
    NEITHER,
    RIGHT,
    LabelRules,
    PairBlocks,
    compare_states,
    find_links,
    iterate_argmax,
    mass_on_links,
    transport_plan,
)
from calque.tokens.ragged import BatchShape, Ragged, pack

sizes = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=4)


def draw_pairs(shapes: list[tuple[int, int]], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(1, *shape, generator=generator) for shape in shapes]


def put_into_one_block(pairs: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Put pairs along the diagonal of one block, with a special token before each side."""
    width = sum(sum(pair.shape[1:]) + 2 for pair in pairs)
    block, cells = torch.zeros(1, width, width), torch.zeros(1, width, width, dtype=torch.bool)
    for rows, columns, pair in cut_places(pairs):
        block[:, rows, columns], cells[:, rows, columns] = pair, True
    return block, cells


def cut_places(pairs: list[Tensor]) -> list[tuple[slice, slice, Tensor]]:
    places, start = [], 0
    for pair in pairs:
        middle = start + 1 + pair.shape[1]
        end = middle + 1 + pair.shape[2]
        places.append((slice(start + 1, middle), slice(middle + 1, end), pair))
        start = end
    return places


@given(sizes, st.integers(0, 99), st.integers(1, 4), st.sampled_from([0.5, 0.9, 1.0]))
def test_pairs_in_one_block_are_linked_independently(
    shapes: list[tuple[int, int]], seed: int, n_rounds: int, alpha: float
) -> None:
    pairs = draw_pairs(shapes, seed)
    block, cells = put_into_one_block(pairs)
    found = iterate_argmax(block.masked_fill(~cells, -torch.inf), n_rounds, alpha)
    assert not (found & ~cells).any()
    for rows, columns, pair in cut_places(pairs):
        assert torch.equal(found[:, rows, columns], itermax(pair, n_rounds, alpha))


def plan_by_hand(
    similarity: Tensor, kernel: Literal["dot", "cosine"], sharpness: float, first: str
) -> npt.NDArray[np.float64]:
    """Rows and columns scaled to sums of 1, twice: the paper's Eq. 4 to 6 in float64."""
    wide = similarity.double().numpy()
    kernels = {"dot": np.maximum(1e-6, wide) ** sharpness, "cosine": np.exp(sharpness * wide)}
    plan: npt.NDArray[np.float64] = kernels[kernel]
    for _ in range(2):
        for axis in (1, 0) if first == "rows" else (0, 1):
            plan = plan / plan.sum(axis=axis, keepdims=True)
    return plan


@given(
    sizes,
    st.integers(0, 99),
    st.sampled_from(["dot", "cosine"]),
    st.sampled_from([1.0, 7.0]),
    st.sampled_from(["columns", "rows"]),
)
def test_the_plan_equals_that_of_the_paper(
    shapes: list[tuple[int, int]], seed: int, similarity: Any, sharpness: float, first: Any
) -> None:
    pairs = [2 * pair - 0.5 for pair in draw_pairs(shapes, seed)]
    rules = LabelRules(similarity, sharpness, scale_first=first)
    found = transport_plan(*put_into_one_block(pairs), rules)
    for rows, columns, pair in cut_places(pairs):
        expected = plan_by_hand(pair[0], similarity, sharpness, first)
        np.testing.assert_allclose(found[0, rows, columns], expected, rtol=2e-3, atol=1e-7)
        found[:, rows, columns] = 0
    assert found.eq(0).all()


def test_sharp_kernels_of_large_products_stay_finite() -> None:
    similarity, cells = put_into_one_block([torch.tensor([[[900.0, 890.0], [850.0, 30.0]]])])
    plan = transport_plan(similarity, cells, LabelRules(sharpness=50.0))
    assert plan.isfinite().all()
    assert plan.sum(dim=2).max() == pytest.approx(1.0)


# Token 0 of the left is best with 1, and so is token 1; right token 0 is nobody's best.
SCORES = torch.tensor([[[0.5, 0.9], [0.2, 0.8], [0.3, 0.6]]])
FILTERS = {
    "argmax": [[0, 1], [0, 0], [0, 0]],
    "union": [[1, 1], [0, 1], [0, 1]],
}


@pytest.mark.parametrize("name", FILTERS)
def test_filters_by_hand(name: Any) -> None:
    similarity, cells = put_into_one_block([SCORES])
    found = find_links(similarity, cells, LabelRules(labels="argmax", filter=name))
    ((rows, columns, _),) = cut_places([SCORES])
    assert found[0, rows, columns].long().tolist() == FILTERS[name]
    assert found.sum() == np.sum(FILTERS[name])


def test_the_filter_is_applied_to_the_plan() -> None:
    """Sinkhorn divides the mass of a hub, so that more words are linked than by the scores."""
    similarity, cells = put_into_one_block([SCORES])
    rules = LabelRules(filter="argmax")
    found = find_links(similarity, cells, rules)
    plan = transport_plan(similarity, cells, rules).masked_fill(~cells, -torch.inf)
    assert torch.equal(found, mutual_argmax(plan))
    assert found.sum() == 2
    assert find_links(similarity, cells, LabelRules(labels="argmax", filter="argmax")).sum() == 1


def test_negative_cosines_are_ranked_too() -> None:
    cosines, cells = put_into_one_block([torch.tensor([[[-0.9, -0.2], [-0.3, -0.8]]])])
    rules = LabelRules("cosine", labels="argmax", filter="argmax")
    assert find_links(cosines, cells, rules).sum() == 2


def test_cosines_equal_those_of_torch() -> None:
    states = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    expected = torch.cosine_similarity(states[:, :, None], states[:, None], dim=-1)
    torch.testing.assert_close(compare_states(states, "cosine"), expected)
    torch.testing.assert_close(compare_states(states, "dot"), states @ states.mT)


def test_close_scores_do_not_become_equal_in_half_precision() -> None:
    """257 is 256 in bfloat16, and autocast would compute in it."""
    states = torch.tensor([[[16.0, 1.0, 0.0], [16.0, 1.0, 0.0], [16.0, 0.0, 1.5]]]).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        products = compare_states(states, "dot")
    assert products.dtype == torch.float32
    assert products[0, 0].tolist() == [257.0, 257.0, 256.0]


def test_blocks_are_rows_or_pairs() -> None:
    """`<s> a a </s> b </s>` and `<s> c </s> d d </s>` in one row of 16, or separately."""
    pairs = Ragged.of([[0, 5, 5, 2, 6, 2], [0, 7, 2, 8, 8, 2]])
    flags = torch.tensor([0, LEFT, LEFT, 0, RIGHT, 0, 0, LEFT, 0, RIGHT, RIGHT, 0])
    apart = PairBlocks.of(pack(pairs, pad_id=1), flags)
    assert apart.cells().nonzero().tolist() == [[0, 1, 4], [0, 2, 4], [1, 1, 3], [1, 1, 4]]
    shape = BatchShape(32, 16, 4, 30)
    in_rows = pack(pairs, shape=shape, pad_id=1)
    sides = torch.zeros(32, dtype=torch.int8)
    sides[:12] = flags
    blocks = PairBlocks.of(in_rows, sides)
    found = blocks.cells().nonzero().tolist()
    assert found == [[0, 1, 4], [0, 2, 4], [0, 7, 9], [0, 7, 10]]
    assert blocks.to_blocks(in_rows.ids).tolist() == in_rows.ids.view(2, 16).tolist()
    assert apart.to_blocks(pack(pairs, pad_id=1).ids).tolist()[1] == [0, 7, 2, 8, 8, 2]


def test_cells_beyond_a_short_pair_are_on_no_side() -> None:
    pairs, flags = Ragged.of([[5, 6, 7], [8, 9]]), [LEFT, 0, RIGHT, LEFT, RIGHT]
    blocks = PairBlocks.of(pack(pairs, pad_id=1), torch.tensor(flags))
    assert blocks.sides.tolist() == [[LEFT, 0, RIGHT], [LEFT, RIGHT, NEITHER]]


def test_a_sharp_plan_lies_on_links_and_a_flat_one_does_not() -> None:
    sharp, flat = torch.eye(4)[None], torch.full((1, 4, 4), 0.5)
    shares = [
        mass_on_links(*put_into_one_block([pair]), LabelRules("cosine", 30.0)).item()
        for pair in (sharp, flat)
    ]
    # Of equals the first wins: a flat plan of ¼ a cell gets one link in either round, of 4 words.
    assert shares == pytest.approx([1.0, 2 / 16], abs=1e-3)
