"""Spans of words in B-, I- and O tags, and how many of them two taggings share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from calque.types import InputError

if TYPE_CHECKING:
    import numpy.typing as npt

    IntArray = npt.NDArray[np.int64]

OUTSIDE = "O"


@dataclass(frozen=True, slots=True)
class SpanCounts:
    """Spans that are there, that were found, and that are both, with bounds and kind."""

    n_gold: int
    n_found: int
    n_right: int

    @property
    def f1(self) -> float:
        """Give the harmonic mean of precision and recall; 0 where nothing is right.

        >>> SpanCounts(n_gold=4, n_found=2, n_right=2).f1
        0.6666666666666666
        """
        total = self.n_gold + self.n_found
        return 2 * self.n_right / total if total else 0.0


def is_span_tag(name: str) -> bool:
    """Tell tags that say where a span begins from others.

    >>> [is_span_tag(name) for name in ("O", "B-LOC", "I-LOC", "S-LOC", "B-", "LOC")]
    [True, True, True, False, False, False]
    """
    return name == OUTSIDE or (name[:2] in ("B-", "I-") and bool(name[2:]))


def check_span_tags(names: Sequence[str]) -> None:
    """Refuse tags that do not say where a span begins."""
    for name in names:
        if not is_span_tag(name):
            fix = "give tags such as B-LOC, I-LOC and O, or score accuracy"
            raise InputError(f"{name!r} is not a tag of a span", fix=fix)


def find_spans(tags: IntArray, names: Sequence[str], lengths: IntArray) -> IntArray:
    """List (first word, word after the last, kind) of every span, in the order of the text.

    `tags` number `names`, for the words of all sentences, which have these `lengths`. A span
    begins with B-, and with an I- that follows no span of its kind, as in CoNLL's own script.
    """
    kinds = sorted({name[2:] for name in names if name != OUTSIDE})
    kind_of = np.array([-1 if n == OUTSIDE else kinds.index(n[2:]) for n in names], dtype=np.int64)
    begins = np.array([name.startswith("B-") for name in names], dtype=np.bool_)
    kind = kind_of[tags]
    breaks = np.ones(len(tags) + 1, dtype=np.bool_)  # whether a word cannot go on with a span
    breaks[1:-1] = begins[tags[1:]] | (kind[1:] != kind[:-1])
    breaks[np.cumsum(lengths)] = True
    first = np.flatnonzero(breaks[:-1] & (kind >= 0))
    ends = np.flatnonzero(breaks)
    after = ends[np.searchsorted(ends, first, side="right")]
    return np.stack([first, after, kind[first]], axis=1)


def count_spans(
    gold: IntArray, found: IntArray, names: Sequence[str], lengths: IntArray
) -> SpanCounts:
    """Compare two taggings of the same sentences span by span."""
    sides = [find_spans(tags, names, lengths) for tags in (gold, found)]
    keys = [set(map(tuple, spans.tolist())) for spans in sides]
    return SpanCounts(len(keys[0]), len(keys[1]), len(keys[0] & keys[1]))
