"""Symmetrization of word links of two directions, and filters of word links.

Intersection, union and the grow-diag family are those of Koehn et al., 2003. The paper leaves the
order of the scans open, and it matters: as in fast_align's atools, candidates are tried by source
word, then by target word, and each added link counts at once. Forward and backward links are both
oriented source × target.

The filters are those of Wu & Dredze, 2020, in this order: drop links between identical words, keep
one-to-one links, drop pairs without links. The order matters: a dropped link between identical
words no longer prevents its words from being one-to-one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import and_, or_
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from calque.types import Links

if TYPE_CHECKING:
    import numpy.typing as npt

    IntArray: TypeAlias = npt.NDArray[np.int64]
    Flags: TypeAlias = npt.NDArray[np.bool_]
    NumberedWords: TypeAlias = tuple[npt.NDArray[np.integer], IntArray]

Matrix: TypeAlias = Bool[Tensor, "pairs src tgt"]
Rule: TypeAlias = Callable[[Tensor, Tensor], Tensor]


def intersection(forward: Matrix, backward: Matrix) -> Matrix:
    """Return the links in both directions."""
    return forward & backward


def union(forward: Matrix, backward: Matrix) -> Matrix:
    """Return the links in either direction."""
    return forward | backward


def grow_diag(forward: Matrix, backward: Matrix) -> Matrix:
    """Return the intersection, grown by adjacent links of the union.

    A link of the union is added if one of its words has no link yet and one of the eight cells
    around it is linked; this is repeated until nothing changes.

    >>> forward = torch.tensor([[[1, 0, 0], [0, 1, 0], [0, 1, 0], [0, 1, 0]]]).bool()
    >>> backward = torch.tensor([[[1, 0, 0], [0, 1, 0], [0, 0, 0], [0, 0, 1]]]).bool()
    >>> grow_diag(forward, backward).long().tolist()
    [[[1, 0, 0], [0, 1, 0], [0, 1, 0], [0, 1, 1]]]
    """
    growth = _Growth.of(forward & backward)
    growth.grow(forward | backward)
    return growth.links


def grow_diag_final(forward: Matrix, backward: Matrix) -> Matrix:
    """Return grow-diag plus the forward, then backward links of at least one unlinked word."""
    growth = _Growth.of(forward & backward)
    growth.grow(forward | backward)
    growth.finish(forward, unless=and_)
    growth.finish(backward, unless=and_)
    return growth.links


def grow_diag_final_and(forward: Matrix, backward: Matrix) -> Matrix:
    """Return grow-diag plus the forward, then backward links between two unlinked words.

    >>> forward = torch.tensor([[[1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 1]]]).bool()
    >>> backward = torch.tensor([[[1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0]]]).bool()
    >>> grow_diag_final_and(forward, backward).long().tolist()
    [[[1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]]]
    """
    growth = _Growth.of(forward & backward)
    growth.grow(forward | backward)
    growth.finish(forward, unless=or_)
    growth.finish(backward, unless=or_)
    return growth.links


SYMMETRIZATIONS: dict[str, Callable[[Matrix, Matrix], Matrix]] = {
    "forward": lambda forward, backward: forward,
    "backward": lambda forward, backward: backward,
    "intersection": intersection,
    "union": union,
    "grow-diag": grow_diag,
    "grow-diag-final": grow_diag_final,
    "grow-diag-final-and": grow_diag_final_and,
}


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Cells to try, ordered by turn: the first candidate of every pair, then the second, and so on.

    The order of candidates matters only within a pair, so all pairs of a batch advance together.
    """

    cells: Int[Tensor, "3 cells"]  # pair, source word, target word
    turns: Int[Tensor, "cells"]

    @classmethod
    def of(cls, matrix: Matrix) -> _Candidates:
        """Return the true cells of every pair, ordered by source word, then by target word."""
        cells = torch.stack(matrix.nonzero(as_tuple=True))
        firsts = torch.searchsorted(cells[0], torch.arange(len(matrix), device=cells.device))
        turns = torch.arange(cells.shape[1], device=cells.device) - firsts[cells[0]]
        turns, order = turns.sort(stable=True)
        return cls(cells[:, order], turns)

    def keep(self, kept: Bool[Tensor, "cells"]) -> _Candidates:
        """Return some of the cells, with their turns unchanged."""
        return _Candidates(self.cells[:, kept], self.turns[kept])

    def by_turn(self) -> tuple[Int[Tensor, "3 _"], ...]:
        """Return the cells of each turn that has any."""
        sizes = [size for size in self.turns.bincount().tolist() if size]
        return torch.split(self.cells, sizes, dim=1)


@dataclass(frozen=True, slots=True)
class _Growth:
    """The links so far, changed in place, and which words are linked."""

    src_linked: Bool[Tensor, "pairs src"]
    tgt_linked: Bool[Tensor, "pairs tgt"]
    bordered: Bool[Tensor, "pairs src+2 tgt+2"]  # the border makes checks at the edges unnecessary

    @classmethod
    def of(cls, links: Matrix) -> _Growth:
        """Return the state for given links."""
        return cls(links.any(dim=2), links.any(dim=1), F.pad(links, (1, 1, 1, 1)))

    @property
    def links(self) -> Matrix:
        """The links without the border."""
        return self.bordered[:, 1:-1, 1:-1].contiguous()

    def grow(self, matrix: Matrix) -> None:
        """Add cells next to a link that link a new word, until nothing changes."""
        candidates = self._list_candidates(matrix, and_)
        while candidates.turns.numel():
            grown = torch.zeros(len(matrix), dtype=torch.bool, device=matrix.device)
            for cells in candidates.by_turn():
                added = self._are_beside_links(cells) & ~self._have_links(cells, and_)
                self._add(cells[:, added])
                grown[cells[0]] |= added
            # A candidate may succeed later only if its pair changed and a word of it is unlinked.
            helped = grown[candidates.cells[0]] & ~self._have_links(candidates.cells, and_)
            candidates = candidates.keep(helped)

    def finish(self, matrix: Matrix, unless: Rule) -> None:
        """Add cells anywhere unless one word `and_` (`or_`) the other has a link."""
        for cells in self._list_candidates(matrix, unless).by_turn():
            self._add(cells[:, ~self._have_links(cells, unless)])

    def _list_candidates(self, matrix: Matrix, unless: Rule) -> _Candidates:
        linked = unless(self.src_linked[:, :, None], self.tgt_linked[:, None, :])
        return _Candidates.of(matrix & ~linked)

    def _have_links(self, cells: Int[Tensor, "3 cells"], rule: Rule) -> Bool[Tensor, "cells"]:
        pairs, src, tgt = cells
        return rule(self.src_linked[pairs, src], self.tgt_linked[pairs, tgt])

    def _are_beside_links(self, cells: Int[Tensor, "3 cells"]) -> Bool[Tensor, "cells"]:
        # A candidate is not linked itself, so the whole 3 × 3 window around it can be checked.
        pairs, src, tgt = cells[:, :, None, None]
        window = torch.arange(3, device=cells.device)
        around = self.bordered[pairs, src + window[:, None], tgt + window]
        return around.flatten(1).any(dim=1)

    def _add(self, cells: Int[Tensor, "3 cells"]) -> None:
        pairs, src, tgt = cells
        self.bordered[pairs, src + 1, tgt + 1] = True
        self.src_linked[pairs, src] = True
        self.tgt_linked[pairs, tgt] = True


def mark_identical(links: Links, src: NumberedWords, tgt: NumberedWords) -> Flags:
    """Return which links connect identical words; both sides share one word numbering.

    >>> ones = np.ones(2, dtype=np.float32)
    >>> links = Links(np.array([0, 1]), np.array([0, 1]), np.array([1, 0]), ones, 2)
    >>> starts = np.array([0, 2])
    >>> mark_identical(links, (np.array([5, 6, 7, 8]), starts), (np.array([9, 5, 9, 9]), starts))
    array([ True, False])
    """
    (src_words, src_starts), (tgt_words, tgt_starts) = src, tgt
    src_ids = src_words[src_starts[links.pairs] + links.src]
    tgt_ids = tgt_words[tgt_starts[links.pairs] + links.tgt]
    return np.asarray(src_ids == tgt_ids)


def mark_one_to_one(links: Links) -> Flags:
    """Return which links are the only link of both their words; links must be unique.

    >>> ones = np.ones(3, dtype=np.float32)
    >>> links = Links(np.zeros(3, int), np.array([0, 1, 1]), np.array([0, 1, 2]), ones, 1)
    >>> mark_one_to_one(links)
    array([ True, False, False])
    """
    return _is_single(links.pairs, links.src) & _is_single(links.pairs, links.tgt)


def mark_linked_pairs(links: Links) -> Flags:
    """Return which pairs have a link."""
    linked = np.zeros(links.n_pairs, dtype=np.bool_)
    linked[links.pairs] = True
    return linked


def select_links(links: Links, kept: Flags) -> Links:
    """Return some of the links; all pairs stay, even those without links."""
    return Links(
        links.pairs[kept], links.src[kept], links.tgt[kept], links.scores[kept], links.n_pairs
    )


def keep_pairs(links: Links, kept: Flags) -> Links:
    """Return the links of some pairs, with the pairs renumbered."""
    selected = select_links(links, kept[links.pairs])
    numbers = np.cumsum(kept) - 1
    return Links(
        numbers[selected.pairs], selected.src, selected.tgt, selected.scores, int(kept.sum())
    )


def _is_single(pairs: IntArray, words: IntArray) -> Flags:
    """Return which rows have a pair and word that no other row has."""
    keys = pairs * (words.max(initial=0) + 1) + words
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    is_single = np.empty(len(keys), dtype=np.bool_)
    # −1 is not a key, so the first and the last key differ from the added value.
    is_single[order] = (np.diff(ordered, prepend=-1) != 0) & (np.diff(ordered, append=-1) != 0)
    return is_single
