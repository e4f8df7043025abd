"""Parsed word vectors on disk, so that a large text file is read once and mapped ever after.

An entry is two files: the matrix as .npy, and the words, one a line below a line about them. Their
names tell which file they came from and in which state it was, so that a changed file has none.

Static word vectors: reading and writing them, look-up, neighbors, analogies.

Word vectors of unit length, ready to be compared with those of another language.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from calque.algorithms.nearest import normalize_rows
from calque.errors import InputError
from calque.io.files import PARTIAL, PathLike, SkipBad, SkippedLines, shown, write_atomically
from calque.io.word_vectors import (
    make_names,
    read_counts,
    scan_vectors,
    write_counts,
    write_word2vec,
)

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Float
    from torch import Tensor

    from calque.io.word_vectors import VectorBlock

    Matrix = npt.NDArray[np.float32]
    IntArray = npt.NDArray[np.int64]

FORMAT = 1  # to be raised whenever the same file would be parsed to something else
MIN_BYTES = 64 << 20  # smaller files are parsed in a second or so
MATRIX, WORDS = ".npy", ".words"
DAY_SECONDS = 86_400
DIGITS = 16


def user_folder() -> Path | None:
    """Name the folder for the user's entries, calque/vectors among the caches; None without one."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root) / "calque" / "vectors" if os.path.isabs(root) else None


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """Where the vectors of one state of a file are, or would be."""

    folder: Path
    source: str
    state: str
    max_words: int | None

    @staticmethod
    def find(path: PathLike, cache: bool | PathLike, max_words: int | None) -> CacheEntry | None:
        """Name the entry of a file; None if it is not to be cached, or cannot be."""
        if cache is False or os.fspath(path) == "-":
            return None
        source = os.path.realpath(path)
        state = _read_state(source, MIN_BYTES if cache is True else 0)
        folder = user_folder() if cache is True else Path(cache)
        if state is None or folder is None:
            return None
        return CacheEntry(folder, source, state, max_words)

    def load(self) -> tuple[list[str], Matrix, int] | None:
        """Map the matrix and read the words; None if they are not there, or damaged."""
        try:
            matrix = np.load(self._name(MATRIX), mmap_mode="c", allow_pickle=False)
            n_duplicates = int(_read_about(self._name(WORDS))["n_duplicates"])
            words = self._name(WORDS).read_bytes().decode().split("\n")[1:]
        except (OSError, ValueError, EOFError, KeyError, TypeError):
            return None
        is_whole = matrix.dtype == np.float32 and matrix.ndim == 2 and len(matrix) == len(words)
        return (words, matrix, n_duplicates) if is_whole else None

    def save(self, words: Sequence[str], matrix: Matrix, n_duplicates: int) -> None:
        """Write the entry if the file is still what it was; a cache that cannot be is none."""
        if _read_state(self.source, 0) != self.state:
            return
        about = json.dumps({"source": self.source, "n_duplicates": n_duplicates})
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._clear_old()
            with write_atomically(self._name(MATRIX), binary=True) as stream:
                np.save(stream, matrix, allow_pickle=False)
            with write_atomically(self._name(WORDS), binary=True) as stream:
                stream.write("\n".join([about, *words]).encode())
        except (OSError, InputError):
            with suppress(OSError):
                self._name(MATRIX).unlink()

    def _name(self, suffix: str) -> Path:
        words = "all" if self.max_words is None else self.max_words
        return self.folder / f"{_digest(self.source)}-{self.state}-{words}{suffix}"

    def _clear_old(self) -> None:
        """Remove the entries of files that changed or are gone, and what was left half-written."""
        prefix = _digest(self.source)
        for file in self.folder.glob(f"{prefix}-*"):
            if not file.name.startswith(f"{prefix}-{self.state}-"):
                file.unlink(missing_ok=True)
        for file in self.folder.glob(f"{'?' * DIGITS}-{'?' * DIGITS}-*{WORDS}"):
            if not _has_source(file):
                file.with_suffix(MATRIX).unlink(missing_ok=True)
                file.unlink(missing_ok=True)
        for file in self.folder.glob(PARTIAL):
            if file.stat().st_mtime < time.time() - DAY_SECONDS:
                file.unlink(missing_ok=True)


def _read_about(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        about: dict[str, Any] = json.loads(stream.readline())
    return about


def _has_source(file: Path) -> bool:
    """Tell whether the file an entry came from is still there; a damaged entry came from none."""
    try:
        return os.path.exists(_read_about(file)["source"])
    except (ValueError, KeyError, TypeError):
        return False


def _read_state(path: str, min_bytes: int) -> str | None:
    """Tell one state of a file from another by all its times and its place on the disk."""
    try:
        status = os.stat(path)
    except OSError:  # the reader says what is wrong
        return None
    if not stat.S_ISREG(status.st_mode) or status.st_size < min_bytes:
        return None
    times = status.st_mtime_ns, status.st_ctime_ns
    return _digest(f"{FORMAT} {status.st_dev} {status.st_ino} {status.st_size} {times}")


def _digest(text: str) -> str:
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:DIGITS]


BLOCK_ROWS = 1 << 14


@dataclass(frozen=True, eq=False)
class WordVectors:
    """Words, the most frequent first, their vectors, and how often each was seen if that is known.

    The matrix may be mapped from a file: pages are read when touched, and writing to them changes
    neither the file nor the copies of other processes. `n_duplicates` counts the repeated words
    that reading left out.
    """

    words: Sequence[str]
    matrix: Matrix
    counts: IntArray | None = None
    n_duplicates: int = 0

    def __post_init__(self) -> None:
        matrix, n_words = self.matrix, len(self.words)
        n_counts = n_words if self.counts is None else len(self.counts)
        if not n_words == len(matrix) == n_counts or matrix.ndim != 2 or matrix.dtype != np.float32:
            shape = "×".join(map(str, matrix.shape))
            raise ValueError(f"{n_words} words, {n_counts} counts, {shape} of {matrix.dtype}")

    def __len__(self) -> int:
        return len(self.words)

    @cached_property
    def index(self) -> dict[str, int]:
        """The row of every word."""
        return {word: row for row, word in enumerate(self.words)}

    def look_up(self, words: Iterable[str]) -> tuple[IntArray, npt.NDArray[np.bool_]]:
        """Give a row for every word asked for, −1 for the unknown, and which are known.

        >>> WordVectors(["cat", "dog"], np.eye(2, dtype=np.float32)).look_up(["dog", "gnu"])
        (array([ 1, -1]), array([ True, False]))
        """
        rows = np.array([self.index.get(word, -1) for word in words], dtype=np.int64)
        return rows, rows >= 0


def read_vectors(
    path: PathLike,
    *,
    max_words: int | None = None,
    cache: bool | PathLike = True,
    skip_bad: SkipBad | None = None,
) -> WordVectors:
    """Read vectors in word2vec format, text or binary, packed or not, and the counts beside them.

    The first of equal words is kept. Large files are parsed once and mapped from then on: `cache`
    names the folder for that, True stands for the user's, False for none.
    """
    if max_words is not None and max_words < 1:
        raise InputError(f"max_words={max_words} leaves no words", fix="raise it")
    entry = CacheEntry.find(path, cache, max_words)
    found = entry.load() if entry else None
    if found is None:
        skipped = SkippedLines()

        def skip(number: int, reason: str, text: str) -> None:
            skipped(number, reason, text)
            if skip_bad is not None:
                skip_bad(number, reason, text)

        blocks = scan_vectors(path, skip_bad and skip)
        found = _gather(path, blocks, max_words)
        if entry and not skipped.n_lines:  # a stricter reader must not get what is left
            entry.save(*found)
    words, matrix, n_duplicates = found
    return WordVectors(words, matrix, read_counts(path, words), n_duplicates)


def write_vectors(vectors: WordVectors, path: PathLike, *, binary: bool = False) -> int:
    """Write vectors in word2vec format, and counts beside them unless to standard output.

    Gives the number of words whose spaces had to become no-break spaces (see `make_names`).
    """
    if len(vectors) == 0 or vectors.matrix.shape[1] == 0:
        raise InputError("there are no vectors to write", file=shown(path))
    names = make_names(vectors.words)
    with write_counts(path, names, vectors.counts):
        write_word2vec(path, names, vectors.matrix, binary=binary)
    return sum(name != word for name, word in zip(names, vectors.words, strict=True))


def _gather(
    path: PathLike, blocks: Iterator[VectorBlock], max_words: int | None
) -> tuple[list[str], Matrix, int]:
    """Lay blocks under one another without the words that came before, and count those."""
    words: list[str] = []
    seen: set[str] = set()
    matrix, n_duplicates = np.zeros((0, 0), dtype=np.float32), 0
    for block in blocks:
        rows, n_read = _find_new(block.words, seen), len(block.words)
        if max_words is not None and len(words) + len(rows) >= max_words:
            rows = rows[: max_words - len(words)]
            n_read = rows[-1] + 1
        n_duplicates += n_read - len(rows)
        if len(rows) < len(block.words):
            block = block.select(np.array(rows, dtype=np.int64))
        start = len(words)
        words += block.words
        if len(words) > len(matrix):
            # In place, so that there is never a second copy; an eighth at a time, for speed.
            n_rows = max(len(words), len(matrix) + len(matrix) // 8)
            matrix.resize((n_rows, block.matrix.shape[1]), refcheck=False)
        if rows:
            matrix[start : len(words)] = block.matrix
        if len(words) == max_words:
            break
    if not words:
        raise InputError("holds no vectors", file=shown(path), fix="give another file")
    matrix.resize((len(words), matrix.shape[1]), refcheck=False)
    return words, matrix, n_duplicates


def _find_new(words: Sequence[str], seen: set[str]) -> Sequence[int]:
    """Find the words that have not been seen yet, and remember them."""
    if len(distinct := set(words)) == len(words) and seen.isdisjoint(distinct):
        seen |= distinct
        return range(len(words))
    new = []
    for row, word in enumerate(words):
        if word not in seen:
            seen.add(word)
            new.append(row)
    return new


def neighbors(
    vectors: WordVectors, queries: Sequence[str] | Matrix, k: int = 10
) -> list[list[tuple[str, float]]]:
    """Find the words nearest by cosine to each query, the nearest first.

    A query is a word, which is not its own neighbor, or a vector of the same space.
    """
    if isinstance(queries, np.ndarray):
        return _find_nearest(vectors, queries, k, [[] for _ in queries])
    rows = _require(vectors, queries)
    return _find_nearest(vectors, vectors.matrix[rows], k, [[row] for row in rows])


def analogy(vectors: WordVectors, a: str, b: str, c: str, k: int = 10) -> list[tuple[str, float]]:
    """Find what is to c as b is to a: the words nearest to b − a + c, all of unit length.

    The three are never the answer (3CosAdd: Mikolov et al., 2013).
    """
    rows = _require(vectors, [a, b, c])
    first, second, third = _normalize(vectors.matrix[rows])
    return _find_nearest(vectors, (second - first + third)[None], k, [rows])[0]


def _require(vectors: WordVectors, words: Sequence[str]) -> list[int]:
    if isinstance(words, str):
        raise TypeError("give a list of words, not a string")
    if (unknown := next((word for word in words if word not in vectors.index), None)) is not None:
        problem = f"{unknown!r} is not among the {len(vectors)} words"
        raise InputError(problem, fix="check its spelling and case")
    return [vectors.index[word] for word in words]


def _find_nearest(
    vectors: WordVectors, queries: Matrix, k: int, excluded: Sequence[Sequence[int]]
) -> list[list[tuple[str, float]]]:
    """Find the nearest words in blocks of rows, without those excluded for each query."""
    if k < 1:
        raise InputError(f"k={k} asks for no neighbors", fix="raise k")
    k = min(k, len(vectors))
    scores = np.full((len(queries), k), -np.inf, dtype=np.float32)
    rows = np.zeros((len(queries), k), dtype=np.int64)
    queries = _normalize(queries)
    for start in range(0, len(vectors), BLOCK_ROWS):
        block = queries @ _normalize(vectors.matrix[start : start + BLOCK_ROWS]).T
        for query, left_out in enumerate(excluded):
            inside = [row - start for row in left_out if 0 <= row - start < block.shape[1]]
            block[query, inside] = -np.inf
        places = np.broadcast_to(np.arange(start, start + block.shape[1]), block.shape)
        scores, rows = np.hstack([scores, block]), np.hstack([rows, places])
        best = np.argpartition(-scores, k - 1, axis=1)[:, :k]
        scores = np.take_along_axis(scores, best, axis=1)
        rows = np.take_along_axis(rows, best, axis=1)
    order = np.lexsort((rows, -scores))
    return [
        [(vectors.words[rows[q, j]], float(scores[q, j])) for j in line if scores[q, j] > -np.inf]
        for q, line in enumerate(order)
    ]


def _normalize(rows: Matrix) -> Matrix:
    """Give rows of length 1; those of length 0 stay as they are."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.divide(rows, np.where(lengths > 0, lengths, 1), dtype=np.float32)


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
