"""Static word vectors: reading and writing them, look-up, neighbors, analogies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from calque.models.vector_cache import CacheEntry
from calque.text.files import PathLike, SkipBad, SkippedLines, shown
from calque.text.word2vec import make_names, scan_vectors, write_word2vec
from calque.text.word_counts import read_counts, write_counts
from calque.types import InputError

if TYPE_CHECKING:
    import numpy.typing as npt

    from calque.text.word2vec_text import VectorBlock

    Matrix = npt.NDArray[np.float32]
    IntArray = npt.NDArray[np.int64]

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
