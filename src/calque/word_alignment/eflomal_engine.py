"""Training and aligning with eflomal: an HMM with fertility, by Gibbs sampling (Östling, 2016).

eflomal draws its random numbers from the system and takes no seed: two runs differ in a few percent
of the links. It aligns a text while it learns from it. A new text is aligned by another, shorter
run that starts from the earlier counts, so that its links depend a little on the sentences that
are aligned together.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from calque.errors import InputError, MissingExtra
from calque.io.structured import read_array
from calque.word_alignment.counts import LinkLexicon
from calque.word_alignment.numbered_text import (
    NumberedPairs,
    NumberedText,
    SplitPairs,
    WordNumbering,
    number_pairs,
    split_long_pairs,
)
from calque.word_alignment.packed_links import PackedLinks, read_pharaoh

if TYPE_CHECKING:
    import numpy.typing as npt

    from calque.word_alignment.protocol import WordPair

    IntArray = npt.NDArray[np.int64]

# eflomal counts jumps from −1,024 to 1,023 and fertilities up to 7.
N_JUMPS, N_FERTILITIES = 2048, 8
N_SAMPLERS = 3
# Iterations of IBM-1, HMM and fertility on a new text. By default eflomal does more of them the
# smaller the text is; with counts to start from, more than these changed nothing.
NEW_TEXT_ITERATIONS = (10, 10, 40)
CHUNK_PAIRS = 100_000


@dataclass(frozen=True, slots=True)
class EflomalCounts:
    """What eflomal learned besides the lexicon: jumps and fertilities of both directions.

    Entry k of the jumps counts how often the next link was k − 1,024 words further. Column k of the
    fertilities counts how often a word had k links.
    """

    forward_jumps: IntArray
    backward_jumps: IntArray
    forward_fertilities: IntArray
    backward_fertilities: IntArray

    @staticmethod
    def train(
        pairs: NumberedPairs, n_words: tuple[int, int], on_stage: Callable[[str], None]
    ) -> tuple[EflomalCounts, tuple[PackedLinks, PackedLinks]]:
        """Learn from a text; return also its forward and backward links."""
        on_stage("training")
        with _workspace() as folder:
            _write_text(folder / "src", pairs.src, n_words[0])
            _write_text(folder / "tgt", pairs.tgt, n_words[1])
            found = _run(folder)
        on_stage("counting")
        return EflomalCounts.count(pairs, *found, n_words), found

    @staticmethod
    def count(
        pairs: NumberedPairs, forward: PackedLinks, backward: PackedLinks, n_words: tuple[int, int]
    ) -> EflomalCounts:
        """Count jumps and fertilities in the links of the training text."""
        return EflomalCounts(
            _count_jumps(pairs.src, forward, 0),
            _count_jumps(pairs.tgt, backward, 1),
            _count_fertilities(pairs.src, forward, 0, n_words[0]),
            _count_fertilities(pairs.tgt, backward, 1, n_words[1]),
        )

    def align(
        self, lexicon: LinkLexicon, pairs: Sequence[WordPair]
    ) -> tuple[tuple[PackedLinks, ...], SplitPairs]:
        """Align a new text; its words are numbered separately from those of the lexicon."""
        src, tgt = (
            WordNumbering(lowercase=side.lowercase, stem=side.stem)
            for side in (lexicon.src, lexicon.tgt)
        )
        parts, split = split_long_pairs(number_pairs(pairs, src, tgt))
        if len(parts) == 0:
            return (PackedLinks.of([]), PackedLinks.of([])), split
        with _workspace() as folder:
            # One additional word stands for all words that do not occur in this text.
            _write_text(folder / "src", parts.src, len(src) + 1)
            _write_text(folder / "tgt", parts.tgt, len(tgt) + 1)
            with open(folder / "priors", "w", encoding="ascii") as stream:
                self._write_priors(stream, lexicon, src, tgt)
            return _run(folder, "priors", NEW_TEXT_ITERATIONS), split

    def write(self, folder: Path) -> None:
        """Write the counts into a folder."""
        for field in fields(self):
            np.save(folder / f"eflomal.{field.name}.npy", getattr(self, field.name))

    @classmethod
    def read(cls, folder: Path) -> EflomalCounts:
        """Read the counts from a folder."""
        names = [field.name for field in fields(cls)]
        return cls(*(read_array(folder / f"eflomal.{name}.npy") for name in names))

    def _write_priors(
        self, stream: TextIO, lexicon: LinkLexicon, src: WordNumbering, tgt: WordNumbering
    ) -> None:
        """Write the counts for the words of a text in the format of eflomal's program.

        Unlike eflomal's own tool, this includes words without links (as fertility 0) and links to
        words that do not occur in this text. Without them, probabilities are overestimated: it
        costs 2 to 3 points of AER on two test sets.
        """
        known_src, known_tgt = lexicon.src.find([src.words]).ids, lexicon.tgt.find([tgt.words]).ids
        tables = [
            _select_lexicon(lexicon, known_src, known_tgt),
            _list_jumps(self.forward_jumps),
            _list_jumps(self.backward_jumps),
            _list_fertilities(self.forward_fertilities, known_src),
            _list_fertilities(self.backward_fertilities, known_tgt),
        ]
        # eflomal adds an empty word to the words of either side.
        print(len(src) + 2, len(tgt) + 2, *map(len, tables), file=stream)
        for table in tables:
            np.savetxt(stream, table, fmt=["%d"] * (table.shape[1] - 1) + ["%g"])


def import_eflomal() -> Any:
    """Import eflomal, which is not installed with Calque because its license is the GPL."""
    try:
        import eflomal  # type: ignore[import-untyped, import-not-found, unused-ignore]
    except ImportError as error:
        raise MissingExtra("eflomal", "eflomal") from error
    return eflomal


@contextmanager
def _workspace() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="calque-eflomal-") as folder:
        yield Path(folder)


def _run(
    folder: Path, priors: str | None = None, iterations: tuple[int, int, int] | None = None
) -> tuple[PackedLinks, PackedLinks]:
    """Run eflomal's program on the texts in a folder; return forward and backward links."""
    eflomal = import_eflomal()
    try:
        eflomal.align(
            str(folder / "src"),
            str(folder / "tgt"),
            links_filename_fwd=str(folder / "forward"),
            links_filename_rev=str(folder / "backward"),
            priors_filename=None if priors is None else str(folder / priors),
            n_iterations=iterations,
            n_samplers=N_SAMPLERS,
        )
    except subprocess.CalledProcessError as error:
        problem = f"eflomal's program failed with exit code {error.returncode}"
        raise InputError(problem, fix="check that there is enough memory and disk space") from error
    return read_pharaoh(folder / "forward"), read_pharaoh(folder / "backward")


def _write_text(path: Path, text: NumberedText, n_words: int) -> None:
    """Write sentences in the format of eflomal's program: length, then word numbers."""
    with open(path, "w", encoding="ascii") as stream:
        print(len(text), n_words, file=stream)
        for sentence in text.sentences():
            stream.write(" ".join(map(str, (len(sentence), *sentence))) + "\n")


def _count_jumps(text: NumberedText, links: PackedLinks, side: int) -> IntArray:
    """Count the distances on one side between the links of neighboring words of the other side.

    Every sentence has an additional link to −1 before, and to its length after, all others.
    """
    counts = np.zeros(N_JUMPS, dtype=np.int64)
    for start in range(0, len(text), CHUNK_PAIRS):
        stop = min(start + CHUNK_PAIRS, len(text))
        found = links.select(start, stop)
        here, there = (found.src, found.tgt) if side == 0 else (found.tgt, found.src)
        numbers = np.arange(stop - start)
        order = np.lexsort((there, found.pairs))
        owners = np.concatenate([numbers, found.pairs[order], numbers])
        ends = np.full(stop - start, -1), here[order], text.lengths[start:stop]
        by_owner = np.argsort(owners, kind="stable")
        positions, owners = np.concatenate(ends)[by_owner], owners[by_owner]
        jumps = np.diff(positions)[np.diff(owners) == 0]
        counts += np.bincount((jumps + N_JUMPS // 2).clip(0, N_JUMPS - 1), minlength=N_JUMPS)
    return counts


def _count_fertilities(text: NumberedText, links: PackedLinks, side: int, n_words: int) -> IntArray:
    """Count for every word how often it had 0, 1, 2, … links."""
    counts = np.zeros(n_words * N_FERTILITIES, dtype=np.int64)
    for start in range(0, len(text), CHUNK_PAIRS):
        bounds = text.offsets[start : start + CHUNK_PAIRS + 1]
        ids = text.ids[bounds[0] : bounds[-1]].astype(np.int64)
        found = links.select(start, start + len(bounds) - 1)
        positions = bounds[found.pairs] - bounds[0] + (found.src, found.tgt)[side]
        n_links = np.bincount(positions, minlength=len(ids)).clip(max=N_FERTILITIES - 1)
        counts += np.bincount(ids * N_FERTILITIES + n_links, minlength=len(counts))
    return counts.reshape(n_words, N_FERTILITIES)


def _select_lexicon(
    lexicon: LinkLexicon, src: npt.NDArray[np.int32], tgt: npt.NDArray[np.int32]
) -> npt.NDArray[np.float64]:
    """Return the counts of a text's words as rows (source, target, count), numbered from 1.

    `src` and `tgt` are the numbers of the text's words in the lexicon. Counts with words that do
    not occur in the text go to one word beyond the last.
    """
    positions = [_invert(src, len(lexicon.src)), _invert(tgt, len(lexicon.tgt))]
    n_tgt = max(1, len(lexicon.tgt))
    numbers = [positions[0][lexicon.keys // n_tgt], positions[1][lexicon.keys % n_tgt]]
    is_here = (numbers[0] > 0) & (numbers[1] > 0)
    i, j, counts = numbers[0][is_here], numbers[1][is_here], lexicon.counts[is_here]
    tables = [np.stack([i, j, counts], axis=1)]
    for side, (words, totals, here) in enumerate(
        [(src, lexicon.src_totals, i), (tgt, lexicon.tgt_totals, j)]
    ):
        known = np.flatnonzero(words >= 0)
        rest = totals[words[known]] - np.bincount(here, counts, len(words) + 1)[known + 1]
        others = np.full(len(known), len((tgt, src)[side]) + 1)
        columns = [known + 1, others] if side == 0 else [others, known + 1]
        tables.append(np.stack([*columns, rest], axis=1)[rest > 0])
    return np.concatenate(tables)


def _invert(words: npt.NDArray[np.int32], n_words: int) -> IntArray:
    """Return the number in the text, from 1, of every word of the lexicon; 0 if it is absent."""
    numbers = np.zeros(n_words, dtype=np.int64)
    known = np.flatnonzero(words >= 0)
    numbers[words[known]] = known + 1
    return numbers


def _list_jumps(counts: IntArray) -> npt.NDArray[np.float64]:
    jumps = np.flatnonzero(counts)
    return np.stack([jumps - N_JUMPS // 2, counts[jumps]], axis=1).astype(np.float64)


def _list_fertilities(counts: IntArray, words: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
    known = np.flatnonzero(words >= 0)
    table = counts[words[known]]
    rows, fertilities = np.nonzero(table)
    columns = [known[rows] + 1, fertilities, table[rows, fertilities]]
    return np.stack(columns, axis=1).astype(np.float64)
