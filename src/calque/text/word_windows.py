"""Windows over the words of a sentence that is longer than a model reads at once."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt


class WordWindow(NamedTuple):
    """Words `start` to `stop` are read; those from `first` to `last` are taken from here."""

    start: int
    stop: int
    first: int
    last: int


def cut_words(n_pieces: npt.NDArray[np.int64], room: int, overlap: float) -> list[WordWindow]:
    """Cut a sentence, given the subwords of every word, into windows of at most `room` subwords.

    Windows break between words and have up to a share `overlap` of their subwords in common; of
    words in two windows, each is taken from the one in which it lies further from the edge.

    >>> cut_words(np.array([2, 2, 2, 2, 2]), room=6, overlap=0.4)
    [WordWindow(start=0, stop=3, first=0, last=3), WordWindow(start=2, stop=5, first=3, last=5)]
    """
    if n_pieces.max(initial=0) > room:
        raise ValueError(f"a word of {n_pieces.max()} subwords exceeds a window of {room}")
    ends = np.concatenate([[0], np.cumsum(n_pieces)])
    spans = [(0, _last_fitting(ends, 0, room))]
    while spans[-1][1] < len(n_pieces):
        start, stop = spans[-1]
        shared = int(np.searchsorted(ends, ends[stop] - overlap * room, "left"))
        # The next window must reach further than this one did.
        least = int(np.searchsorted(ends, ends[stop + 1] - room, "left"))
        begin = min(stop, max(shared, least, start + 1))
        spans.append((begin, _last_fitting(ends, begin, room)))
    cuts = [0, *((a[1] + b[0] + 1) // 2 for a, b in itertools.pairwise(spans))]
    cuts.append(len(n_pieces))
    return [
        WordWindow(*span, first, last)
        for span, first, last in zip(spans, cuts, cuts[1:], strict=False)
    ]


def _last_fitting(ends: npt.NDArray[np.int64], start: int, room: int) -> int:
    return int(np.searchsorted(ends, ends[start] + room, "right")) - 1
