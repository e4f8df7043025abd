"""Vectors of a whole file, as a NumPy array on disk, in constant memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from calque.text.files import write_atomically
from calque.tools.embedder import choose_output, embed_blocks, normalize_rows
from calque.tools.windows import EmbedReport
from calque.types import InputError

if TYPE_CHECKING:
    import numpy.typing as npt

    from calque.models.encoder import Encoder

    Vectors = npt.NDArray[np.float32]

BLOCK_ROWS = 4096


class GrowingArray:
    """Rows appended to a .npy file; the header, of fixed size, learns their number at the end."""

    def __init__(self, stream: BinaryIO, width: int) -> None:
        self.stream, self.width, self.n_rows = stream, width, 0
        self.total = np.zeros(width)
        self._write_header()

    def append(self, rows: Vectors) -> None:
        """Write some rows after those already there."""
        self.stream.write(np.ascontiguousarray(rows).astype("<f4", copy=False).tobytes())
        self.total += rows.sum(axis=0, dtype=np.float64)
        self.n_rows += len(rows)

    def close(self) -> None:
        """Write the number of rows into the header."""
        self.stream.seek(0)
        self._write_header()
        self.stream.seek(0, os.SEEK_END)
        self.stream.flush()

    def _write_header(self) -> None:
        shape = (self.n_rows, self.width)
        header = {"descr": "<f4", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self.stream, header)


def write_vectors(
    encoder: Encoder,
    sentences: Iterable[str],
    path: Path,
    *,
    layer: int | None = None,
    raw: bool = False,
    center: bool = False,
    normalize: bool = False,
    on_block: Callable[[int], None] | None = None,
) -> EmbedReport:
    """Embed a stream of sentences into a .npy file that appears only when it is whole.

    With `center` the mean of all vectors is subtracted, which takes a second pass over the file.
    """
    check_output(path)
    number, finish = choose_output(encoder, layer, raw)
    report = EmbedReport()
    with write_atomically(path, binary=True) as stream:
        array = GrowingArray(stream, encoder.hidden_size)
        for block in embed_blocks(encoder, sentences, [number]):
            vectors = finish(block.vectors[number])
            array.append(normalize_rows(vectors) if normalize and not center else vectors)
            report += block.report
            if on_block is not None:
                on_block(block.report.n_sentences)
        array.close()
        if center:
            n_filled = max(1, report.n_sentences - report.n_empty)
            _center_file(Path(stream.name), array.total / n_filled, normalize)
    return report


def check_output(path: Path) -> None:
    """Refuse an output that cannot become a .npy file, before the work begins."""
    if path.suffix != ".npy":
        raise InputError("vectors are written as .npy", file=path, fix=f"try {path.stem}.npy")
    if not path.parent.is_dir():
        raise InputError("its folder does not exist", file=path, fix=f"mkdir -p {path.parent}")


def _center_file(path: Path, mean: npt.NDArray[np.float64], normalize: bool) -> None:
    """Subtract the mean from every row in place; empty sentences stay zero."""
    array = np.load(path, mmap_mode="r+", allow_pickle=False)
    for start in range(0, len(array), BLOCK_ROWS):
        rows = array[start : start + BLOCK_ROWS]
        centered = np.where(rows.any(axis=1, keepdims=True), rows - mean, 0).astype(np.float32)
        rows[:] = normalize_rows(centered) if normalize else centered
    array.flush()
