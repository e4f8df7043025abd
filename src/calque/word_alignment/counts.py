"""How often words were linked to each other in a text: the lexicon of a statistical aligner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calque.io.outputs import read_word_list, write_word_list
from calque.io.structured import read_array
from calque.word_alignment.numbered_text import UNKNOWN, NumberedPairs, NumberedText, WordNumbering

if TYPE_CHECKING:
    import numpy.typing as npt

    from calque.word_alignment.packed_links import PackedLinks

    IntArray = npt.NDArray[np.int64]
    FloatArray = npt.NDArray[np.float32]

CHUNK_PAIRS = 100_000


@dataclass(frozen=True, eq=False, repr=False)
class LinkLexicon:
    """Counts of linked word pairs; `keys` are sorted numbers `src · n_tgt_words + tgt`."""

    src: WordNumbering
    tgt: WordNumbering
    keys: IntArray
    counts: FloatArray

    @staticmethod
    def count(
        src: WordNumbering,
        tgt: WordNumbering,
        pairs: NumberedPairs,
        directions: Sequence[PackedLinks],
    ) -> LinkLexicon:
        """Count linked words; of two directions of links, each counts ½."""
        tables = [_count_keys(pairs, links, len(tgt)) for links in directions]
        keys = np.unique(np.concatenate([keys for keys, _ in tables]))
        counts = np.zeros(len(keys), dtype=np.float32)
        for some, numbers in tables:
            counts[np.searchsorted(keys, some)] += (numbers / len(directions)).astype(np.float32)
        return LinkLexicon(src, tgt, keys, counts)

    def write(self, folder: Path) -> None:
        """Write words and counts into a folder."""
        write_word_list(folder / "src.words.json", self.src.words)
        write_word_list(folder / "tgt.words.json", self.tgt.words)
        np.save(folder / "lexicon.keys.npy", self.keys)
        np.save(folder / "lexicon.counts.npy", self.counts)

    @classmethod
    def read(cls, folder: Path, *, lowercase: bool, stem: int) -> LinkLexicon:
        """Read words and counts from a folder."""
        src, tgt = (
            WordNumbering(
                read_word_list(folder / f"{side}.words.json"), lowercase=lowercase, stem=stem
            )
            for side in ("src", "tgt")
        )
        keys, counts = (read_array(folder / f"lexicon.{name}.npy") for name in ("keys", "counts"))
        return cls(src, tgt, keys, counts)

    def __len__(self) -> int:
        return len(self.keys)

    @cached_property
    def src_totals(self) -> FloatArray:
        """Number of links of every source word."""
        return self._totals(self.keys // max(1, len(self.tgt)), len(self.src))

    @cached_property
    def tgt_totals(self) -> FloatArray:
        """Number of links of every target word."""
        return self._totals(self.keys % max(1, len(self.tgt)), len(self.tgt))

    def look_up(self, src: npt.NDArray[np.int32], tgt: npt.NDArray[np.int32]) -> FloatArray:
        """Return how often source and target words, given by number, were linked."""
        keys = np.where((src < 0) | (tgt < 0), UNKNOWN, src.astype(np.int64) * len(self.tgt) + tgt)
        if len(self.keys) == 0:
            return np.zeros(keys.shape, dtype=np.float32)
        index = np.searchsorted(self.keys, keys).clip(max=len(self.keys) - 1)
        counts: FloatArray = np.where(self.keys[index] == keys, self.counts[index], np.float32(0))
        return counts

    def _totals(self, words: IntArray, n_words: int) -> FloatArray:
        return np.bincount(words, self.counts, minlength=n_words).astype(np.float32)


def pad_rows(text: NumberedText) -> npt.NDArray[np.int32]:
    """Return sentences as rows of equal length, padded with −1."""
    lengths = text.lengths
    rows = np.full((len(text), int(lengths.max(initial=0))), UNKNOWN, dtype=np.int32)
    rows[np.arange(rows.shape[1]) < lengths[:, None]] = text.ids
    return rows


def _count_keys(
    pairs: NumberedPairs, links: PackedLinks, n_tgt_words: int
) -> tuple[IntArray, IntArray]:
    """Count linked words in chunks of pairs: unpacked links need more memory than words."""
    keys, counts = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    for start in range(0, len(pairs), CHUNK_PAIRS):
        found = links.select(start, min(start + CHUNK_PAIRS, len(pairs)))
        src = pairs.src.ids[pairs.src.offsets[found.pairs + start] + found.src]
        tgt = pairs.tgt.ids[pairs.tgt.offsets[found.pairs + start] + found.tgt]
        some = np.unique(src.astype(np.int64) * n_tgt_words + tgt, return_counts=True)
        keys, index = np.unique(np.concatenate([keys, some[0]]), return_inverse=True)
        counts = np.bincount(index, np.concatenate([counts, some[1]])).astype(np.int64)
    return keys, counts
