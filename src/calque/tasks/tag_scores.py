"""Scores of taggings, sentence by sentence: right words, and whole spans of B-, I- and O tags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from calque.models.heads import NO_LABEL
from calque.tasks.outcome import Items
from calque.text.spans import OUTSIDE, find_spans

if TYPE_CHECKING:
    import numpy.typing as npt

    IntArray = npt.NDArray[np.int64]


def score_words(gold: IntArray, found: IntArray, lengths: IntArray) -> Items:
    """Count right words by sentence; words without a gold tag are left out."""
    owners = np.repeat(np.arange(len(lengths)), lengths)
    asked = gold != NO_LABEL
    right = asked & (gold == found)
    return Items(
        np.bincount(owners[right], minlength=len(lengths)).astype(np.float64),
        np.bincount(owners[asked], minlength=len(lengths)).astype(np.float64),
    )


def score_spans(
    gold: IntArray, found: IntArray, names: Sequence[str], lengths: IntArray
) -> tuple[Items, dict[str, float]]:
    """Count spans with the right bounds and kind by sentence; give precision and recall as well.

    F1 is twice the right ones over those there are and those found.
    """
    outside = names.index(OUTSIDE)
    sides = [np.where(tags == NO_LABEL, outside, tags) for tags in (gold, found)]
    there, mine = (find_spans(tags, names, lengths) for tags in sides)
    return _compare(there, mine, lengths)


def score_runs(
    gold: IntArray, found: IntArray, names: Sequence[str], lengths: IntArray
) -> tuple[Items, dict[str, float]]:
    """Count runs of words with the same part of speech, as XTREME's F1 of UDPOS does.

    That comes of seqeval, meant for spans: it joins neighbours of one tag, except tags that begin
    with S, which it takes for spans of a single word.
    """
    keep = gold != NO_LABEL
    owners = np.repeat(np.arange(len(lengths)), lengths)[keep]
    kept = np.bincount(owners, minlength=len(lengths))
    single = np.array([name.startswith("S") for name in [*names, ""]], dtype=np.bool_)
    # A word that was not answered is of a kind of its own.
    sides = [np.where(tags == NO_LABEL, len(names), tags)[keep] for tags in (gold, found)]
    there, mine = (_find_runs(tags, single, kept) for tags in sides)
    return _compare(there, mine, kept)


def repair_spans(tags: IntArray, names: Sequence[str], lengths: IntArray) -> tuple[list[str], int]:
    """Make every I- that continues no span of its kind a B-, and count how many there were.

    >>> names = ["B-LOC", "I-LOC", "O"]
    >>> repair_spans(np.array([1, 1, 2, 0, 1]), names, np.array([2, 3]))
    (['B-LOC', 'I-LOC', 'O', 'B-LOC', 'I-LOC'], 1)
    """
    starts = {int(start) for start in find_spans(tags, names, lengths)[:, 0]}
    mended, n_mended = [], 0
    for place, number in enumerate(tags.tolist()):
        name = names[number]
        if place in starts and name.startswith("I-"):
            name, n_mended = "B-" + name[2:], n_mended + 1
        mended.append(name)
    return mended, n_mended


def _find_runs(tags: IntArray, single: npt.NDArray[np.bool_], lengths: IntArray) -> IntArray:
    breaks = np.ones(len(tags) + 1, dtype=np.bool_)
    breaks[1:-1] = (tags[1:] != tags[:-1]) | single[tags[1:]]
    breaks[np.cumsum(lengths)] = True
    bounds = np.flatnonzero(breaks)
    return np.stack([bounds[:-1], bounds[1:], tags[bounds[:-1]]], axis=1)


def _compare(gold: IntArray, found: IntArray, lengths: IntArray) -> tuple[Items, dict[str, float]]:
    known = set(map(tuple, gold.tolist()))
    is_right = np.array([tuple(span) in known for span in found.tolist()], dtype=np.bool_)
    ends = np.cumsum(lengths)
    n_gold, n_found, n_right = (
        np.bincount(np.searchsorted(ends, firsts, "right"), minlength=len(lengths))
        for firsts in (gold[:, 0], found[:, 0], found[is_right, 0])
    )
    items = Items((2 * n_right).astype(np.float64), (n_gold + n_found).astype(np.float64))
    shares = {
        "precision": 100 * float(n_right.sum() / max(1, n_found.sum())),
        "recall": 100 * float(n_right.sum() / max(1, n_gold.sum())),
    }
    return items, shares
