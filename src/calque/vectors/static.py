"""Static word vectors: read, write, neighbors and analogies; folders of several languages."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, overload

import numpy as np
import torch

from calque.algorithms.nearest import normalize_rows
from calque.errors import InputError
from calque.io.files import (
    PathLike,
    SkipBad,
    SkippedLines,
    display_name,
    write_atomically,
)
from calque.io.structured import MALFORMED
from calque.io.word_vectors import (
    format_words,
    iterate_vectors,
    read_word_counts,
    write_word2vec,
    write_word_counts,
)

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Float
    from torch import Tensor

    from calque.io.word_vectors import VectorBlock

    Matrix = npt.NDArray[np.float32]
    IntArray = npt.NDArray[np.int64]

MAX_WORDS = 200_000  # as in MUSE and most papers
SUFFIXES = tuple(
    kind + compression for kind in (".vec", ".bin") for compression in ("", ".gz", ".xz", ".zst")
)
N_SPACES_IN_MEMORY = 3  # the pivot, and the two other languages of a pair
BLOCK_ROWS = 1 << 14  # compared at once when looking for neighbors


@dataclass(frozen=True, eq=False)
class WordVectors:
    """Words, the most frequent first, their vectors, and their counts if they are known.

    The matrix may be mapped from a file: then pages are read when used, and changes to it affect
    neither the file nor other processes. `n_duplicates` repeated words were left out by `load`.

    Examples:
        >>> vectors = calque.WordVectors.load("wiki.de.vec", max_words=200_000)  # doctest: +SKIP
        >>> vectors.neighbors("Katze", k=2)  # doctest: +SKIP
        [('Hund', 0.73), ('Kater', 0.71)]
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
            raise ValueError(
                f"{n_words} words, {n_counts} counts and a {shape} matrix of {matrix.dtype} do not "
                "fit together"
            )

    @classmethod
    def load(
        cls,
        path: PathLike,
        *,
        max_words: int | None = None,
        cache: bool | PathLike = True,
        skip_bad: SkipBad | None = None,
    ) -> Self:
        """Read vectors in word2vec format, text or binary, and PATH.counts if it exists.

        Args:
            path: The file; plain, .gz, .xz, .zst, or "-" for standard input.
            max_words: Number of words to read. Default: all.
            cache: Folder for parsed copies, which are memory-mapped when the file is read again;
                True for the user's cache folder (large files only), False for none.
            skip_bad: Called with the number, the problem and the text of each invalid line.
                Default: the first invalid line raises InputError.
        """
        if max_words is not None and max_words < 1:
            raise InputError(f"max_words is {max_words}", fix="choose 1 or more")
        entry = CacheEntry.find(path, cache, max_words)
        found = entry.load() if entry else None
        if found is None:
            skipped = SkippedLines()

            def skip(number: int, reason: str, text: str) -> None:
                skipped(number, reason, text)
                if skip_bad is not None:
                    skip_bad(number, reason, text)

            found = _join_blocks(path, iterate_vectors(path, skip_bad and skip), max_words)
            if entry and not skipped.n_lines:  # the next reader may not want to skip lines
                entry.save(*found)
        words, matrix, n_duplicates = found
        return cls(words, matrix, read_word_counts(path, words), n_duplicates)

    def save(self, path: PathLike, *, binary: bool = False) -> int:
        """Write vectors in word2vec format, and the counts to PATH.counts (not for "-").

        Return the number of words in which spaces had to be replaced by no-break spaces.
        """
        if len(self) == 0 or self.matrix.shape[1] == 0:
            raise InputError("there are no vectors to write", file=display_name(path))
        names = format_words(self.words)
        with write_word_counts(path, names, self.counts):
            write_word2vec(path, names, self.matrix, binary=binary)
        return sum(name != word for name, word in zip(names, self.words, strict=True))

    def __len__(self) -> int:
        return len(self.words)

    @cached_property
    def index(self) -> dict[str, int]:
        """Row of every word."""
        return {word: row for row, word in enumerate(self.words)}

    def look_up(self, words: Iterable[str]) -> IntArray:
        """Return the row of every word, −1 for unknown words.

        Examples:
            >>> WordVectors(["cat", "dog"], np.eye(2, dtype=np.float32)).look_up(["dog", "gnu"])
            array([ 1, -1])
        """
        return _look_up(self.index, words)

    @overload
    def neighbors(self, queries: str, k: int = 10) -> list[tuple[str, float]]: ...  # type: ignore[overload-overlap]
    @overload
    def neighbors(
        self, queries: Sequence[str] | Matrix, k: int = 10
    ) -> list[list[tuple[str, float]]]: ...
    def neighbors(self, queries: str | Sequence[str] | Matrix, k: int = 10) -> Any:
        """Return the k nearest words by cosine with their scores, the nearest first.

        The query is a word, which is not its own neighbor; or a list of words, or the rows of a
        matrix, for which a list of results is returned.
        """
        if isinstance(queries, str):
            return self.neighbors([queries], k)[0]
        if isinstance(queries, np.ndarray):
            return self._find_nearest(queries, k, [[] for _ in queries])
        rows = self._require(queries)
        return self._find_nearest(self.matrix[rows], k, [[row] for row in rows])

    def analogy(self, a: str, b: str, c: str, k: int = 10) -> list[tuple[str, float]]:
        """Return the words nearest to b − a + c: those that are to c as b is to a.

        All vectors have unit length, and the three words are never the answer (3CosAdd: Mikolov et
        al., 2013).
        """
        rows = self._require([a, b, c])
        first, second, third = _to_unit_length(self.matrix[rows])
        return self._find_nearest((second - first + third)[None], k, [rows])[0]

    def _require(self, words: Sequence[str]) -> list[int]:
        for word in words:
            if word not in self.index:
                raise InputError(
                    f"{word!r} is not among the {len(self)} words",
                    fix="check its spelling and case",
                )
        return [self.index[word] for word in words]

    def _find_nearest(
        self, queries: Matrix, k: int, excluded: Sequence[Sequence[int]]
    ) -> list[list[tuple[str, float]]]:
        """Find the nearest words block by block, without the excluded rows of each query."""
        if k < 1:
            raise InputError(f"k is {k}", fix="choose 1 or more")
        k = min(k, len(self))
        scores = np.full((len(queries), k), -np.inf, dtype=np.float32)
        rows = np.zeros((len(queries), k), dtype=np.int64)
        queries = _to_unit_length(queries)
        for start in range(0, len(self), BLOCK_ROWS):
            block = queries @ _to_unit_length(self.matrix[start : start + BLOCK_ROWS]).T
            for query, left_out in enumerate(excluded):
                inside = [row - start for row in left_out if 0 <= row - start < block.shape[1]]
                block[query, inside] = -np.inf
            numbers = np.broadcast_to(np.arange(start, start + block.shape[1]), block.shape)
            scores, rows = np.hstack([scores, block]), np.hstack([rows, numbers])
            best = np.argpartition(-scores, k - 1, axis=1)[:, :k]
            scores = np.take_along_axis(scores, best, axis=1)
            rows = np.take_along_axis(rows, best, axis=1)
        order = np.lexsort((rows, -scores))
        return [
            [(self.words[rows[q, j]], float(scores[q, j])) for j in line if scores[q, j] > -np.inf]
            for q, line in enumerate(order)
        ]


def _look_up(index: Mapping[str, int], words: Iterable[str]) -> IntArray:
    return np.array([index.get(word, -1) for word in words], dtype=np.int64)


def _to_unit_length(rows: Matrix) -> Matrix:
    """Scale rows to length one; zero rows stay zero."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.divide(rows, np.where(lengths > 0, lengths, 1), dtype=np.float32)


def _join_blocks(
    path: PathLike, blocks: Iterator[VectorBlock], max_words: int | None
) -> tuple[list[str], Matrix, int]:
    """Join blocks of vectors without repeated words; also return how many there were."""
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
            # In place, so that there is never a second copy; by an eighth, so that it is rare.
            n_rows = max(len(words), len(matrix) + len(matrix) // 8)
            matrix.resize((n_rows, block.matrix.shape[1]), refcheck=False)
        if rows:
            matrix[start : len(words)] = block.matrix
        if len(words) == max_words:
            break
    if not words:
        raise InputError(
            "the file has no vectors", file=display_name(path), fix="choose another file"
        )
    matrix.resize((len(words), matrix.shape[1]), refcheck=False)
    return words, matrix, n_duplicates


def _find_new(words: Sequence[str], seen: set[str]) -> Sequence[int]:
    """Return the positions of words that have not been seen yet, and add them to the seen ones."""
    if len(distinct := set(words)) == len(words) and seen.isdisjoint(distinct):
        seen |= distinct
        return range(len(words))
    new = []
    for row, word in enumerate(words):
        if word not in seen:
            seen.add(word)
            new.append(row)
    return new


@dataclass(frozen=True, eq=False)
class VectorSpace:
    """Words of a language, the most frequent first, and their vectors scaled to length one.

    Words whose vector is zero are left out: `n_zero` of the `n_read` words of the file. The file
    also had `n_duplicates` repeated words.
    """

    name: str
    words: Sequence[str]
    rows: Float[Tensor, "words hidden"]
    n_read: int
    n_zero: int = 0
    n_duplicates: int = 0

    @classmethod
    def load(
        cls,
        path: PathLike,
        max_words: int | None = MAX_WORDS,
        device: torch.device | str = "cpu",
        skip_bad: SkipBad | None = None,
    ) -> Self:
        """Read the vectors of the first words of a file, which are the most frequent."""
        vectors = WordVectors.load(path, max_words=max_words, skip_bad=skip_bad)
        return cls.from_vectors(vectors, display_name(path), device)

    @classmethod
    def from_vectors(
        cls, vectors: WordVectors, name: str, device: torch.device | str = "cpu"
    ) -> Self:
        """Scale vectors to length one, on a device; `name` is used in error messages."""
        rows = normalize_rows(torch.from_numpy(np.asarray(vectors.matrix)).to(device))
        words = vectors.words
        kept = rows.any(dim=1).nonzero()[:, 0]
        n_zero = len(words) - len(kept)
        if n_zero:
            rows, words = rows[kept], [words[row] for row in kept.tolist()]
        if not words:
            raise InputError("all vectors are zero", file=name, fix="create the vectors again")
        return cls(name, words, rows, len(vectors), n_zero, vectors.n_duplicates)

    def __len__(self) -> int:
        return len(self.words)

    @cached_property
    def index(self) -> dict[str, int]:
        """Row of every word."""
        return {word: row for row, word in enumerate(self.words)}

    def look_up(self, words: Iterable[str]) -> IntArray:
        """Return the row of every word, −1 for unknown words."""
        return _look_up(self.index, words)


def check_same_width(src: VectorSpace, tgt: VectorSpace) -> None:
    """Raise InputError if the vectors of two spaces have different numbers of dimensions."""
    widths = src.rows.shape[1], tgt.rows.shape[1]
    if widths[0] != widths[1]:
        raise InputError(
            f"the vectors have {widths[0]} dimensions, those of {tgt.name} have {widths[1]}",
            file=src.name,
            fix="use vectors of one space, such as `calque map` writes",
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
        """Languages of the vectors."""
        return list(self.files)

    def load(self, language: str) -> VectorSpace:
        """Return the vectors of a language; the most recently used ones stay in memory."""
        if language not in self.files:
            raise InputError(
                f"there are no vectors of {language!r}",
                file=self.folder,
                fix=f"choose from: {' '.join(self.files)}",
            )
        space = self._loaded.pop(language, None)
        if space is None:
            while len(self._loaded) >= N_SPACES_IN_MEMORY:
                self._loaded.pop(next(iter(self._loaded)))
            space = VectorSpace.load(self.files[language], self.max_words, self.device)
        self._loaded[language] = space
        return space

    def load_pair(self, src: str, tgt: str) -> tuple[VectorSpace, VectorSpace]:
        """Return the vectors of two languages, which must have the same number of dimensions."""
        spaces = self.load(src), self.load(tgt)
        check_same_width(*spaces)
        return spaces


def _find_files(folder: Path) -> dict[str, Path]:
    """Return the file of every language, which is the first part of the name."""
    fix = "use a folder with de.vec, en.vec, ..., such as `calque map` writes"
    if not folder.is_dir():
        raise InputError("this folder does not exist", file=folder, fix=fix)
    files: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        suffix = next((end for end in SUFFIXES if path.name.endswith(end)), None)
        if suffix is None or not (language := path.name.removesuffix(suffix)):
            continue
        if language in files:
            raise InputError(
                f"{files[language].name} and {path.name} are both of {language!r}",
                file=folder,
                fix="remove one of them",
            )
        files[language] = path
    if not files:
        raise InputError("there are no word vectors in this folder", file=folder, fix=fix)
    return files


# The cache: an entry is a .npy file with the matrix, and a file with one line of JSON and then one
# word per line. Their names contain hashes of the path and the state of the file they come from.

CACHE_FORMAT = 1  # to be raised whenever the same file would be parsed differently
MIN_CACHED_BYTES = 64 << 20  # smaller files are parsed in about a second
MATRIX_SUFFIX, WORDS_SUFFIX = ".npy", ".words"
N_HASH_DIGITS = 16


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """Where the parsed vectors of a file in its current state are, or would be."""

    folder: Path
    source: str
    state: str
    max_words: int | None

    @staticmethod
    def find(path: PathLike, cache: bool | PathLike, max_words: int | None) -> CacheEntry | None:
        """Return the entry of a file; None if it should not or cannot be cached."""
        if cache is False or os.fspath(path) == "-":
            return None
        source = os.path.realpath(path)
        state = _hash_state(source, MIN_CACHED_BYTES if cache is True else 0)
        folder = user_cache_folder() if cache is True else Path(cache)
        if state is None or folder is None:
            return None
        return CacheEntry(folder, source, state, max_words)

    def load(self) -> tuple[list[str], Matrix, int] | None:
        """Map the matrix and read the words; return None if they are missing or damaged."""
        try:
            matrix = np.load(self._path(MATRIX_SUFFIX), mmap_mode="c", allow_pickle=False)
            n_duplicates = int(_read_header(self._path(WORDS_SUFFIX))["n_duplicates"])
            words = self._path(WORDS_SUFFIX).read_bytes().decode().split("\n")[1:]
        except (OSError, KeyError, TypeError, *MALFORMED):
            return None
        is_complete = matrix.dtype == np.float32 and matrix.ndim == 2 and len(matrix) == len(words)
        return (words, matrix, n_duplicates) if is_complete else None

    def save(self, words: Sequence[str], matrix: Matrix, n_duplicates: int) -> None:
        """Write the entry unless the file has changed; errors are ignored."""
        if _hash_state(self.source, 0) != self.state:
            return
        header = json.dumps({"source": self.source, "n_duplicates": n_duplicates})
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._remove_old()
            with write_atomically(self._path(MATRIX_SUFFIX), binary=True) as stream:
                np.save(stream, matrix, allow_pickle=False)
            with write_atomically(self._path(WORDS_SUFFIX), binary=True) as stream:
                stream.write("\n".join([header, *words]).encode())
        except (OSError, InputError):
            with suppress(OSError):
                self._path(MATRIX_SUFFIX).unlink()

    def _path(self, suffix: str) -> Path:
        words = "all" if self.max_words is None else self.max_words
        return self.folder / f"{_hash(self.source)}-{self.state}-{words}{suffix}"

    def _remove_old(self) -> None:
        """Remove entries of files that have changed or are gone."""
        prefix = _hash(self.source)
        for file in self.folder.glob(f"{prefix}-*"):
            if not file.name.startswith(f"{prefix}-{self.state}-"):
                file.unlink(missing_ok=True)
        any_hash = "?" * N_HASH_DIGITS
        for file in self.folder.glob(f"{any_hash}-{any_hash}-*{WORDS_SUFFIX}"):
            if not _has_source(file):
                file.with_suffix(MATRIX_SUFFIX).unlink(missing_ok=True)
                file.unlink(missing_ok=True)


def user_cache_folder() -> Path | None:
    """Return the cache folder of the user, calque/vectors; None if there is none."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root) / "calque" / "vectors" if os.path.isabs(root) else None


def _read_header(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        header: dict[str, Any] = json.loads(stream.readline())
    return header


def _has_source(file: Path) -> bool:
    """Return whether the file of an entry still exists; False for a damaged entry."""
    try:
        return os.path.exists(_read_header(file)["source"])
    except (KeyError, TypeError, *MALFORMED):
        return False


def _hash_state(path: str, min_bytes: int) -> str | None:
    """Return a hash of the size, times and inode of a file; None if it is smaller, or no file."""
    try:
        status = os.stat(path)
    except OSError:  # reported by the reader
        return None
    if not stat.S_ISREG(status.st_mode) or status.st_size < min_bytes:
        return None
    times = status.st_mtime_ns, status.st_ctime_ns
    return _hash(f"{CACHE_FORMAT} {status.st_dev} {status.st_ino} {status.st_size} {times}")


def _hash(text: str) -> str:
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:N_HASH_DIGITS]
