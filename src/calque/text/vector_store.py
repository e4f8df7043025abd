"""Word vectors on disk beside the tokens of their words: rows that are mapped, never read whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calque.text.batching import Ragged
from calque.text.files import write_atomically
from calque.text.growing_array import GrowingArray
from calque.types import InputError, first_line

if TYPE_CHECKING:
    import numpy.typing as npt

    Matrix = npt.NDArray[np.float32]

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
        rows = GrowingArray(stream, np.float32, (width,))
        yield rows.append
        rows.close()
