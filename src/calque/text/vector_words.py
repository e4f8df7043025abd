"""Words and their vectors on the way into training: read in blocks, without what is no word."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calque.text.batching import Ragged, reorder
from calque.text.cleaning import CleaningReport
from calque.text.files import PathLike
from calque.text.word2vec import scan_vectors
from calque.text.word2vec_text import VectorBlock

if TYPE_CHECKING:
    import numpy.typing as npt

    Matrix = npt.NDArray[np.float32]
    Flags = npt.NDArray[np.bool_]


def read_vector_blocks(
    path: PathLike, max_words: int | None = None, size: int = 1024
) -> Iterator[VectorBlock]:
    """Read the first words of a file with their vectors, `size` or a few more of them at a time."""
    rest = max_words
    for block in _join(scan_vectors(path), size):
        if rest is not None:
            block = VectorBlock(block.words[:rest], block.matrix[:rest])
            rest -= len(block.words)
        yield block
        if rest == 0:
            return


def _join(blocks: Iterable[VectorBlock], size: int) -> Iterator[VectorBlock]:
    """Put small blocks together."""
    words: list[str] = []
    parts: list[Matrix] = []
    for block in blocks:
        words += block.words
        parts.append(block.matrix)
        if len(words) >= size:
            yield VectorBlock(words, np.concatenate(parts))
            words, parts = [], []
    if words:
        yield VectorBlock(words, np.concatenate(parts))


@dataclass(slots=True)
class WordFilter:
    """Drops words that an encoder could not tell from others, and counts them.

    They have no subwords, or the tokenizer knows them only by a special token: characters that
    are unknown to it, or fastText's `</s>`. Of equal words the first stays. A vector of zeros, as
    some programs give to words they know nothing of, teaches nothing: its word goes, too.
    """

    special: npt.NDArray[np.int64]
    report: CleaningReport
    seen: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, tokenizer: Path, report: CleaningReport) -> WordFilter:
        """Read the special tokens off `tokenizer.json`."""
        added = json.loads(tokenizer.read_text(encoding="utf-8"))["added_tokens"]
        special = [int(token["id"]) for token in added if token["special"]]
        return cls(np.array(special, dtype=np.int64), report)

    def select(self, block: VectorBlock, pieces: Ragged) -> tuple[Ragged, Matrix]:
        """Keep the subwords and the vectors of words worth keeping."""
        n_words = len(block.words)
        owners = np.repeat(np.arange(n_words), pieces.lengths)
        n_special = np.bincount(owners[np.isin(pieces.ids, self.special)], minlength=n_words)
        is_new = np.fromiter(map(self._note, block.words), np.bool_, n_words)
        self.report.n_read += n_words
        keep = np.ones(n_words, dtype=np.bool_)
        for reason, is_unfit in (
            ("no subwords", pieces.lengths == 0),
            ("unknown to the tokenizer", n_special > 0),
            ("duplicate", ~is_new),
            ("a vector of zeros", ~block.matrix.any(axis=1)),
        ):
            dropped = np.flatnonzero(keep & is_unfit)
            drops = ((block.words[row],) for row in dropped.tolist())
            self.report.note_drops(reason, len(dropped), drops)
            keep &= ~is_unfit
        kept = np.flatnonzero(keep)
        self.report.n_kept += len(kept)
        return reorder(pieces, kept), block.matrix[kept]

    def _note(self, word: str) -> bool:
        """Tell whether a word is new, and remember it."""
        n_before = len(self.seen)
        self.seen.add(word)
        return len(self.seen) > n_before
