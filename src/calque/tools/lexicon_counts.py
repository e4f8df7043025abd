"""How often words were linked to one another, and the translation probabilities that follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calque.tools.model_folder import read_array, read_words, write_words
from calque.tools.packed_links import PackedLinks
from calque.tools.word_ids import UNKNOWN, NumberedPairs, NumberedText, Vocabulary

if TYPE_CHECKING:
    import numpy.typing as npt

    from calque.tools.aligning import WordPair

    IntArray = npt.NDArray[np.int64]
    FloatArray = npt.NDArray[np.float32]

# The count that every pair of words is given beforehand; eflomal's own.
ALPHA = 0.001
CHUNK_PAIRS = 100_000


@dataclass(frozen=True, eq=False, repr=False)
class Lexicon:
    """Counts of linked word pairs, by the sorted key `source · target words + target`."""

    src: Vocabulary
    tgt: Vocabulary
    keys: IntArray
    counts: FloatArray

    @staticmethod
    def count(
        src: Vocabulary, tgt: Vocabulary, pairs: NumberedPairs, found: Sequence[PackedLinks]
    ) -> Lexicon:
        """Count linked words; with two directions of links, a link of one of them counts ½."""
        tables = [_count_keys(pairs, links, len(tgt)) for links in found]
        keys = np.unique(np.concatenate([keys for keys, _ in tables]))
        counts = np.zeros(len(keys), dtype=np.float32)
        for some, numbers in tables:
            counts[np.searchsorted(keys, some)] += (numbers / len(found)).astype(np.float32)
        return Lexicon(src, tgt, keys, counts)

    def write(self, folder: Path) -> None:
        """Write words and counts into a folder."""
        write_words(folder / "src.words.json", self.src.words)
        write_words(folder / "tgt.words.json", self.tgt.words)
        np.save(folder / "lexicon.keys.npy", self.keys)
        np.save(folder / "lexicon.counts.npy", self.counts)

    @classmethod
    def read(cls, folder: Path, *, lowercase: bool) -> Lexicon:
        """Read words and counts from a folder."""
        src, tgt = (
            Vocabulary(read_words(folder / f"{side}.words.json"), lowercase=lowercase)
            for side in ("src", "tgt")
        )
        keys, counts = (read_array(folder / f"lexicon.{name}.npy") for name in ("keys", "counts"))
        return cls(src, tgt, keys, counts)

    def __len__(self) -> int:
        return len(self.keys)

    @cached_property
    def src_totals(self) -> FloatArray:
        """Count the links of every source word."""
        return self._totals(self.keys // max(1, len(self.tgt)), len(self.src))

    @cached_property
    def tgt_totals(self) -> FloatArray:
        """Count the links of every target word."""
        return self._totals(self.keys % max(1, len(self.tgt)), len(self.tgt))

    def log_probabilities(
        self, pairs: Sequence[WordPair], alpha: float = ALPHA
    ) -> tuple[FloatArray, FloatArray]:
        """Give log p(target | source) and log p(source | target), both [pairs, src, tgt].

        p(t | s) = (c(s, t) + α) / (c(s) + α·V), with V the target words known and one for all
        others. So a source word never met makes all target words equally likely. Places beyond
        the end of a sentence hold what unknown words get.
        """
        src = pad_rows(self.src.find(pair[0] for pair in pairs))[:, :, None]
        tgt = pad_rows(self.tgt.find(pair[1] for pair in pairs))[:, None, :]
        joint = np.log(self.look_up(src, tgt) + np.float32(alpha))
        # The last place of the totals is that of unknown words, whose number is −1.
        src_totals = np.append(self.src_totals, np.float32(0)) + alpha * (len(self.tgt) + 1)
        tgt_totals = np.append(self.tgt_totals, np.float32(0)) + alpha * (len(self.src) + 1)
        forward, backward = joint - np.log(src_totals)[src], joint - np.log(tgt_totals)[tgt]
        return forward.astype(np.float32), backward.astype(np.float32)

    def look_up(self, src: npt.NDArray[np.int32], tgt: npt.NDArray[np.int32]) -> FloatArray:
        """Count how often source and target words, given by number, were linked."""
        keys = np.where((src < 0) | (tgt < 0), UNKNOWN, src.astype(np.int64) * len(self.tgt) + tgt)
        if len(self.keys) == 0:
            return np.zeros(keys.shape, dtype=np.float32)
        places = np.searchsorted(self.keys, keys).clip(max=len(self.keys) - 1)
        counts: FloatArray = np.where(self.keys[places] == keys, self.counts[places], np.float32(0))
        return counts

    def _totals(self, words: IntArray, n_words: int) -> FloatArray:
        return np.bincount(words, self.counts, minlength=n_words).astype(np.float32)


def pad_rows(text: NumberedText) -> npt.NDArray[np.int32]:
    """Lay sentences out as rows of equal length, filled up with −1."""
    lengths = text.lengths
    rows = np.full((len(text), int(lengths.max(initial=0))), UNKNOWN, dtype=np.int32)
    rows[np.arange(rows.shape[1]) < lengths[:, None]] = text.ids
    return rows


def _count_keys(
    pairs: NumberedPairs, links: PackedLinks, n_tgt_words: int
) -> tuple[IntArray, IntArray]:
    """Count linked words, some sentence pairs at a time: links take more room than words."""
    keys, counts = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    for start in range(0, len(pairs), CHUNK_PAIRS):
        found = links.select(start, min(start + CHUNK_PAIRS, len(pairs)))
        src = pairs.src.ids[pairs.src.offsets[found.pairs + start] + found.src]
        tgt = pairs.tgt.ids[pairs.tgt.offsets[found.pairs + start] + found.tgt]
        some = np.unique(src.astype(np.int64) * n_tgt_words + tgt, return_counts=True)
        both, places = np.unique(np.concatenate([keys, some[0]]), return_inverse=True)
        counts = np.bincount(places, np.concatenate([counts, some[1]])).astype(np.int64)
        keys = both
    return keys, counts
