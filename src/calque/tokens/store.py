"""Tokenized sentences and word vectors on disk: memory-mapped NumPy files, never read whole."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from calque.errors import InputError
from calque.io.files import write_atomically
from calque.io.structured import read_array
from calque.tokens.ragged import Ragged, ranges

if TYPE_CHECKING:
    import numpy.typing as npt

    Matrix = npt.NDArray[np.float32]


VECTORS = "vectors"  # the name of the vectors of a corpus of words
IDS, OFFSETS, ROWS = ".ids.npy", ".offsets.npy", ".npy"
PREPARE_AGAIN = "prepare the text again"
CHECKED_AT_ONCE = 1 << 20  # offsets


class NpyWriter:
    """Writes a .npy file row by row; the number of rows is written into the header at the end.

    With an empty row shape, the rows are single numbers.
    """

    def __init__(
        self, stream: BinaryIO, dtype: npt.DTypeLike, row_shape: tuple[int, ...] = ()
    ) -> None:
        self.stream, self.dtype, self.row_shape = stream, np.dtype(dtype), row_shape
        self.n_rows = 0
        self._write_header()

    def append(self, rows: npt.NDArray[Any]) -> None:
        """Append rows."""
        self.stream.write(np.ascontiguousarray(rows, dtype=self.dtype).tobytes())
        self.n_rows += len(rows)

    def close(self) -> None:
        """Write the number of rows into the header; the stream stays open."""
        self.stream.seek(0)
        self._write_header()
        self.stream.seek(0, os.SEEK_END)
        self.stream.flush()

    def _write_header(self) -> None:
        # NumPy pads the header, so that a larger shape can be overwritten in place.
        descr = np.lib.format.dtype_to_descr(self.dtype)
        header = {"descr": descr, "fortran_order": False, "shape": (self.n_rows, *self.row_shape)}
        np.lib.format.write_array_header_1_0(self.stream, header)


def map_array(stem: Path, suffix: str) -> npt.NDArray[Any]:
    """Map a file of a store into memory."""
    return read_array(Path(f"{stem}{suffix}"), mapped=True, fix=PREPARE_AGAIN)


def is_increasing(offsets: npt.NDArray[np.int64]) -> bool:
    """Return whether no offset is smaller than the one before it; the array may be mapped."""
    for start in range(0, len(offsets), CHECKED_AT_ONCE):
        if (np.diff(offsets[start : start + CHECKED_AT_ONCE + 1]) < 0).any():
            return False
    return True


@dataclass(frozen=True)
class TokenStore:
    """Sentences without special tokens: sentence k is ids[offsets[k]:offsets[k + 1]]."""

    ids: npt.NDArray[np.uint16 | np.uint32]
    offsets: npt.NDArray[np.int64]

    @staticmethod
    def open(stem: Path, vocab_size: int | None = None) -> TokenStore:
        """Map `STEM.ids.npy` and `STEM.offsets.npy` into memory, and check that they match.

        With `vocab_size`, it is also checked that all ids are below it.
        """
        store = TokenStore._map(stem)
        ids, offsets = store.ids, store.offsets
        if ids.dtype not in (np.uint16, np.uint32) or ids.ndim != 1:
            raise InputError("the file has no ids", file=f"{stem}{IDS}", fix=PREPARE_AGAIN)
        if offsets.dtype != np.int64 or offsets.ndim != 1:
            raise InputError("the file has no offsets", file=f"{stem}{OFFSETS}", fix=PREPARE_AGAIN)
        is_whole = len(offsets) > 0 and offsets[0] == 0 and offsets[-1] == len(ids)
        if not is_whole or not is_increasing(offsets):
            raise InputError("offsets and ids do not match", file=stem, fix=PREPARE_AGAIN)
        if vocab_size is not None and len(ids) and int(ids.max()) >= vocab_size:
            problem = f"an id is beyond the vocabulary of {vocab_size:,}"
            raise InputError(problem, file=f"{stem}{IDS}", fix=PREPARE_AGAIN)
        return store

    @staticmethod
    def _map(stem: Path) -> TokenStore:
        return TokenStore(*(map_array(stem, suffix) for suffix in (IDS, OFFSETS)))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the path instead of the ids if they are in a file."""
        if isinstance(self.ids, np.memmap) and self.ids.filename is not None:
            return TokenStore._map, (Path(str(self.ids.filename).removesuffix(IDS)),)
        return TokenStore, (self.ids, self.offsets)

    def lengths(self, index: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int64]:
        """Return the number of tokens of the given sentences."""
        return np.asarray(self.offsets[index + 1] - self.offsets[index], dtype=np.int64)

    def gather(self, index: npt.NDArray[np.integer[Any]]) -> Ragged:
        """Read the given sentences, in that order."""
        lengths = self.lengths(index)
        tokens = ranges(np.asarray(self.offsets[index]), lengths)
        return Ragged(self.ids[tokens].astype(np.int64), lengths)


@contextmanager
def write_store(stem: Path, vocab_size: int) -> Iterator[Callable[[Ragged], None]]:
    """Yield a function that appends sentences; the files appear when the block ends."""
    dtype = np.uint16 if vocab_size <= np.iinfo(np.uint16).max + 1 else np.uint32
    with (
        write_atomically(f"{stem}{IDS}", binary=True) as id_stream,
        write_atomically(f"{stem}{OFFSETS}", binary=True) as offset_stream,
    ):
        ids, offsets = NpyWriter(id_stream, dtype), NpyWriter(offset_stream, np.int64)
        offsets.append(np.zeros(1, dtype=np.int64))

        def append(ragged: Ragged) -> None:
            offsets.append(ids.n_rows + np.cumsum(ragged.lengths))
            ids.append(ragged.ids)

        yield append
        ids.close()
        offsets.close()


@dataclass(frozen=True)
class VectorStore:
    """Word vectors: vector k is rows[k]."""

    rows: Matrix

    @staticmethod
    def open(stem: Path) -> VectorStore:
        """Map `STEM.npy` into memory."""
        rows = map_array(stem, ROWS)
        if rows.ndim != 2 or rows.dtype != np.float32:
            raise InputError("the file has no matrix of vectors", file=stem, fix=PREPARE_AGAIN)
        return VectorStore(rows)

    @property
    def width(self) -> int:
        """Return the number of dimensions."""
        return int(self.rows.shape[1])

    def __len__(self) -> int:
        return len(self.rows)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the path instead of the rows if they are in a file."""
        if isinstance(self.rows, np.memmap) and self.rows.filename is not None:
            return VectorStore.open, (Path(str(self.rows.filename).removesuffix(ROWS)),)
        return VectorStore, (self.rows,)

    def gather(self, index: npt.NDArray[np.integer[Any]]) -> Ragged:
        """Read the given vectors, in that order, as sequences of `width` numbers."""
        flat: Any = np.asarray(self.rows[index]).ravel()
        lengths = np.full(len(index), self.width, dtype=np.int64)
        return Ragged(flat, lengths)


@contextmanager
def write_vector_store(stem: Path, width: int) -> Iterator[Callable[[Matrix], None]]:
    """Yield a function that appends vectors; the file appears when the block ends."""
    with write_atomically(f"{stem}{ROWS}", binary=True) as stream:
        rows = NpyWriter(stream, np.float32, (width,))
        yield rows.append
        rows.close()


@dataclass(frozen=True)
class PreviousSentences:
    """A view of a store whose sentence k is sentence k − 1 of the store; the first is empty.

    The previous sentence is used instead of the next one so that the last sentences, which are
    reserved for validation, occur in no training pair.
    """

    store: TokenStore

    def __len__(self) -> int:
        return len(self.store)

    def lengths(self, index: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int64]:
        """Return the number of tokens of the sentences before the given ones."""
        before = index.astype(np.int64) - 1
        return np.where(before >= 0, self.store.lengths(np.maximum(before, 0)), 0)

    def gather(self, index: npt.NDArray[np.integer[Any]]) -> Ragged:
        """Read the sentences before the given ones, in that order; none may be the first."""
        assert len(index) == 0 or index.min() > 0, "the first sentence has no previous one"
        return self.store.gather(index.astype(np.int64) - 1)


@dataclass(frozen=True)
class JoinedSentences:
    """A view of a store whose example k is a block of consecutive sentences.

    Block k is ids[offsets[k]:offsets[k + 1]] of the store. The first `n_training` blocks have the
    sentences for training; no block contains sentences for training and for validation.
    """

    store: TokenStore
    offsets: npt.NDArray[np.int64]
    n_training: int

    @staticmethod
    def of(store: TokenStore, max_tokens: int, n_training: int) -> JoinedSentences:
        """Join the first `n_training` sentences of a store, and the others, to blocks."""
        training = join_sentences(store.offsets[: n_training + 1], max_tokens)
        validation = join_sentences(store.offsets[n_training:], max_tokens)
        offsets = np.concatenate([training, validation[1:]])
        return JoinedSentences(store, offsets, len(training) - 1)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def lengths(self, index: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int64]:
        """Return the number of tokens of the given blocks."""
        return TokenStore(self.store.ids, self.offsets).lengths(index)

    def gather(self, index: npt.NDArray[np.integer[Any]]) -> Ragged:
        """Read the given blocks, in that order."""
        return TokenStore(self.store.ids, self.offsets).gather(index)


def join_sentences(offsets: npt.NDArray[np.int64], max_tokens: int) -> npt.NDArray[np.int64]:
    """Return the offsets of blocks of consecutive sentences that have at most `max_tokens` tokens.

    A block ends before the first sentence that does not fit. A sentence that is longer than a block
    is divided, and what is left of it is joined with the next one, so no token is lost.

    >>> join_sentences(np.array([0, 3, 5, 9, 24, 25]), max_tokens=6).tolist()
    [0, 5, 9, 15, 21, 25]
    """
    n_cuts = np.maximum(np.diff(offsets) - 1, 0) // max_tokens
    numbers = ranges(np.ones_like(n_cuts), n_cuts)  # 1, 2, ... in every long sentence
    cuts = np.repeat(offsets[:-1], n_cuts) + max_tokens * numbers
    places = np.union1d(offsets, cuts)  # where a block may end
    furthest = np.searchsorted(places, places + max_tokens, side="right") - 1
    ends = [0]
    while ends[-1] < len(places) - 1:
        ends.append(int(furthest[ends[-1]]))
    return places[ends]
