"""Word aligners that learn from the bitext itself: eflomal and fast_align behind one class.

A trained aligner has the links of the text it was trained on, aligns new text, and can be saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from calque.tools.eflomal_engine import EflomalCounts, import_eflomal
from calque.tools.fast_align_engine import FastAlignTables, import_systran_align
from calque.tools.lexicon_counts import Lexicon
from calque.tools.long_pairs import cut_long
from calque.tools.model_folder import read_model_folder, write_model_folder
from calque.tools.packed_links import FoundLinks
from calque.tools.word_ids import Vocabulary, number_pairs
from calque.types import InputError, Links

if TYPE_CHECKING:
    from calque.tools.aligning import AlignedBlock, WordPair

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
    from calque.align.symmetrize import SYMMETRIZATIONS

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
