"""Training and aligning with eflomal: HMM with fertility, by Gibbs sampling (Östling, 2016).

eflomal draws its random numbers from the system and takes no seed: two runs differ in a few links
of a hundred. It aligns a text while it learns from it. A new text is aligned by another, shorter
run that starts from what was counted before, so its links depend a little on the sentences that
are aligned together.

Training and aligning with fast_align: IBM-2 along the diagonal (Dyer et al., 2013).

The library is systran-align. It symmetrizes by grow-diag-final-and itself and does not give the
two directions. A trained model always gives the same links; two trainings with several threads
(OMP_NUM_THREADS) may differ in one of some thousands.

Word aligners that learn from the bitext itself: eflomal and fast_align behind one class.

A trained aligner has the links of the text it was trained on, aligns new text, and can be saved.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO, TypeAlias

import numpy as np

from calque.errors import InputError, MissingExtra
from calque.io.outputs import read_array, read_model_folder, write_model_folder
from calque.types import Links
from calque.word_alignment.counts import (
    FoundLinks,
    Lexicon,
    NumberedPairs,
    NumberedText,
    PackedLinks,
    Seams,
    Vocabulary,
    cut_long,
    find_pairs,
    number_pairs,
    read_pharaoh,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    from calque.word_alignment.protocol import AlignedBlock, WordPair

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


FORWARD, BACKWARD = "fast-align.forward", "fast-align.backward"

# fast_align's own -d -o -v: what its authors recommend.
OPTIONS = {"favor_diagonal": True, "optimize_tension": True, "variational_bayes": True}
CHUNK_PAIRS_FAST_ALIGN_ENGINE = 5_000
# In a process of its own, training can be interrupted, and takes its memory with it at the end.
TRAINING = """
import json, sys, systran_align
systran_align.generate_alignment_probabilities(**json.loads(sys.argv[1]))
"""


class FastAlignTables:
    """The probabilities that fast_align learned, as it writes them: of both directions."""

    def __init__(self, forward: bytes, backward: bytes) -> None:
        self.forward, self.backward = forward, backward

    @staticmethod
    def train(
        pairs: NumberedPairs, n_words: tuple[int, int], on_phase: Callable[[str], None]
    ) -> tuple[FastAlignTables, tuple[PackedLinks]]:
        """Learn from a text, and align it."""
        on_phase("training")
        with tempfile.TemporaryDirectory(prefix="calque-fast-align-") as folder:
            text, forward, backward = (Path(folder) / name for name in ("text", "fwd", "bwd"))
            with open(text, "w", encoding="ascii") as stream:
                for src, tgt in zip(_words(pairs.src), _words(pairs.tgt), strict=True):
                    stream.write(f"{' '.join(src)} ||| {' '.join(tgt)}\n")
            _train(text, forward, backward)
            tables = FastAlignTables(forward.read_bytes(), backward.read_bytes())
        on_phase("aligning")
        return tables, (tables.align_numbers(pairs),)

    def align(
        self, lexicon: Lexicon, pairs: Sequence[WordPair]
    ) -> tuple[tuple[PackedLinks, ...], Seams]:
        """Align a new text."""
        cut, seams = cut_long(find_pairs(pairs, lexicon.src, lexicon.tgt))
        return (self.align_numbers(cut),), seams

    def align_numbers(self, pairs: NumberedPairs) -> PackedLinks:
        """Align pairs whose words have the numbers they had in training, or −1."""
        chunks = range(0, len(pairs), CHUNK_PAIRS_FAST_ALIGN_ENGINE)
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
        """Give the links of some pairs in one array, and how many each has."""
        texts = (
            list(_words(t, start, start + CHUNK_PAIRS_FAST_ALIGN_ENGINE))
            for t in (pairs.src, pairs.tgt)
        )
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
    """Import the library, which comes with an extra."""
    try:
        import systran_align
    except ImportError as error:
        raise MissingExtra("systran-align", "align") from error
    return systran_align


def _train(text: Path, forward: Path, backward: Path) -> None:
    paths = {"forward_probs_path": str(forward), "backward_probs_path": str(backward)}
    options = json.dumps({"input_path": str(text), **paths, **OPTIONS})
    # -P: a json.py in the folder the user is in must not be taken for Python's.
    command = [sys.executable, "-P", "-c", TRAINING, options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["no message"])[-1]
        problem = f"fast_align ended with code {done.returncode}: {said}"
        raise InputError(problem, fix="is there enough memory and disk space?")


def _words(text: NumberedText, start: int = 0, stop: int | None = None) -> Iterator[list[str]]:
    """Give sentences as lists of words, their numbers: none can be taken for a separator."""
    return (list(map(str, sentence)) for sentence in text.sentences(start, stop))


StatisticalKind: TypeAlias = Literal["eflomal", "fast-align"]
Engine: TypeAlias = EflomalCounts | FastAlignTables
OnPhase: TypeAlias = Callable[[str], None]

FORMAT = "calque statistical aligner 1"
DEFAULT_SYMMETRIZATION = "grow-diag-final-and"
BLOCK_PAIRS = 10_000


@dataclass(frozen=True)
class _Library:
    """A library: its package, what it leaves behind, how many sets of links it gives."""

    package: str
    load: Callable[[], Any]
    engine: type[EflomalCounts] | type[FastAlignTables]
    n_sets: int


LIBRARIES: dict[StatisticalKind, _Library] = {
    "eflomal": _Library("eflomal", import_eflomal, EflomalCounts, 2),
    "fast-align": _Library("systran-align", import_systran_align, FastAlignTables, 1),
}


@dataclass(frozen=True, eq=False, repr=False)
class StatisticalAligner:
    """A trained eflomal or fast_align; `training` has the links of the text it learned from.

    fast_align gives a pair the same links whenever it is asked. eflomal does not: it samples,
    takes no seed, and lets the sentences of a block influence one another.
    """

    kind: StatisticalKind
    engine: Engine
    lexicon: Lexicon
    training: FoundLinks
    symmetrize: str = DEFAULT_SYMMETRIZATION

    @classmethod
    def train(
        cls,
        pairs: Iterable[WordPair],
        kind: StatisticalKind = "eflomal",
        *,
        symmetrize: str = DEFAULT_SYMMETRIZATION,
        lowercase: bool = True,
        on_phase: OnPhase = lambda phase: None,
    ) -> StatisticalAligner:
        """Learn from sentence pairs and align them; `on_phase` hears what is being done."""
        check_statistical(kind, symmetrize)
        library = LIBRARIES[kind]
        library.load()
        on_phase("reading")
        src, tgt = Vocabulary(lowercase=lowercase), Vocabulary(lowercase=lowercase)
        cut, seams = cut_long(number_pairs(pairs, src, tgt))
        if len(cut) == 0:
            fix = "give a bitext with words on both sides"
            raise InputError(f"nothing to learn from {len(seams):,} sentence pairs", fix=fix)
        engine, found = library.engine.train(cut, (len(src), len(tgt)), on_phase)
        lexicon = Lexicon.count(src, tgt, cut, found)
        return cls(kind, engine, lexicon, FoundLinks(found, seams), symmetrize)

    @property
    def n_pairs(self) -> int:
        """How many pairs it was trained on, those with an empty side included."""
        return len(self.training)

    def training_block(self, start: int, stop: int) -> AlignedBlock:
        """Give the links that pairs `start` to `stop` of the training text got in training."""
        return self.training.join(start, min(stop, self.n_pairs), self.symmetrize)

    def training_blocks(self, n_pairs: int = BLOCK_PAIRS) -> Iterator[AlignedBlock]:
        """Give the links of the training text, in its order."""
        for start in range(0, self.n_pairs, n_pairs):
            yield self.training_block(start, start + n_pairs)

    def training_directions(self, start: int, stop: int) -> tuple[Links, Links] | None:
        """Give the links of pairs of the training text forward and backward, as `directions`."""
        return self.training.directions(start, min(stop, self.n_pairs))

    def align_block(self, pairs: Sequence[WordPair], first: int = 0) -> AlignedBlock:
        """Align new pairs with what was learned; the model itself does not change."""
        found = FoundLinks(*self.engine.align(self.lexicon, pairs))
        return found.join(0, len(pairs), self.symmetrize)

    def directions(self, pairs: Sequence[WordPair]) -> tuple[Links, Links] | None:
        """Align new pairs forward and backward; None of fast_align, whose library joins them."""
        if LIBRARIES[self.kind].n_sets == 1:
            return None
        return FoundLinks(*self.engine.align(self.lexicon, pairs)).directions(0, len(pairs))

    def save(self, folder: Path) -> None:
        """Write the model, its lexicon and the training links; an older model is replaced."""
        package = LIBRARIES[self.kind].package
        settings = {
            "kind": self.kind,
            "library": f"{package} {_version(package)}",
            "calque": _version("calque"),
            "symmetrize": self.symmetrize,
            "lowercase": self.lexicon.src.lowercase,
            "pairs": self.n_pairs,
            "words": [len(self.lexicon.src), len(self.lexicon.tgt)],
        }

        def fill(draft: Path) -> None:
            for part in (self.engine, self.lexicon, self.training):
                part.write(draft)

        write_model_folder(folder, FORMAT, settings, fill)

    @classmethod
    def load(cls, folder: Path) -> StatisticalAligner:
        """Read a saved model; its library is not needed before something is to be aligned."""
        folder = Path(folder)
        settings = read_model_folder(folder, FORMAT)
        kind, symmetrize = settings["kind"], settings["symmetrize"]
        check_statistical(kind, symmetrize)
        library = LIBRARIES[kind]
        return cls(
            kind,
            library.engine.read(folder),
            Lexicon.read(folder, lowercase=settings["lowercase"]),
            FoundLinks.read(folder, library.n_sets),
            symmetrize,
        )


@dataclass(frozen=True)
class TrainingText:
    """Gives the text that an aligner was trained on the links that it got in training."""

    model: StatisticalAligner

    def align_block(self, pairs: Sequence[WordPair], first: int = 0) -> AlignedBlock:
        """Give the links of some pairs of that text, which begin with pair `first`."""
        return self.model.training_block(first, first + len(pairs))


def check_statistical(kind: str, symmetrize: str) -> None:
    """Refuse an unknown library, and a way to symmetrize that it does not offer."""
    from calque.algorithms.symmetrize import SYMMETRIZATIONS

    if kind not in LIBRARIES:
        raise InputError(f"unknown aligner {kind!r}", fix=f"choose from: {', '.join(LIBRARIES)}")
    if symmetrize not in SYMMETRIZATIONS:
        fix = f"choose from: {', '.join(SYMMETRIZATIONS)}"
        raise InputError(f"unknown symmetrization {symmetrize!r}", fix=fix)
    if kind == "fast-align" and symmetrize != DEFAULT_SYMMETRIZATION:
        problem = f"fast-align's library knows {DEFAULT_SYMMETRIZATION} only, not {symmetrize}"
        raise InputError(problem, fix="leave it so, or use eflomal")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
