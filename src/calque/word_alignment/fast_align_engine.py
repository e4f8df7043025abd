"""Training and aligning with fast_align: IBM model 2 along the diagonal (Dyer et al., 2013).

The library is systran-align. It combines the two directions by grow-diag-final-and itself and does
not return them. A trained model always gives the same links; two trainings with several threads
(OMP_NUM_THREADS) may differ in one link of some thousands.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calque.errors import InputError, MissingExtra
from calque.word_alignment.counts import LinkLexicon
from calque.word_alignment.numbered_text import (
    NumberedPairs,
    NumberedText,
    SplitPairs,
    find_pairs,
    split_long_pairs,
)
from calque.word_alignment.packed_links import PackedLinks

if TYPE_CHECKING:
    import numpy.typing as npt

    from calque.word_alignment.protocol import WordPair

    IntArray = npt.NDArray[np.int64]

FORWARD, BACKWARD = "fast-align.forward", "fast-align.backward"

# fast_align's options -d -o -v, which its authors recommend.
OPTIONS = {"favor_diagonal": True, "optimize_tension": True, "variational_bayes": True}
CHUNK_PAIRS = 5_000
# In a separate process, training can be interrupted and its memory is released at the end.
TRAINING = """
import json, sys, systran_align
systran_align.generate_alignment_probabilities(**json.loads(sys.argv[1]))
"""


class FastAlignTables:
    """The probabilities of both directions that fast_align learned, in its own file format."""

    def __init__(self, forward: bytes, backward: bytes) -> None:
        self.forward, self.backward = forward, backward

    @staticmethod
    def train(
        pairs: NumberedPairs, n_words: tuple[int, int], on_stage: Callable[[str], None]
    ) -> tuple[FastAlignTables, tuple[PackedLinks]]:
        """Learn from a text; return also its links."""
        on_stage("training")
        with tempfile.TemporaryDirectory(prefix="calque-fast-align-") as folder:
            text, forward, backward = (Path(folder) / name for name in ("text", "fwd", "bwd"))
            with open(text, "w", encoding="ascii") as stream:
                for src, tgt in zip(_words(pairs.src), _words(pairs.tgt), strict=True):
                    stream.write(f"{' '.join(src)} ||| {' '.join(tgt)}\n")
            _train(text, forward, backward)
            tables = FastAlignTables(forward.read_bytes(), backward.read_bytes())
        on_stage("aligning")
        return tables, (tables.align_numbers(pairs),)

    def align(
        self, lexicon: LinkLexicon, pairs: Sequence[WordPair]
    ) -> tuple[tuple[PackedLinks, ...], SplitPairs]:
        """Align a new text."""
        parts, split = split_long_pairs(find_pairs(pairs, lexicon.src, lexicon.tgt))
        return (self.align_numbers(parts),), split

    def align_numbers(self, pairs: NumberedPairs) -> PackedLinks:
        """Align pairs whose words have the same numbers as in training; an unknown word is −1."""
        chunks = range(0, len(pairs), CHUNK_PAIRS)
        return PackedLinks.of(self._align_chunk(pairs, start) for start in chunks)

    def write(self, folder: Path) -> None:
        """Write the tables into a folder."""
        (folder / FORWARD).write_bytes(self.forward)
        (folder / BACKWARD).write_bytes(self.backward)

    @classmethod
    def read(cls, folder: Path) -> FastAlignTables:
        """Read the tables from a folder."""
        return cls((folder / FORWARD).read_bytes(), (folder / BACKWARD).read_bytes())

    def _align_chunk(self, pairs: NumberedPairs, start: int) -> tuple[IntArray, IntArray]:
        """Return the links of some pairs in one array, and the number of links of each pair."""
        texts = (list(_words(t, start, start + CHUNK_PAIRS)) for t in (pairs.src, pairs.tgt))
        links = [found["alignments"] for found in self._aligner.align_batch(*texts)]
        ends = np.fromiter(chain.from_iterable(chain.from_iterable(links)), dtype=np.int64)
        return ends, np.array(list(map(len, links)), dtype=np.int64)

    @cached_property
    def _aligner(self) -> Any:
        systran_align = import_systran_align()
        with tempfile.TemporaryDirectory(prefix="calque-fast-align-") as folder:
            self.write(Path(folder))
            return systran_align.Aligner(f"{folder}/{FORWARD}", f"{folder}/{BACKWARD}")


def import_systran_align() -> Any:
    """Import the library systran-align, an optional dependency."""
    try:
        import systran_align
    except ImportError as error:
        limits = ", which needs Python 3.11 on Linux and x86-64; elsewhere choose eflomal"
        raise MissingExtra("systran-align", "align", limits) from error
    return systran_align


def _train(text: Path, forward: Path, backward: Path) -> None:
    paths = {"forward_probs_path": str(forward), "backward_probs_path": str(backward)}
    options = json.dumps({"input_path": str(text), **paths, **OPTIONS})
    # -P: a json.py in the current folder must not replace that of Python.
    command = [sys.executable, "-P", "-c", TRAINING, options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        message = (done.stderr.strip().splitlines() or ["no message"])[-1]
        problem = f"fast_align failed with exit code {done.returncode}: {message}"
        raise InputError(problem, fix="check that there is enough memory and disk space")


def _words(text: NumberedText, start: int = 0, stop: int | None = None) -> Iterator[list[str]]:
    """Yield sentences as lists of word numbers; no number can be mistaken for a separator."""
    return (list(map(str, sentence)) for sentence in text.sentences(start, stop))
