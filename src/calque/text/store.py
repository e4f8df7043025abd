"""Tokenised sentences on disk: two NumPy arrays that are memory-mapped, never read whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calque.text.batching import Ragged, ranges
from calque.text.files import write_atomically
from calque.text.growing_array import GrowingArray
from calque.types import InputError, first_line

if TYPE_CHECKING:
    import numpy.typing as npt

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
        ids, offsets = GrowingArray(id_stream, dtype), GrowingArray(offset_stream, np.int64)
        offsets.append(np.zeros(1, dtype=np.int64))

        def append(ragged: Ragged) -> None:
            offsets.append(ids.n_rows + np.cumsum(ragged.lengths))
            ids.append(ragged.ids)

        yield append
        ids.close()
        offsets.close()
