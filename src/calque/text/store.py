"""Tokenised sentences on disk: two NumPy arrays that are memory-mapped, never read whole."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Self

import numpy as np

from calque.text.batching import Ragged, ranges
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


class StoreWriter:
    """Appends sentences to a store; the files appear under their names when it closes."""

    def __init__(self, stem: Path, vocab_size: int) -> None:
        dtype = np.uint16 if vocab_size <= np.iinfo(np.uint16).max + 1 else np.uint32
        self._ids = _GrowingArray(Path(f"{stem}{IDS}"), np.dtype(dtype))
        self._offsets = _GrowingArray(Path(f"{stem}{OFFSETS}"), np.dtype(np.int64))
        self._offsets.append(np.zeros(1, dtype=np.int64))

    def append(self, ragged: Ragged) -> None:
        """Add encoded sentences in order."""
        self._offsets.append(self._ids.size + np.cumsum(ragged.lengths))
        self._ids.append(ragged.ids)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for array in (self._ids, self._offsets):
            array.close(keep=kind is None)


class _GrowingArray:
    """A one-dimensional .npy file whose length is written into its header at the end."""

    def __init__(self, path: Path, dtype: np.dtype[np.generic]) -> None:
        self.path, self.dtype, self.size = path, dtype, 0
        self._partial = path.with_name(path.name + ".partial")
        self._file: BinaryIO = self._partial.open("wb")
        self._write_header()

    def append(self, values: npt.NDArray[np.int64]) -> None:
        self._file.write(values.astype(self.dtype).tobytes())
        self.size += len(values)

    def close(self, keep: bool) -> None:
        if keep:
            self._file.seek(0)
            self._write_header()
            self._file.flush()
            os.fsync(self._file.fileno())
        self._file.close()
        if keep:
            os.replace(self._partial, self.path)
        else:
            self._partial.unlink()

    def _write_header(self) -> None:
        # NumPy pads the header so that a longer shape can be written over it in place.
        header = np.lib.format.header_data_from_array_1_0(np.zeros(0, dtype=self.dtype))
        np.lib.format.write_array_header_1_0(self._file, header | {"shape": (self.size,)})
