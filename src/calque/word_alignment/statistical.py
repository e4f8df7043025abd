"""Word aligners that learn from the bitext itself: eflomal and fast_align behind one class.

A trained aligner has the links of its training text, aligns new text, and can be saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from calque.algorithms.symmetrize import SYMMETRIZATIONS
from calque.errors import InputError, check_choice
from calque.io.outputs import read_model_folder, write_model_folder
from calque.types import Links
from calque.word_alignment.counts import LinkLexicon
from calque.word_alignment.eflomal_engine import EflomalCounts, import_eflomal
from calque.word_alignment.fast_align_engine import FastAlignTables, import_systran_align
from calque.word_alignment.numbered_text import WordNumbering, number_pairs, split_long_pairs
from calque.word_alignment.packed_links import FoundLinks
from calque.word_alignment.protocol import AlignedBlock, WordPair, check_pairs

if TYPE_CHECKING:
    from calque.types import Progress

StatisticalKind: TypeAlias = Literal["eflomal", "fast-align"]

FORMAT = "calque statistical aligner 1"
DEFAULT_SYMMETRIZATION = "grow-diag-final-and"
# Chosen on development pairs of six language pairs, where 4 and 6 are about as good.
DEFAULT_STEM = 5


@dataclass(frozen=True)
class _Library:
    """A library: its package, how to import it, its engine, and how many sets of links it gives."""

    package: str
    load: Callable[[], Any]
    engine: type[EflomalCounts] | type[FastAlignTables]
    n_directions: int


LIBRARIES: dict[StatisticalKind, _Library] = {
    "eflomal": _Library("eflomal", import_eflomal, EflomalCounts, 2),
    "fast-align": _Library("systran-align", import_systran_align, FastAlignTables, 1),
}


@dataclass(frozen=True, eq=False, repr=False)
class StatisticalAligner:
    """A trained eflomal or fast_align; `training` has the links of its training text.

    fast_align always gives a pair the same links. eflomal does not: it samples, takes no seed, and
    the sentences of a block influence each other.

    Examples:
        >>> aligner = calque.StatisticalAligner.train(pairs, "fast-align")  # doctest: +SKIP
        >>> aligner.align([(["das", "Haus"], ["the", "house"])])  # doctest: +SKIP
        [[(0, 0), (1, 1)]]
    """

    kind: StatisticalKind
    engine: EflomalCounts | FastAlignTables
    lexicon: LinkLexicon
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
        stem: int = DEFAULT_STEM,
        progress: Progress | None = None,
    ) -> StatisticalAligner:
        """Learn from sentence pairs and align them.

        Args:
            pairs: Pairs of word lists.
            kind: "eflomal" or "fast-align".
            symmetrize: How the two directions are combined; fast-align has only the default.
            lowercase: Treat words that differ only in case as one word.
            stem: Treat words with the same first letters, of which this is the number, as one word,
                so that the forms of a word are learned together. 0 distinguishes them.
            progress: Called with the stage of the training.
        """
        check_statistical(kind, symmetrize)
        library = LIBRARIES[kind]
        library.load()

        def on_stage(stage: str) -> None:
            if progress is not None:
                progress(f"{kind}: {stage}", 0, None)

        on_stage("reading")
        src, tgt = (WordNumbering(lowercase=lowercase, stem=stem) for _ in range(2))
        parts, split = split_long_pairs(number_pairs(pairs, src, tgt))
        if len(parts) == 0:
            problem = f"there is nothing to learn from in {len(split):,} sentence pairs"
            raise InputError(problem, fix="pass a bitext with words on both sides")
        engine, found = library.engine.train(parts, (len(src), len(tgt)), on_stage)
        lexicon = LinkLexicon.count(src, tgt, parts, found)
        return cls(kind, engine, lexicon, FoundLinks(found, split), symmetrize)

    @property
    def n_pairs(self) -> int:
        """Number of training pairs, including those with an empty side."""
        return len(self.training)

    def training_block(self, start: int, stop: int) -> AlignedBlock:
        """Return the links of pairs `start` to `stop` of the training text."""
        return self.training.combine(start, min(stop, self.n_pairs), self.symmetrize)

    def training_directions(self, start: int, stop: int) -> tuple[Links, Links] | None:
        """Return forward and backward links of the training text; None with fast-align."""
        return self.training.select_directions(start, min(stop, self.n_pairs))

    def align(self, pairs: Iterable[WordPair]) -> list[list[tuple[int, int]]]:
        """Return the links of new pairs, each as a list of (source word, target word)."""
        return self.align_block(check_pairs(pairs)).links.to_lists()

    def align_block(self, pairs: Sequence[WordPair], first: int = 0) -> AlignedBlock:
        """Align new pairs; the model does not change."""
        found = FoundLinks(*self.engine.align(self.lexicon, pairs))
        return found.combine(0, len(pairs), self.symmetrize)

    def directions(self, pairs: Sequence[WordPair]) -> tuple[Links, Links] | None:
        """Return forward and backward links of new pairs; None with fast-align."""
        if LIBRARIES[self.kind].n_directions == 1:
            return None
        found = FoundLinks(*self.engine.align(self.lexicon, pairs))
        return found.select_directions(0, len(pairs))

    def save(self, folder: str | Path) -> None:
        """Write the model, its lexicon and the training links; an older model is replaced."""
        package = LIBRARIES[self.kind].package
        settings = {
            "kind": self.kind,
            "library": f"{package} {_version(package)}",
            "calque": _version("calque"),
            "symmetrize": self.symmetrize,
            "lowercase": self.lexicon.src.lowercase,
            "stem": self.lexicon.src.stem,
            "pairs": self.n_pairs,
            "words": [len(self.lexicon.src), len(self.lexicon.tgt)],
        }

        def fill(draft: Path) -> None:
            for part in (self.engine, self.lexicon, self.training):
                part.write(draft)

        write_model_folder(Path(folder), FORMAT, settings, fill)

    @classmethod
    def load(cls, folder: str | Path) -> StatisticalAligner:
        """Read a saved model; its library is imported only when something is aligned."""
        folder = Path(folder)
        settings = read_model_folder(folder, FORMAT)
        kind, symmetrize = settings["kind"], settings["symmetrize"]
        check_statistical(kind, symmetrize)
        library = LIBRARIES[kind]
        return cls(
            kind,
            library.engine.read(folder),
            # Models of earlier versions distinguish whole words.
            LinkLexicon.read(folder, lowercase=settings["lowercase"], stem=settings.get("stem", 0)),
            FoundLinks.read(folder, library.n_directions),
            symmetrize,
        )


@dataclass(frozen=True)
class TrainingText:
    """An aligner for the training text itself: its links are those found in training."""

    model: StatisticalAligner

    def align_block(self, pairs: Sequence[WordPair], first: int = 0) -> AlignedBlock:
        """Return the links of some pairs of the training text, starting with pair `first`."""
        return self.model.training_block(first, first + len(pairs))


def check_statistical(kind: str, symmetrize: str) -> None:
    """Raise InputError for an unknown library, or a symmetrization that it does not offer."""
    check_choice("aligner", kind, LIBRARIES)
    check_choice("symmetrize", symmetrize, SYMMETRIZATIONS)
    if kind == "fast-align" and symmetrize != DEFAULT_SYMMETRIZATION:
        problem = f"fast-align supports only {DEFAULT_SYMMETRIZATION}, not {symmetrize}"
        raise InputError(problem, fix="drop symmetrize, or use eflomal")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
