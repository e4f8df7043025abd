"""Sentence pairs cut to what a model can read at once, and where the words of each part belong.

A pair that is too long is read in overlapping windows that go along both sentences in step. Each
window answers for the words of its middle, on the longer side; around them it sees context.

Links found in windows of pairs, brought back to the pairs they belong to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

from calque.tokens.ragged import Ragged, ranges
from calque.tokens.words import PieceCounts
from calque.types import Links

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Bool, Float
    from torch import Tensor

    from calque.tokens.words import WordEncoder
    from calque.word_alignment.protocol import WordPair

    IntArray = npt.NDArray[np.int64]

# A word takes at most one part in so many of a side's room: windows must hold it and its context.
WORD_SHARE = 6


@dataclass(frozen=True, slots=True)
class Room:
    """How many subwords a model can read: on either side, and on both together."""

    side: int
    both: int

    @property
    def word(self) -> int:
        """The most subwords of one word."""
        return max(1, self.side // WORD_SHARE)

    def shares(self, n_src: int, n_tgt: int) -> tuple[int, int]:
        """Share the room among two sides by their lengths, three eighths at least for each."""
        least = 3 * self.both // 8
        src = round(self.both * n_src / max(1, n_src + n_tgt))
        src = min(max(src, least), self.both - least)
        return min(src, self.side), min(self.both - src, self.side)


@dataclass(frozen=True, slots=True)
class Side:
    """One side of all windows: word ranges in the flat text, and the words answered for."""

    pieces: PieceCounts
    first: IntArray
    stop: IntArray
    own_first: IntArray
    own_stop: IntArray

    @property
    def n_words(self) -> IntArray:
        """Count the words of every window."""
        return self.stop - self.first

    def n_pieces(self, rows: IntArray | slice = slice(None)) -> IntArray:
        """Count the subwords of windows."""
        bounds = self.pieces.first_pieces
        return bounds[self.stop[rows]] - bounds[self.first[rows]]

    def gather(self, rows: IntArray, width: int) -> tuple[Ragged, IntArray]:
        """Read the subwords of some windows, and the slot of the word each belongs to.

        Word k of the n-th window asked for has slot n · width + k.
        """
        bounds = self.pieces.first_pieces
        n_ids, n_words = self.n_pieces(rows), self.n_words[rows]
        ids = self.pieces.ids[ranges(bounds[self.first[rows]], n_ids)]
        slots = ranges(np.arange(len(rows)) * width, n_words)
        n_pieces = self.pieces.n_pieces[ranges(self.first[rows], n_words)]
        return Ragged(ids, n_ids), np.repeat(slots, n_pieces)


@dataclass(frozen=True, slots=True)
class PairWindows:
    """Parts of sentence pairs that fit the model; `owners` says of which pair each is one."""

    src: Side
    tgt: Side
    owners: IntArray
    n_empty: int
    n_long: int
    n_cut: int

    def __len__(self) -> int:
        return len(self.owners)

    @property
    def n_windows(self) -> int:
        """Count the windows of the pairs that took more than one."""
        return len(self.owners) - len(np.unique(self.owners)) + self.n_long


def cut_pairs(encoder: WordEncoder, pairs: Sequence[WordPair], room: Room) -> PairWindows:
    """Encode pairs of word lists and cut the long ones; a pair with an empty side has no window."""
    src, n_cut_src = encoder.encode([pair[0] for pair in pairs]).shorten(room.word)
    tgt, n_cut_tgt = encoder.encode([pair[1] for pair in pairs]).shorten(room.word)
    n_src, n_tgt = _sentence_pieces(src), _sentence_pieces(tgt)
    filled = (n_src > 0) & (n_tgt > 0)
    fits = (n_src <= room.side) & (n_tgt <= room.side) & (n_src + n_tgt <= room.both)
    parts = _whole(src, tgt, np.flatnonzero(filled & fits))
    long = np.flatnonzero(filled & ~fits)
    parts += [_cut(src, tgt, number, room) for number in long.tolist()]
    table = np.concatenate(parts)
    table = table[np.argsort(table[:, 0], kind="stable")]
    owners, s0, s1, t0, t1, own_s0, own_s1, own_t0, own_t1 = table.T
    return PairWindows(
        Side(src, s0, s1, own_s0, own_s1),
        Side(tgt, t0, t1, own_t0, own_t1),
        owners,
        int((~filled).sum()),
        len(long),
        n_cut_src + n_cut_tgt,
    )


def _sentence_pieces(text: PieceCounts) -> IntArray:
    return np.diff(text.first_pieces[text.first_words])


def _whole(src: PieceCounts, tgt: PieceCounts, rows: IntArray) -> list[IntArray]:
    """Make one window of each pair."""
    s, t = src.first_words, tgt.first_words
    bounds = [s[rows], s[rows + 1], t[rows], t[rows + 1]]
    return [np.stack([rows, *bounds, *bounds], axis=1)]


def _cut(src: PieceCounts, tgt: PieceCounts, number: int, room: Room) -> IntArray:
    """Make the windows of one long pair."""
    src_starts, tgt_starts = _word_starts(src, number), _word_starts(tgt, number)
    n_src, n_tgt = int(src_starts[-1]), int(tgt_starts[-1])
    # The last word of a window's middle may reach beyond it by all but one of its subwords.
    src_room, tgt_room = (share - room.word for share in room.shares(n_src, n_tgt))
    # The middle of a window is at most half of it.
    n_windows = max(-(-2 * n_src // src_room), -(-2 * n_tgt // tgt_room))
    src_ranges, src_own = _along(src_starts, n_windows, src_room)
    tgt_ranges, tgt_own = _along(tgt_starts, n_windows, tgt_room)
    if len(src_starts) >= len(tgt_starts):  # the other side answers for all it sees
        tgt_own = tgt_ranges
    else:
        src_own = src_ranges
    shift_src, shift_tgt = src.first_words[number], tgt.first_words[number]
    columns = [src_ranges + shift_src, tgt_ranges + shift_tgt, src_own + shift_src]
    rows = np.concatenate([*columns, tgt_own + shift_tgt], axis=1)
    return np.concatenate([np.full((n_windows, 1), number), rows], axis=1)


def _word_starts(text: PieceCounts, number: int) -> IntArray:
    """Say where the words of a sentence begin, in subwords, and where the last ends."""
    first, stop = text.first_words[number : number + 2]
    starts: IntArray = np.concatenate([[0], np.cumsum(text.n_pieces[first:stop])])
    return starts


def _along(starts: IntArray, n_windows: int, room: int) -> tuple[IntArray, IntArray]:
    """Lay windows along a sentence: the words each holds, and those of its middle."""
    cuts = np.linspace(0, int(starts[-1]), n_windows + 1)
    margin = (room - np.diff(cuts)) / 2
    low, high = cuts[:-1] - margin, cuts[1:] + margin
    own = np.searchsorted(starts[:-1], np.floor(cuts), side="left")
    own[-1] = len(starts) - 1
    first = np.searchsorted(starts[:-1], np.ceil(low), side="left")
    stop = np.searchsorted(starts[1:], np.floor(high), side="right")
    first = np.minimum(np.minimum(first, own[:-1]), len(starts) - 2)
    stop = np.maximum(np.maximum(stop, own[1:]), first + 1)  # never empty, however little room
    return np.stack([first, stop], axis=1), np.stack([own[:-1], own[1:]], axis=1)


@dataclass(frozen=True, slots=True)
class WindowLinks:
    """Links inside windows, words counted from the beginning of the window."""

    windows: IntArray
    src: IntArray
    tgt: IntArray
    scores: npt.NDArray[np.float32]

    @classmethod
    def of(
        cls,
        rows: IntArray,
        links: Bool[Tensor, "windows src tgt"],
        scores: Float[Tensor, "windows src tgt"],
    ) -> Self:
        """List the links of a batch of windows."""
        places = links.nonzero()
        found = scores[links].float().cpu().numpy()  # in the order of the places
        windows, src, tgt = places.cpu().numpy().T
        return cls(rows[windows], src, tgt, found)


def gather_links(windows: PairWindows, parts: Sequence[WindowLinks], n_pairs: int) -> Links:
    """Put the links of all windows together, each from the window that answers for its words."""
    number, src, tgt, scores = (
        np.concatenate([np.zeros(0, dtype=kind), *(getattr(part, name) for part in parts)])
        for name, kind in (
            ("windows", np.int64),
            ("src", np.int64),
            ("tgt", np.int64),
            ("scores", np.float32),
        )
    )
    src, tgt = src + windows.src.first[number], tgt + windows.tgt.first[number]
    mine = _answers(windows.src, number, src) & _answers(windows.tgt, number, tgt)
    number, src, tgt, scores = number[mine], src[mine], tgt[mine], scores[mine]
    pairs = windows.owners[number]
    src = src - windows.src.pieces.first_words[pairs]
    tgt = tgt - windows.tgt.pieces.first_words[pairs]
    order = np.lexsort((tgt, src, pairs))
    return Links(pairs[order], src[order], tgt[order], scores[order], n_pairs)


def _answers(side: Side, number: IntArray, words: IntArray) -> npt.NDArray[np.bool_]:
    """Tell whether a window answers for a word of this side."""
    answers: npt.NDArray[np.bool_] = (side.own_first[number] <= words) & (
        words < side.own_stop[number]
    )
    return answers
