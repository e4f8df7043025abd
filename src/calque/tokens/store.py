"""A NumPy file that grows row by row; how many there are is written into its header at the end.

Tokenised sentences on disk: two NumPy arrays that are memory-mapped, never read whole.

Word vectors on disk beside the tokens of their words: rows that are mapped, never read whole.

Sentences of running text with the sentence before each: pairs without a translation.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from calque.errors import InputError, first_line
from calque.io.files import write_atomically
from calque.tokens.ragged import Ragged, ranges

if TYPE_CHECKING:
    import numpy.typing as npt

    Matrix = npt.NDArray[np.float32]


class NpyWriter:
    """Rows, or single numbers where the row shape is empty, appended to a .npy stream."""

    def __init__(
        self, stream: BinaryIO, dtype: npt.DTypeLike, row_shape: tuple[int, ...] = ()
    ) -> None:
        self.stream, self.dtype, self.row_shape = stream, np.dtype(dtype), row_shape
        self.n_rows = 0
        self._write_header()

    def append(self, rows: npt.NDArray[Any]) -> None:
        """Write some rows after those already there."""
        self.stream.write(np.ascontiguousarray(rows, dtype=self.dtype).tobytes())
        self.n_rows += len(rows)

    def close(self) -> None:
        """Write the number of rows into the header; the stream stays open."""
        self.stream.seek(0)
        self._write_header()
        self.stream.seek(0, os.SEEK_END)
        self.stream.flush()

    def _write_header(self) -> None:
        # NumPy pads the header so that a longer shape can be written over it in place.
        descr = np.lib.format.dtype_to_descr(self.dtype)
        header = {"descr": descr, "fortran_order": False, "shape": (self.n_rows, *self.row_shape)}
        np.lib.format.write_array_header_1_0(self.stream, header)


IDS, OFFSETS = ".ids.npy", ".offsets.npy"


@dataclass(frozen=True)
class TokenStore:
    """Sentences k = ids[offsets[k]:offsets[k + 1]], without special tokens."""

    ids: npt.NDArray[np.uint16 | np.uint32]
    offsets: npt.NDArray[np.int64]

    @staticmethod
    def open(stem: Path) -> TokenStore:
        """Map `STEM.ids.npy` and `STEM.offsets.npy`."""
        try:
            ids = np.load(f"{stem}{IDS}", mmap_mode="r", allow_pickle=False)
            offsets = np.load(f"{stem}{OFFSETS}", mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            problem = first_line(error)
            raise InputError(problem, file=stem, fix="prepare the text again") from error
        if len(offsets) == 0 or offsets[-1] != len(ids):
            raise InputError("offsets and ids do not fit", file=stem, fix="prepare the text again")
        return TokenStore(ids, offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __reduce__(self) -> tuple[object, ...]:
        """Travel to another process as a path where possible: NumPy would send the whole text."""
        if isinstance(self.ids, np.memmap) and self.ids.filename is not None:
            return TokenStore.open, (Path(str(self.ids.filename).removesuffix(IDS)),)
        return TokenStore, (self.ids, self.offsets)

    def lengths(self, index: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int64]:
        """Count the tokens of the sentences asked for."""
        return np.asarray(self.offsets[index + 1] - self.offsets[index], dtype=np.int64)

    def gather(self, index: npt.NDArray[np.integer[Any]]) -> Ragged:
        """Read the sentences asked for, in that order."""
        lengths = self.lengths(index)
        places = ranges(np.asarray(self.offsets[index]), lengths)
        return Ragged(self.ids[places].astype(np.int64), lengths)


@contextmanager
def write_store(stem: Path, vocab_size: int) -> Iterator[Callable[[Ragged], None]]:
    """Give the function that appends sentences to a store; its files appear when the block ends."""
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


# What a corpus of words calls them.
VECTORS = "vectors"
ROWS = ".npy"


@dataclass(frozen=True)
class VectorStore:
    """Vector k = rows[k]."""

    rows: Matrix

    @staticmethod
    def open(stem: Path) -> VectorStore:
        """Map `STEM.npy`."""
        fix = "prepare the text again"
        try:
            rows = np.load(f"{stem}{ROWS}", mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise InputError(first_line(error), file=stem, fix=fix) from error
        if rows.ndim != 2:
            raise InputError("holds no rows of vectors", file=stem, fix=fix)
        return VectorStore(rows)

    @property
    def width(self) -> int:
        """Give the number of dimensions."""
        return int(self.rows.shape[1])

    def __len__(self) -> int:
        return len(self.rows)

    def __reduce__(self) -> tuple[object, ...]:
        """Travel to another process as a path where possible: NumPy would send all rows."""
        if isinstance(self.rows, np.memmap) and self.rows.filename is not None:
            return VectorStore.open, (Path(str(self.rows.filename).removesuffix(ROWS)),)
        return VectorStore, (self.rows,)

    def gather(self, index: npt.NDArray[np.integer[Any]]) -> Ragged:
        """Read the vectors asked for, in that order, as sequences of so many numbers each."""
        flat: Any = np.asarray(self.rows[index]).ravel()
        lengths = np.full(len(index), self.width, dtype=np.int64)
        return Ragged(flat, lengths)


@contextmanager
def write_vector_store(stem: Path, width: int) -> Iterator[Callable[[Matrix], None]]:
    """Give the function that appends vectors; their file appears when the block ends."""
    with write_atomically(f"{stem}{ROWS}", binary=True) as stream:
        rows = NpyWriter(stream, np.float32, (width,))
        yield rows.append
        rows.close()


@dataclass(frozen=True)
class PreviousSentences:
    """A store whose sentence k is the one before sentence k of another; the first is empty.

    The sentence before rather than after: so the last sentences, which are kept for validation,
    are in no pair but their own.
    """

    store: TokenStore

    def __len__(self) -> int:
        return len(self.store)

    def lengths(self, index: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int64]:
        """Count the tokens of the sentences before those asked for."""
        before = index.astype(np.int64) - 1
        return np.where(before >= 0, self.store.lengths(np.maximum(before, 0)), 0)

    def gather(self, index: npt.NDArray[np.integer[Any]]) -> Ragged:
        """Read the sentences before those asked for, in that order; none may be the first."""
        assert len(index) == 0 or index.min() > 0, "nothing comes before the first sentence"
        return self.store.gather(index.astype(np.int64) - 1)
