"""Word vectors of unit length, ready to be compared with those of another language."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from calque.align.similarity import normalize_rows
from calque.models.static import WordVectors, read_vectors
from calque.text.files import PathLike, SkipBad, shown
from calque.types import InputError

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Float
    from torch import Tensor

    IntArray = npt.NDArray[np.int64]

MAX_WORDS = 200_000  # as MUSE and most papers
SUFFIXES = tuple(
    kind + packing for kind in (".vec", ".bin") for packing in ("", ".gz", ".xz", ".zst")
)
N_KEPT = 3  # spaces in memory: the pivot, and a pair's two others


@dataclass(frozen=True, eq=False)
class VectorSpace:
    """The words of a language, the most frequent first, and their vectors at length one.

    A vector of zeros is near to nothing, so words that have one are left out: `n_zero` of them.
    `n_read` words were read, `n_duplicates` repeated ones beside them left out.
    """

    name: str
    words: Sequence[str]
    rows: Float[Tensor, "words hidden"]
    n_read: int
    n_zero: int = 0
    n_duplicates: int = 0

    @classmethod
    def of(cls, vectors: WordVectors, name: str, device: torch.device | str = "cpu") -> VectorSpace:
        """Scale vectors to length one, on a device."""
        rows = normalize_rows(torch.from_numpy(np.asarray(vectors.matrix)).to(device))
        words, n_duplicates = vectors.words, vectors.n_duplicates
        kept = rows.any(dim=1).nonzero()[:, 0]
        n_zero = len(words) - len(kept)
        if n_zero:
            rows, words = rows[kept], [words[row] for row in kept.tolist()]
        if not words:
            raise InputError("all vectors are zero", file=name, fix="make the vectors again")
        return cls(name, words, rows, len(vectors), n_zero, n_duplicates)

    def __len__(self) -> int:
        return len(self.words)

    @cached_property
    def index(self) -> dict[str, int]:
        """The row of every word."""
        return {word: row for row, word in enumerate(self.words)}

    def look_up(self, words: Iterable[str]) -> IntArray:
        """Give a row for every word asked for, −1 for the unknown."""
        return np.array([self.index.get(word, -1) for word in words], dtype=np.int64)


def load_space(
    path: PathLike,
    max_words: int | None = MAX_WORDS,
    device: torch.device | str = "cpu",
    skip_bad: SkipBad | None = None,
) -> VectorSpace:
    """Read the vectors of the first words of a file, which are the most frequent."""
    vectors = read_vectors(path, max_words=max_words, skip_bad=skip_bad)
    return VectorSpace.of(vectors, shown(path), device)


def check_widths(src: VectorSpace, tgt: VectorSpace) -> None:
    """Refuse spaces whose vectors cannot be compared."""
    widths = src.rows.shape[1], tgt.rows.shape[1]
    if widths[0] != widths[1]:
        raise InputError(
            f"its vectors have {widths[0]} numbers, those of {tgt.name} have {widths[1]}",
            file=src.name,
            fix="give vectors of one space, such as `calque map` writes",
        )


class VectorFolder:
    """Vectors of several languages in one space: a folder with `de.vec`, `en.vec` and so on."""

    def __init__(
        self,
        folder: Path,
        device: torch.device | str = "cpu",
        max_words: int | None = MAX_WORDS,
    ) -> None:
        self.folder, self.device, self.max_words = folder, device, max_words
        self.files = _find_files(folder)
        self._loaded: dict[str, VectorSpace] = {}

    @property
    def languages(self) -> list[str]:
        """The languages there are vectors of."""
        return list(self.files)

    def load(self, language: str) -> VectorSpace:
        """Read the vectors of a language; those used last stay in memory."""
        if language not in self.files:
            fix = f"choose from: {' '.join(self.files)}"
            raise InputError(f"no vectors of {language!r}", file=self.folder, fix=fix)
        space = self._loaded.pop(language, None)
        if space is None:
            while len(self._loaded) >= N_KEPT:
                self._loaded.pop(next(iter(self._loaded)))
            space = load_space(self.files[language], self.max_words, self.device)
        self._loaded[language] = space
        return space

    def load_pair(self, src: str, tgt: str) -> tuple[VectorSpace, VectorSpace]:
        """Read the vectors of two languages, which must be of one width."""
        spaces = self.load(src), self.load(tgt)
        check_widths(*spaces)
        return spaces


def _find_files(folder: Path) -> dict[str, Path]:
    """Find one file a language; the name says which."""
    if not folder.is_dir():
        raise InputError("no such folder", file=folder, fix="give a folder with de.vec, en.vec …")
    files: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        suffix = next((end for end in SUFFIXES if path.name.endswith(end)), None)
        if suffix is None or not (language := path.name.removesuffix(suffix)):
            continue
        if language in files:
            problem = f"{files[language].name} and {path.name} are both of {language!r}"
            raise InputError(problem, file=folder, fix="leave one of them there")
        files[language] = path
    if not files:
        fix = "give a folder with de.vec, en.vec …, such as `calque map` writes"
        raise InputError("no word vectors here", file=folder, fix=fix)
    return files
