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
    """A graph one of whose cycles became a single node, the last, and the way back.

    `leaving[k]` is the best head inside the cycle for the k-th kept node, `entering[k]` the node
    of the cycle that the k-th kept node would be head of.
    """

    heads: IntArray
    kept: IntArray
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
    """Give every node but the first its head: take the best ones, and contract while they turn."""
    contractions: list[_Contraction] = []
    while True:
        heads: IntArray = scores.argmax(axis=1)
        heads[0] = 0
        cycle = _find_cycle(heads.tolist())
        if not cycle:
            break
        scores, step = _contract(scores, heads, np.array(sorted(cycle)))
        contractions.append(step)
    for step in reversed(contractions):
        heads = _expand(heads, step)
    return heads


def _find_cycle(heads: list[int]) -> list[int]:
    """List the nodes of some cycle, none if all lead to node 0."""
    visited = [0] * len(heads)
    visited[0] = -1
    for start in range(1, len(heads)):
        node = start
        while not visited[node]:
            visited[node] = start
            node = heads[node]
        if visited[node] == start:
            cycle = [node]
            while (node := heads[node]) != cycle[0]:
                cycle.append(node)
            return cycle
    return []


def _contract(
    scores: Float[np.ndarray, "nodes nodes"], heads: IntArray, cycle: IntArray
) -> tuple[Float[np.ndarray, "fewer fewer"], _Contraction]:
    """Make a cycle one node: as a head it is its best, as a word what breaking it there gains."""
    is_kept = np.ones(len(scores), dtype=bool)
    is_kept[cycle] = False
    kept = np.flatnonzero(is_kept)
    from_cycle = scores[np.ix_(kept, cycle)]
    into_cycle = scores[np.ix_(cycle, kept)] - scores[cycle, heads[cycle]][:, None]
    n_kept = len(kept)
    fewer = np.full((n_kept + 1, n_kept + 1), -np.inf)
    fewer[:n_kept, :n_kept] = scores[np.ix_(kept, kept)]
    fewer[:n_kept, n_kept] = from_cycle.max(axis=1)
    fewer[n_kept, :n_kept] = into_cycle.max(axis=0)
    leaving, entering = cycle[from_cycle.argmax(axis=1)], cycle[into_cycle.argmax(axis=0)]
    return fewer, _Contraction(heads, kept, leaving, entering)


def _expand(found: IntArray, step: _Contraction) -> IntArray:
    """Carry heads of the smaller graph over to the larger, and break the cycle where it pays."""
    n_kept = len(step.kept)
    heads = step.heads.copy()
    is_inside = found[:n_kept] == n_kept
    outside = step.kept[np.minimum(found[:n_kept], n_kept - 1)]
    heads[step.kept] = np.where(is_inside, step.leaving, outside)
    above = int(found[n_kept])
    heads[step.entering[above]] = step.kept[above]
    return heads
