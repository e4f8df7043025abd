"""Sentence pairs longer than a statistical aligner takes, cut into overlapping parts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calque.tools.model_folder import read_array
from calque.tools.word_ids import NumberedPairs, starts_of
from calque.types import Links

if TYPE_CHECKING:
    import numpy.typing as npt

    IntArray = npt.NDArray[np.int64]

# eflomal gives no links to a sentence of 1,024 words or more, and says nothing; fast_align's time
# grows with the cube of the length.
LONGEST = 1023


@dataclass(frozen=True, slots=True)
class Seams:
    """Which parts belong to which pairs; those of pair p are parts `starts[p]:starts[p + 1]`.

    A pair with an empty side has no part, a short one has one, and is it. Of the others the rows
    of `cuts` tell, part by part: its number, where it begins in the source and in the target, and
    from where to where its links count in each.
    """

    starts: IntArray
    cuts: IntArray

    def __len__(self) -> int:
        return len(self.starts) - 1

    def count_parts(self, start: int, stop: int) -> IntArray:
        """Count the parts of some pairs."""
        return np.diff(self.starts[start : stop + 1])

    def sew(self, links: Links, start: int, stop: int) -> Links:
        """Make the links of the parts of some pairs links of the pairs."""
        first, last = int(self.starts[start]), int(self.starts[stop])
        owners = np.repeat(np.arange(stop - start), self.count_parts(start, stop))
        pairs, src, tgt, scores = owners[links.pairs], links.src, links.tgt, links.scores
        low, high = np.searchsorted(self.cuts[:, 0], [first, last])
        if low < high:
            begin_src, begin_tgt, *own = _spread(self.cuts[low:high], first, last)[:, links.pairs]
            src, tgt = src + begin_src, tgt + begin_tgt
            is_own = (src >= own[0]) & (src < own[1]) & (tgt >= own[2]) & (tgt < own[3])
            order = np.lexsort((tgt[is_own], src[is_own], pairs[is_own]))
            kept = np.flatnonzero(is_own)[order]
            pairs, src, tgt, scores = pairs[kept], src[kept], tgt[kept], scores[kept]
        return Links(pairs, src, tgt, scores, stop - start)

    def write(self, folder: Path) -> None:
        """Write the seams into a folder."""
        np.save(folder / "seams.starts.npy", self.starts)
        np.save(folder / "seams.cuts.npy", self.cuts)

    @classmethod
    def read(cls, folder: Path) -> Seams:
        """Read the seams from a folder."""
        return cls(read_array(folder / "seams.starts.npy"), read_array(folder / "seams.cuts.npy"))


def cut_long(pairs: NumberedPairs) -> tuple[NumberedPairs, Seams]:
    """Cut the pairs that have too many words on a side, and leave out the empty ones."""
    n_src, n_tgt = pairs.src.lengths, pairs.tgt.lengths
    is_filled = (n_src > 0) & (n_tgt > 0)
    is_long = is_filled & (np.maximum(n_src, n_tgt) > LONGEST)
    whole = np.flatnonzero(is_filled & ~is_long)
    zeros = np.zeros_like(whole)
    held = [np.stack([whole, zeros, n_src[whole], zeros, n_tgt[whole]], axis=1)]
    n_parts, own = is_filled.astype(np.int64), [np.zeros((0, 4), dtype=np.int64)]
    for number in np.flatnonzero(is_long).tolist():
        ranges, own_ranges = _cut(int(n_src[number]), int(n_tgt[number]))
        held.append(np.insert(ranges, 0, number, axis=1))
        own.append(own_ranges)
        n_parts[number] = len(ranges)
    table = np.concatenate(held)
    table = table[np.argsort(table[:, 0], kind="stable")]
    rows, s0, s1, t0, t1 = table.T
    cut = NumberedPairs(pairs.src.cut(rows, s0, s1), pairs.tgt.cut(rows, t0, t1))
    places = np.flatnonzero(is_long[rows])
    begins = [places, s0[places], t0[places]]
    cuts = np.concatenate([np.stack(begins, axis=1), np.concatenate(own)], axis=1)
    return cut, Seams(starts_of(n_parts), cuts)


def _cut(n_src: int, n_tgt: int) -> tuple[IntArray, IntArray]:
    """Cut both sides in step into segments; a part is two of them, and shares each with the next.

    The links of a word count in the part that has it nearer to its middle. That goes by the longer
    side: the other one may have fewer words than there are parts.
    """
    # A part may have a word more at each end than two segments, where they begin within words.
    n_segments = -(-max(n_src, n_tgt) // ((LONGEST - 2) // 2))
    src, own_src = _segment(n_src, n_segments)
    tgt, own_tgt = _segment(n_tgt, n_segments)
    if n_src < n_tgt:
        own_src = src
    else:
        own_tgt = tgt
    return np.concatenate([src, tgt], axis=1), np.concatenate([own_src, own_tgt], axis=1)


def _segment(n_words: int, n_segments: int) -> tuple[IntArray, IntArray]:
    """Give the words that each part holds, and those in its middle."""
    cuts = np.linspace(0, n_words, n_segments + 1)
    first, stop = np.floor(cuts[:-2]).astype(np.int64), np.ceil(cuts[2:]).astype(np.int64)
    middles = ((cuts[:-1] + cuts[1:]) / 2).astype(np.int64)
    middles[0], middles[-1] = 0, n_words
    return np.stack([first, stop], axis=1), np.stack([middles[:-1], middles[1:]], axis=1)


def _spread(cuts: IntArray, first: int, last: int) -> IntArray:
    """Give the columns of `cuts` for all parts in a range; one that is whole counts everywhere."""
    columns = np.zeros((6, last - first), dtype=np.int64)
    columns[[3, 5]] = np.iinfo(np.int64).max
    columns[:, cuts[:, 0] - first] = cuts[:, 1:].T
    return columns
