"""A NumPy file that grows row by row; how many there are is written into its header at the end."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt


class GrowingArray:
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
