"""Trees out of scores: every word's head, such that all hang together under exactly one root.

Chu and Liu's and Edmonds' algorithm on arrays. Most sentences of a trained parser need none of it:
where every word's best head makes a tree already, no other can be better.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Bool, Float, Int

    IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Contraction:
    """A cycle that became one node, its first, and the way back.

    `heads` are those of its nodes along the cycle; `leaving[d]` is the best head inside for node d,
    `entering[h]` the node inside that h would be head of.
    """

    cycle: IntArray
    heads: IntArray
    leaving: IntArray
    entering: IntArray


def decode_trees(
    scores: Float[np.ndarray, "sentences words heads"], n_words: Int[np.ndarray, "sentences"]
) -> tuple[Int[np.ndarray, "sentences words"], int]:
    """Find the best tree of every sentence of a padded batch; count those that needed a search.

    `scores[s, d, h]` is that of head h for word d of sentence s; head 0 is the root, head h the
    h-th word. Heads of padding are 0.
    """
    scores = np.array(scores, dtype=np.float64)
    size = scores.shape[1]
    words = np.arange(size)
    is_word = words < n_words[:, None]
    if not np.isfinite(scores[is_word]).all():
        raise ValueError("a parser's scores must be finite")
    scores[:, words, words + 1] = -np.inf  # no word is its own head
    scores[:, :, 1:][~np.broadcast_to(is_word[:, None, :], (len(scores), size, size))] = -np.inf
    heads: IntArray = np.where(is_word, scores.argmax(axis=2), 0)
    searched = np.flatnonzero(~are_trees(heads, is_word)).tolist()
    for row in searched:
        n = int(n_words[row])
        heads[row, :n] = find_best_tree(scores[row, :n, : n + 1])
    return heads, len(searched)


def are_trees(
    heads: Int[np.ndarray, "sentences words"], is_word: Bool[np.ndarray, "sentences words"]
) -> Bool[np.ndarray, "sentences"]:
    """Tell which rows of heads are trees with one root: from every word the root is reached.

    >>> are_trees(np.array([[2, 0], [2, 1], [0, 0]]), np.ones((3, 2), dtype=bool)).tolist()
    [True, False, False]
    """
    above = np.pad(np.where(is_word, heads, 0), ((0, 0), (1, 0)))
    for _ in range(max(1, heads.shape[1].bit_length())):  # each round doubles the steps made
        above = np.take_along_axis(above, above, axis=1)
    n_roots = ((heads == 0) & is_word).sum(axis=1)
    found: npt.NDArray[np.bool_] = (above == 0).all(axis=1) & (n_roots == 1)
    return found


def find_best_tree(scores: Float[np.ndarray, "words heads"]) -> Int[np.ndarray, "words"]:
    """Find the heads with the highest sum of scores that make a tree with exactly one root.

    The root's arcs are made so much worse, all by the same amount, that a second one never pays:
    then the best tree under any number of roots is the best under one (Stanojević and Cohen, 2021).

    >>> find_best_tree(np.array([[9.0, 0, 3], [8, 5, 0]])).tolist()
    [0, 1]
    """
    n_words = len(scores)
    square = np.full((n_words + 1, n_words + 1), -np.inf)
    square[1:] = scores
    np.fill_diagonal(square, -np.inf)
    finite = square[np.isfinite(square)]
    square[1:, 0] -= 1 + n_words * float(np.ptp(finite))
    return _find_arborescence(square)[1:] if n_words else np.zeros(0, dtype=np.int64)


def _find_arborescence(scores: Float[np.ndarray, "nodes nodes"]) -> IntArray:
    """Give every node but the first its head: follow the best ones, and contract where they turn.

    Contracting changes no other node's best head, so that only the new node has to be looked at.
    """
    graph = _Graph(scores)
    is_done = [False] * len(scores)
    is_done[0] = True
    for start in range(1, len(scores)):
        node, path = graph.find(start), list[int]()
        while not is_done[node]:
            if node in path:
                cycle = path[path.index(node) :]
                del path[-len(cycle) :]
                node = graph.contract(cycle)
            else:
                path.append(node)
                node = graph.find(graph.heads[node])
        for node in path:
            is_done[node] = True
    return graph.expand()


class _Graph:
    """Scores of heads, of which contracting keeps one node a cycle, and everyone's best head."""

    def __init__(self, scores: Float[np.ndarray, "nodes nodes"]) -> None:
        self.scores = scores.copy()
        self.heads: list[int] = scores.argmax(axis=1).tolist()
        self.parts_of = list(range(len(scores)))
        self.steps: list[_Contraction] = []

    def find(self, node: int) -> int:
        """Give the node that a node has become a part of, or itself."""
        while self.parts_of[node] != node:
            self.parts_of[node] = node = self.parts_of[self.parts_of[node]]
        return node

    def contract(self, nodes: list[int]) -> int:
        """Make a cycle one node: as a head it is its best, as a word what breaking it gains."""
        cycle = np.array(nodes)
        heads = np.array([self.find(self.heads[node]) for node in nodes])
        as_heads = self.scores[:, cycle]
        as_words = self.scores[cycle] - self.scores[cycle, heads][:, None]
        leaving, entering = as_heads.argmax(axis=1), as_words.argmax(axis=0)
        self.steps.append(_Contraction(cycle, heads, cycle[leaving], cycle[entering]))
        whole, rest = nodes[0], cycle[1:]
        self.scores[whole] = as_words.max(axis=0)
        self.scores[:, whole] = as_heads.max(axis=1)
        self.scores[:, rest] = -np.inf
        self.scores[whole, whole] = -np.inf
        for node in nodes:
            self.parts_of[node] = whole
        self.heads[whole] = int(self.scores[whole].argmax())
        return whole

    def expand(self) -> IntArray:
        """Undo all contractions, the last first, and break each cycle where it pays most."""
        heads = np.array([self.find(head) for head in self.heads])
        heads[0] = 0
        for step in reversed(self.steps):
            whole = step.cycle[0]
            above = heads[whole]
            heads = np.where(heads == whole, step.leaving, heads)
            heads[step.cycle] = step.heads
            heads[step.entering[above]] = above
        return heads
