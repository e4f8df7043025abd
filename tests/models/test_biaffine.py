"""The biaffine parser against loops, and its trees against networkx and brute force."""

from __future__ import annotations

from itertools import product
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from calque.io.conllu import find_tree_error
from calque.models.biaffine import (
    IMPOSSIBLE_SCORE,
    BiaffineHead,
    are_trees,
    decode_trees,
    find_best_tree,
)
from calque.models.heads import NO_LABEL, mean_cross_entropy

# Two sentences, of 3 and 2 words, in the rows 0 to 4; row 5 is the root.
CELLS = torch.tensor([0, 1, 2, 3, 4])
IS_WORD = torch.tensor([[True, True, True], [True, True, False]])


def make_head() -> BiaffineHead:
    generator = torch.Generator().manual_seed(3)
    head = BiaffineHead(6, 3, generator, arc_size=5, relation_size=4).double().eval()
    with torch.no_grad():  # they begin at zero, which would hide everything
        for parameter in (head.arc, head.arc_bias, head.relation):
            parameter.normal_(generator=generator)
    return head


def draw_states() -> torch.Tensor:
    return torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


def test_arcs_as_in_the_paper() -> None:
    head = make_head()
    views = head.view(draw_states())
    scores = head.score_arcs(views, CELLS, IS_WORD)
    assert scores.shape == (2, 3, 4)
    for sentence, (first, heads) in enumerate([(0, [5, 0, 1, 2]), (3, [5, 3, 4])]):
        for word in range(len(heads) - 1):
            for place, row in enumerate(heads):
                d, h = views.arc_words[first + word], views.arc_heads[row]
                expected = d @ head.arc @ h + head.arc_bias @ h
                torch.testing.assert_close(scores[sentence, word, place], expected)
    assert (scores[1, :, 3] == IMPOSSIBLE_SCORE).all()


def test_relations_equal_the_bilinear_layer_of_torch() -> None:
    head = make_head()
    views = head.view(draw_states())
    heads = torch.tensor([1, 5, 4, 0, 2])
    bilinear = nn.Bilinear(5, 5, 3, bias=False).double()
    with torch.no_grad():
        bilinear.weight.copy_(head.relation.permute(1, 0, 2))
    ones = torch.ones(5, 1, dtype=torch.float64)
    words = torch.cat([views.relation_words[:5], ones], dim=1)
    above = torch.cat([views.relation_heads[heads], ones], dim=1)
    torch.testing.assert_close(head.score_relations(views, heads), bilinear(words, above))


def test_the_root_is_a_head_like_any_other() -> None:
    head = make_head()
    states = draw_states()
    with torch.no_grad():
        head.root.copy_(states[1])
    scores = head.score_arcs(head.view(states), CELLS, IS_WORD)
    torch.testing.assert_close(scores[0, :, 0], scores[0, :, 2])
    assert not torch.allclose(scores[0, :, 0], scores[0, :, 1])


def test_scores_are_in_single_precision() -> None:
    head = make_head().float()
    with torch.autocast("cpu", torch.bfloat16):
        views = head.view(draw_states().float())
        assert views.arc_words.dtype == torch.bfloat16
        assert head.score_arcs(views, CELLS, IS_WORD).dtype == torch.float32


def test_gradients() -> None:
    head = make_head()
    heads = torch.tensor([[2, 0, 1], [0, 1, NO_LABEL]])
    rows, relations = torch.tensor([1, 5, 0, 5, 3]), torch.tensor([0, 1, 2, 1, NO_LABEL])
    names = [name for name, _ in head.named_parameters()]

    def loss(states: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        given = dict(zip(names, weights, strict=True))

        def both(states: torch.Tensor) -> torch.Tensor:
            views = head.view(states)
            arcs = head.score_arcs(views, CELLS, IS_WORD).flatten(0, 1)
            kinds = head.score_relations(views, rows)
            return mean_cross_entropy(arcs, heads.flatten()) + mean_cross_entropy(kinds, relations)

        head.forward = both  # type: ignore[method-assign]
        found: torch.Tensor = torch.func.functional_call(head, given, (states,))
        return found

    states = draw_states().requires_grad_()
    assert torch.autograd.gradcheck(loss, (states, *head.parameters()))


def total(scores: np.ndarray, heads: Any) -> float:
    return float(sum(scores[word, head] for word, head in enumerate(heads)))


def draw_scores(seed: int, n_words: int, whole: bool = False) -> np.ndarray:
    generator = np.random.default_rng(seed)
    shape = (n_words, n_words + 1)
    # Whole numbers give many trees of the same score.
    return generator.integers(-3, 4, shape).astype(float) if whole else generator.normal(size=shape)


def best_by_trying(scores: np.ndarray) -> float:
    n_words = len(scores)
    trees = product(range(n_words + 1), repeat=n_words)
    return max(total(scores, heads) for heads in trees if find_tree_error(heads) is None)


def best_by_networkx(scores: np.ndarray) -> float:
    """Try every word as the only root, by removing the root arcs of the others."""
    n_words = len(scores)
    found = []
    for root in range(n_words):
        graph = nx.DiGraph()
        graph.add_edge(0, root + 1, weight=scores[root, 0])
        for word in range(n_words):
            for head in range(1, n_words + 1):
                if head != word + 1:
                    graph.add_edge(head, word + 1, weight=scores[word, head])
        tree = nx.maximum_spanning_arborescence(graph, preserve_attrs=False)
        found.append(tree.size(weight="weight"))
    return max(found)


@given(st.integers(0, 10_000), st.integers(1, 5), st.booleans())
def test_no_tree_with_one_root_is_better(seed: int, n_words: int, whole: bool) -> None:
    scores = draw_scores(seed, n_words, whole)
    heads = find_best_tree(scores)
    assert find_tree_error(heads.tolist()) is None
    assert total(scores, heads) == pytest.approx(best_by_trying(scores), abs=1e-9)


@settings(max_examples=12)
@given(st.integers(0, 10_000), st.integers(6, 12))
def test_longer_sentences_equal_networkx(seed: int, n_words: int) -> None:
    scores = draw_scores(seed, n_words)
    heads = find_best_tree(scores)
    assert find_tree_error(heads.tolist()) is None
    assert total(scores, heads) == pytest.approx(best_by_networkx(scores), abs=1e-9)


def test_trees_equal_those_of_ufal() -> None:
    library = pytest.importorskip("ufal.chu_liu_edmonds")
    for seed in range(20):
        scores = draw_scores(seed, 40)
        square = np.full((41, 41), np.nan)
        square[1:] = scores
        np.fill_diagonal(square, np.nan)
        square[1:, 0] -= 1000.0  # it knows nothing of roots
        expected, _ = library.chu_liu_edmonds(square)
        assert find_best_tree(scores).tolist() == expected[1:]


def test_a_second_root_is_removed_by_hand() -> None:
    # Both words want the root (9 + 8); with one root, 9 + 5 beats 8 + 3.
    assert find_best_tree(np.array([[9.0, 0, 3], [8, 5, 0]])).tolist() == [0, 1]
    assert find_best_tree(np.array([[9.0, 0, 9], [8, 5, 0]])).tolist() == [2, 0]


def test_a_cycle_is_broken_where_it_costs_least_by_hand() -> None:
    # "b" and "c" prefer each other; through "a" (the root) c loses 2, b 4.
    scores = np.array([[5.0, 0, 0, 0], [0, 6, 0, 10], [0, 8, 10, 0]])
    assert find_best_tree(scores).tolist() == [0, 3, 1]


@given(st.integers(0, 10_000), st.lists(st.integers(1, 7), min_size=1, max_size=5))
def test_batches_equal_single_sentences(seed: int, sizes: list[int]) -> None:
    scores = np.random.default_rng(seed).normal(size=(len(sizes), 8, 9))
    found, n_searched = decode_trees(scores, np.array(sizes))
    assert 0 <= n_searched <= len(sizes)
    for row, size in enumerate(sizes):
        alone = scores[row, :size, : size + 1]
        heads = found[row, :size].tolist()
        assert find_tree_error(heads) is None
        assert total(alone, heads) == pytest.approx(total(alone, find_best_tree(alone)), abs=1e-9)
        assert not found[row, size:].any()


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6))
def test_tree_check_equals_following_the_heads(heads: list[int]) -> None:
    heads = [min(head, len(heads)) for head in heads]
    array = np.array([[*heads, 0, 0]])
    is_word = np.arange(array.shape[1])[None] < len(heads)
    assert are_trees(array, is_word).tolist() == [find_tree_error(heads) is None]


def test_nan_scores_are_an_error() -> None:
    scores = np.zeros((1, 2, 3))
    scores[0, 1, 0] = np.nan
    with pytest.raises(ValueError, match="finite"):
        decode_trees(scores, np.array([2]))
    # In padding they do not matter.
    assert decode_trees(scores, np.array([1]))[0].tolist() == [[0, 0]]


def test_one_word_and_a_long_chain() -> None:
    assert find_best_tree(np.zeros((1, 2))).tolist() == [0]
    n_words = 300
    scores = np.zeros((n_words, n_words + 1))
    scores[np.arange(n_words), np.arange(n_words)] = 1.0  # everyone's head is the word before
    scores[0, 2] = 2.0  # but the first prefers the second: a cycle
    assert find_best_tree(scores).tolist() == list(range(n_words))
