"""Biaffine dependency parsing (Dozat and Manning, 2017) and decoding of the best tree.

Trees are decoded with the algorithm of Chu and Liu and of Edmonds. Most sentences of a trained
parser do not need it: if every word's best head already gives a tree, no tree can be better.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from calque.models.attention import scatter_rows

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    IntArray = npt.NDArray[np.int64]

ARC_SIZE, RELATION_SIZE = 500, 100
DROPOUT = 0.33
SLOPE = 0.1
# The score of a head that is padding: far below any other, but finite.
IMPOSSIBLE_SCORE = -1e6


@dataclass(frozen=True, slots=True)
class BiaffineFeatures:
    """Features of all tokens of a batch, with the root as the last row, in their four roles."""

    arc_words: Float[Tensor, "rows arc"]
    arc_heads: Float[Tensor, "rows arc"]
    relation_words: Float[Tensor, "rows relation"]
    relation_heads: Float[Tensor, "rows relation"]


class BiaffineHead(nn.Module):
    """Scores every word of a sentence as the head of every other, and the relations of arcs.

    Arcs: s(d, h) = dᵀUh + uᵀh. Relations: [d; 1]ᵀV[h; 1] for each relation. d and h are computed
    from the states of word and head by one small network each. The root has a learned state.
    """

    def __init__(
        self,
        hidden_size: int,
        n_relations: int,
        generator: torch.Generator,
        *,
        arc_size: int = ARC_SIZE,
        relation_size: int = RELATION_SIZE,
        dropout: float = DROPOUT,
    ) -> None:
        super().__init__()
        self.sizes = (arc_size, arc_size, relation_size, relation_size)
        self.root = nn.Parameter(torch.randn(hidden_size, generator=generator))
        self.project = nn.Linear(hidden_size, sum(self.sizes))  # one product instead of four
        with torch.no_grad():
            self.project.weight.normal_(0, hidden_size**-0.5, generator=generator)
            self.project.bias.zero_()
        self.arc = nn.Parameter(torch.zeros(arc_size, arc_size))
        self.arc_bias = nn.Parameter(torch.zeros(arc_size))
        wide = relation_size + 1
        self.relation = nn.Parameter(torch.zeros(wide, n_relations, wide))
        self.dropout = nn.Dropout(dropout)

    def view(self, states: Float[Tensor, "tokens hidden"]) -> BiaffineFeatures:
        """Return the features of all tokens and, after them, of the root."""
        rows = torch.cat([states, self.root[None].to(states.dtype)])
        projected = self.dropout(F.leaky_relu(self.project(rows), SLOPE))
        return BiaffineFeatures(*projected.split(self.sizes, dim=1))

    def score_arcs(
        self,
        views: BiaffineFeatures,
        cells: Int[Tensor, "tokens"],
        is_word: Bool[Tensor, "sentences words"],
    ) -> Float[Tensor, "sentences words heads"]:
        """Return the scores of all heads of all words of padded sentences; head 0 is the root.

        `cells` are the flat indices of tokens in the table of sentences × words; tokens that are
        not first subwords have the index n_cells. Scores are in single precision: half precision
        would make many of them equal.
        """
        words = scatter_rows(views.arc_words[:-1] @ self.arc + self.arc_bias, cells, is_word.shape)
        heads = scatter_rows(views.arc_heads[:-1], cells, is_word.shape)
        root = views.arc_heads[-1].expand(len(is_word), 1, -1)
        wide = torch.promote_types(words.dtype, torch.float32)
        with torch.autocast(words.device.type, enabled=False):
            scores = words.to(wide) @ torch.cat([root, heads], dim=1).to(wide).transpose(1, 2)
        return scores.masked_fill(~F.pad(is_word, (1, 0), value=True)[:, None], IMPOSSIBLE_SCORE)

    def score_relations(
        self, views: BiaffineFeatures, heads: Int[Tensor, "tokens"]
    ) -> Float[Tensor, "tokens relations"]:
        """Return the scores of the relations of all tokens to their heads, given as row numbers."""
        words = F.pad(views.relation_words[:-1], (0, 1), value=1.0)
        # `F.embedding` because the gradient of plain indexing is slow when words share a head.
        above = F.embedding(heads, F.pad(views.relation_heads, (0, 1), value=1.0))
        weighted = (words @ self.relation.flatten(1)).view(-1, *self.relation.shape[1:])
        scores: Tensor = (weighted @ above[:, :, None])[..., 0]
        return scores


@dataclass(frozen=True, slots=True)
class _Contraction:
    """A cycle that was contracted to its first node, and how to expand it again.

    `heads` are the heads of its nodes along the cycle; `leaving[d]` is the best head inside the
    cycle for node d, `entering[h]` the node of the cycle that h would be the head of.
    """

    cycle: IntArray
    heads: IntArray
    leaving: IntArray
    entering: IntArray


def decode_trees(
    scores: Float[np.ndarray, "sentences words heads"], n_words: Int[np.ndarray, "sentences"]
) -> tuple[Int[np.ndarray, "sentences words"], int]:
    """Return the best tree of every sentence of a padded batch, and how many needed a search.

    `scores[s, d, h]` is the score of head h for word d of sentence s; head 0 is the root, head h
    the h-th word. Heads of padding are 0.
    """
    scores = np.array(scores, dtype=np.float64)
    size = scores.shape[1]
    words = np.arange(size)
    is_word = words < n_words[:, None]
    if not np.isfinite(scores[is_word]).all():
        raise ValueError("the scores of a parser must be finite")
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
    """Return which rows of heads are trees with exactly one root.

    >>> are_trees(np.array([[2, 0], [2, 1], [0, 0]]), np.ones((3, 2), dtype=bool)).tolist()
    [True, False, False]
    """
    above = np.pad(np.where(is_word, heads, 0), ((0, 0), (1, 0)))
    for _ in range(max(1, heads.shape[1].bit_length())):  # each round doubles the number of steps
        above = np.take_along_axis(above, above, axis=1)
    n_roots = ((heads == 0) & is_word).sum(axis=1)
    found: npt.NDArray[np.bool_] = (above == 0).all(axis=1) & (n_roots == 1)
    return found


def find_best_tree(scores: Float[np.ndarray, "words heads"]) -> Int[np.ndarray, "words"]:
    """Return the heads with the highest sum of scores that form a tree with exactly one root.

    A large constant is subtracted from all arcs of the root, so that a second root never pays: then
    the best tree with any number of roots has one (Stanojević and Cohen, 2021).

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
    """Return the head of every node except the first: follow best heads, contract cycles.

    Contracting does not change the best head of any other node, so that only the new node has to
    be examined.
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
    """Scores of heads, the best head of every node, and the contracted cycles."""

    def __init__(self, scores: Float[np.ndarray, "nodes nodes"]) -> None:
        self.scores = scores.copy()
        self.heads: list[int] = scores.argmax(axis=1).tolist()
        self.parts_of = list(range(len(scores)))
        self.steps: list[_Contraction] = []

    def find(self, node: int) -> int:
        """Return the node that a node was contracted into, or the node itself."""
        while self.parts_of[node] != node:
            self.parts_of[node] = node = self.parts_of[self.parts_of[node]]
        return node

    def contract(self, nodes: list[int]) -> int:
        """Contract a cycle to one node and return it.

        As a head its score is that of its best node, as a dependent what breaking the cycle gains.
        """
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
        """Undo all contractions, last first, breaking each cycle at its entering node."""
        heads = np.array([self.find(head) for head in self.heads])
        heads[0] = 0
        for step in reversed(self.steps):
            whole = step.cycle[0]
            above = heads[whole]
            heads = np.where(heads == whole, step.leaving, heads)
            heads[step.cycle] = step.heads
            heads[step.entering[above]] = above
        return heads
