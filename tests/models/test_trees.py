"""Best trees, against networkx, against all trees there are, and by hand."""

from __future__ import annotations

from itertools import product
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calque.io.conllu import find_fault
from calque.models.biaffine import are_trees, decode_trees, find_best_tree


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
    return max(total(scores, heads) for heads in trees if find_fault(heads) is None)


def best_by_networkx(scores: np.ndarray) -> float:
    """Try every word as the root: without the others' root arcs no second root can be."""
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
    assert find_fault(heads.tolist()) is None
    assert total(scores, heads) == pytest.approx(best_by_trying(scores), abs=1e-9)


@settings(max_examples=12)
@given(st.integers(0, 10_000), st.integers(6, 12))
def test_longer_sentences_as_networkx_has_it(seed: int, n_words: int) -> None:
    scores = draw_scores(seed, n_words)
    heads = find_best_tree(scores)
    assert find_fault(heads.tolist()) is None
    assert total(scores, heads) == pytest.approx(best_by_networkx(scores), abs=1e-9)


def test_as_the_library_of_others_has_it() -> None:
    library = pytest.importorskip("ufal.chu_liu_edmonds")
    for seed in range(20):
        scores = draw_scores(seed, 40)
        square = np.full((41, 41), np.nan)
        square[1:] = scores
        np.fill_diagonal(square, np.nan)
        square[1:, 0] -= 1000.0  # it knows nothing of roots
        expected, _ = library.chu_liu_edmonds(square)
        assert find_best_tree(scores).tolist() == expected[1:]


def test_a_second_root_is_given_up_by_hand() -> None:
    # Both words want the root (9 + 8); with one root, 9 + 5 beats 8 + 3.
    assert find_best_tree(np.array([[9.0, 0, 3], [8, 5, 0]])).tolist() == [0, 1]
    assert find_best_tree(np.array([[9.0, 0, 9], [8, 5, 0]])).tolist() == [2, 0]


def test_a_cycle_is_broken_where_it_costs_least_by_hand() -> None:
    # "b" and "c" prefer each other; through "a" (the root) c loses 2, b 4.
    scores = np.array([[5.0, 0, 0, 0], [0, 6, 0, 10], [0, 8, 10, 0]])
    assert find_best_tree(scores).tolist() == [0, 3, 1]


@given(st.integers(0, 10_000), st.lists(st.integers(1, 7), min_size=1, max_size=5))
def test_batches_do_as_sentences_alone(seed: int, sizes: list[int]) -> None:
    scores = np.random.default_rng(seed).normal(size=(len(sizes), 8, 9))
    found, n_searched = decode_trees(scores, np.array(sizes))
    assert 0 <= n_searched <= len(sizes)
    for row, size in enumerate(sizes):
        alone = scores[row, :size, : size + 1]
        heads = found[row, :size].tolist()
        assert find_fault(heads) is None
        assert total(alone, heads) == pytest.approx(total(alone, find_best_tree(alone)), abs=1e-9)
        assert not found[row, size:].any()


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6))
def test_trees_are_told_as_by_walking(heads: list[int]) -> None:
    heads = [min(head, len(heads)) for head in heads]
    array = np.array([[*heads, 0, 0]])
    is_word = np.arange(array.shape[1])[None] < len(heads)
    assert are_trees(array, is_word).tolist() == [find_fault(heads) is None]


def test_scores_that_are_no_numbers_are_refused() -> None:
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
