"""Filters of word links on flat arrays: links of equal words, words of many links, pairs of none.

Together, and in this order, what Wu and Dredze (2020) do to the links they train on. The order
matters: a link between equal words that is gone no longer keeps its words from being one-to-one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from calque.types import Links

if TYPE_CHECKING:
    import numpy.typing as npt

    IntArray: TypeAlias = npt.NDArray[np.int64]
    Flags: TypeAlias = npt.NDArray[np.bool_]
    # The words of all sentences end to end, numbered so that equal words have equal numbers, and
    # where each sentence begins.
    NumberedWords: TypeAlias = tuple[npt.NDArray[np.integer], IntArray]


def mark_identical(links: Links, src: NumberedWords, tgt: NumberedWords) -> Flags:
    """Mark the links between two words that are the same; both sides share one numbering.

    >>> ones = np.ones(2, dtype=np.float32)
    >>> links = Links(np.array([0, 1]), np.array([0, 1]), np.array([1, 0]), ones, 2)
    >>> starts = np.array([0, 2])
    >>> mark_identical(links, (np.array([5, 6, 7, 8]), starts), (np.array([9, 5, 9, 9]), starts))
    array([ True, False])
    """
    (src_words, src_starts), (tgt_words, tgt_starts) = src, tgt
    mine = src_words[src_starts[links.pairs] + links.src]
    theirs = tgt_words[tgt_starts[links.pairs] + links.tgt]
    return np.asarray(mine == theirs)


def mark_one_to_one(links: Links) -> Flags:
    """Mark the links whose two words have no other link; no link may stand twice.

    >>> ones = np.ones(3, dtype=np.float32)
    >>> links = Links(np.zeros(3, int), np.array([0, 1, 1]), np.array([0, 1, 2]), ones, 1)
    >>> mark_one_to_one(links)
    array([ True, False, False])
    """
    return _is_single(links.pairs, links.src) & _is_single(links.pairs, links.tgt)


def mark_linked_pairs(links: Links) -> Flags:
    """Mark the pairs that have a link."""
    linked = np.zeros(links.n_pairs, dtype=np.bool_)
    linked[links.pairs] = True
    return linked


def select_links(links: Links, kept: Flags) -> Links:
    """Take some links; the pairs stay, though some may have none left."""
    return Links(
        links.pairs[kept], links.src[kept], links.tgt[kept], links.scores[kept], links.n_pairs
    )


def drop_pairs(links: Links, kept: Flags) -> Links:
    """Take the links of some pairs, and number those pairs anew."""
    taken = select_links(links, kept[links.pairs])
    numbers = np.cumsum(kept) - 1
    return Links(numbers[taken.pairs], taken.src, taken.tgt, taken.scores, int(kept.sum()))


def _is_single(pairs: IntArray, words: IntArray) -> Flags:
    """Mark the rows that no other has pair and word in common with."""
    keys = pairs * (words.max(initial=0) + 1) + words
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    alone = np.empty(len(keys), dtype=np.bool_)
    # No key is −1: the first and the last differ from what stands beyond.
    alone[order] = (np.diff(ordered, prepend=-1) != 0) & (np.diff(ordered, append=-1) != 0)
    return alone
