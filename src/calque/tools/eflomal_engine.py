"""Training and aligning with eflomal: HMM with fertility, by Gibbs sampling (Östling, 2016).

eflomal draws its random numbers from the system and takes no seed: two runs differ in a few links
of a hundred. It aligns a text while it learns from it. A new text is aligned by another, shorter
run that starts from what was counted before, so its links depend a little on the sentences that
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

from calque.tools.long_pairs import Seams, cut_long
from calque.tools.model_folder import read_array
from calque.tools.packed_links import PackedLinks, read_pharaoh
from calque.tools.word_ids import NumberedPairs, NumberedText, Vocabulary, number_pairs
from calque.types import InputError, MissingExtra

if TYPE_CHECKING:
    import numpy.typing as npt

    from calque.tools.aligning import WordPair
    from calque.tools.lexicon_counts import Lexicon

    IntArray = npt.NDArray[np.int64]

# How eflomal counts: jumps from −1,024 to 1,023, fertilities up to 7.
N_JUMPS, N_FERTILITIES = 2048, 8
N_SAMPLERS = 3
# Iterations of IBM-1, HMM and fertility on a new text. eflomal would do more the smaller the text
# is; with counts to start from, more than these changed nothing.
NEW_TEXT_ITERATIONS = (10, 10, 40)
CHUNK_PAIRS = 100_000


@dataclass(frozen=True, slots=True)
class EflomalCounts:
    """What a trained eflomal knows beside the lexicon: jumps and fertilities of both directions.

    Place k of the jumps says how often the next link went k − 1,024 words further; column k of
    the fertilities how often a word had k links.
    """

    forward_jumps: IntArray
    backward_jumps: IntArray
    forward_fertilities: IntArray
    backward_fertilities: IntArray

    @staticmethod
    def train(
        pairs: NumberedPairs, n_words: tuple[int, int], on_phase: Callable[[str], None]
    ) -> tuple[EflomalCounts, tuple[PackedLinks, PackedLinks]]:
        """Learn from a text; its links are forward, at most one a target word, and backward."""
        on_phase("training")
        with _workspace() as folder:
            _write_text(folder / "src", pairs.src, n_words[0])
            _write_text(folder / "tgt", pairs.tgt, n_words[1])
            found = _run(folder)
        on_phase("counting")
        return EflomalCounts.count(pairs, *found, n_words), found

    @staticmethod
    def count(
        pairs: NumberedPairs, forward: PackedLinks, backward: PackedLinks, n_words: tuple[int, int]
    ) -> EflomalCounts:
        """Count what the links of the training text show."""
        return EflomalCounts(
            _count_jumps(pairs.src, forward, 0),
            _count_jumps(pairs.tgt, backward, 1),
            _count_fertilities(pairs.src, forward, 0, n_words[0]),
            _count_fertilities(pairs.tgt, backward, 1, n_words[1]),
        )

    def align(
        self, lexicon: Lexicon, pairs: Sequence[WordPair]
    ) -> tuple[tuple[PackedLinks, ...], Seams]:
        """Align a new text, whose words get numbers of their own."""
        src, tgt = (Vocabulary(lowercase=side.lowercase) for side in (lexicon.src, lexicon.tgt))
        cut, seams = cut_long(number_pairs(pairs, src, tgt))
        if len(cut) == 0:
            return (PackedLinks.of([]), PackedLinks.of([])), seams
        with _workspace() as folder:
            # One word more than there are: it stands for all that this text does not have.
            _write_text(folder / "src", cut.src, len(src) + 1)
            _write_text(folder / "tgt", cut.tgt, len(tgt) + 1)
            with open(folder / "priors", "w", encoding="ascii") as stream:
                self._write_priors(stream, lexicon, src, tgt)
            return _run(folder, "priors", NEW_TEXT_ITERATIONS), seams

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
        self, stream: TextIO, lexicon: Lexicon, src: Vocabulary, tgt: Vocabulary
    ) -> None:
        """Write what is known of the words of a text, in the format of eflomal's program.

        Other than eflomal's own tool, this counts the words that had no link (as fertility 0) and
        the links to words that this text does not have; without them words look more eager to be
        linked, and surer of it, than they were: 2 to 3 points of AER on two test sets.
        """
        known_src, known_tgt = lexicon.src.find([src.words]).ids, lexicon.tgt.find([tgt.words]).ids
        tables = [
            _select_lexicon(lexicon, known_src, known_tgt),
            _list_jumps(self.forward_jumps),
            _list_jumps(self.backward_jumps),
            _list_fertilities(self.forward_fertilities, known_src),
            _list_fertilities(self.backward_fertilities, known_tgt),
        ]
        # eflomal counts an empty word among the words of either side.
        print(len(src) + 2, len(tgt) + 2, *map(len, tables), file=stream)
        for table in tables:
            np.savetxt(stream, table, fmt=["%d"] * (table.shape[1] - 1) + ["%g"])


def import_eflomal() -> Any:
    """Import eflomal, which is not installed with Calque: its licence is the GPL."""
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
        problem = f"eflomal's program ended with code {error.returncode}"
        raise InputError(problem, fix="is there enough memory and disk space?") from error
    return read_pharaoh(folder / "forward"), read_pharaoh(folder / "backward")


def _write_text(path: Path, text: NumberedText, n_words: int) -> None:
    """Write sentences as eflomal's program reads them: length, then word numbers."""
    with open(path, "w", encoding="ascii") as stream:
        print(len(text), n_words, file=stream)
        for sentence in text.sentences():
            stream.write(" ".join(map(str, (len(sentence), *sentence))) + "\n")


def _count_jumps(text: NumberedText, links: PackedLinks, side: int) -> IntArray:
    """Count how far apart, on one side, the links of words next to each other on the other are.

    Before the first word is −1, after the last the length of the sentence.
    """
    counts = np.zeros(N_JUMPS, dtype=np.int64)
    for start in range(0, len(text), CHUNK_PAIRS):
        stop = min(start + CHUNK_PAIRS, len(text))
        found = links.select(start, stop)
        here, there = (found.src, found.tgt) if side == 0 else (found.tgt, found.src)
        numbers = np.arange(stop - start)
        order = np.lexsort((there, found.pairs))
        # The two ends of every sentence go in as links before and after all others.
        owners = np.concatenate([numbers, found.pairs[order], numbers])
        ends = np.full(stop - start, -1), here[order], text.lengths[start:stop]
        in_turn = np.argsort(owners, kind="stable")
        places, owners = np.concatenate(ends)[in_turn], owners[in_turn]
        jumps = np.diff(places)[np.diff(owners) == 0]
        counts += np.bincount((jumps + N_JUMPS // 2).clip(0, N_JUMPS - 1), minlength=N_JUMPS)
    return counts


def _count_fertilities(text: NumberedText, links: PackedLinks, side: int, n_words: int) -> IntArray:
    """Count how many links the words had, none too."""
    counts = np.zeros(n_words * N_FERTILITIES, dtype=np.int64)
    for start in range(0, len(text), CHUNK_PAIRS):
        bounds = text.offsets[start : start + CHUNK_PAIRS + 1]
        ids = text.ids[bounds[0] : bounds[-1]].astype(np.int64)
        found = links.select(start, start + len(bounds) - 1)
        places = bounds[found.pairs] - bounds[0] + (found.src, found.tgt)[side]
        n_links = np.bincount(places, minlength=len(ids)).clip(max=N_FERTILITIES - 1)
        counts += np.bincount(ids * N_FERTILITIES + n_links, minlength=len(counts))
    return counts.reshape(n_words, N_FERTILITIES)


def _select_lexicon(
    lexicon: Lexicon, src: npt.NDArray[np.int32], tgt: npt.NDArray[np.int32]
) -> npt.NDArray[np.float64]:
    """List the counts of a text's words; those with other words go to a word beyond the last."""
    places = [_place_of(src, len(lexicon.src)), _place_of(tgt, len(lexicon.tgt))]
    n_tgt = max(1, len(lexicon.tgt))
    numbers = [places[0][lexicon.keys // n_tgt], places[1][lexicon.keys % n_tgt]]
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


def _place_of(words: npt.NDArray[np.int32], n_words: int) -> IntArray:
    """Say for all words of the lexicon which of a text's words they are, from 1; 0 for none."""
    places = np.zeros(n_words, dtype=np.int64)
    known = np.flatnonzero(words >= 0)
    places[words[known]] = known + 1
    return places


def _list_jumps(counts: IntArray) -> npt.NDArray[np.float64]:
    jumps = np.flatnonzero(counts)
    return np.stack([jumps - N_JUMPS // 2, counts[jumps]], axis=1).astype(np.float64)


def _list_fertilities(counts: IntArray, words: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
    known = np.flatnonzero(words >= 0)
    table = counts[words[known]]
    rows, fertilities = np.nonzero(table)
    columns = [known[rows] + 1, fertilities, table[rows, fertilities]]
    return np.stack(columns, axis=1).astype(np.float64)
