"""Vectors of a whole file, as a NumPy array on disk, in constant memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calque.text.files import check_target, write_atomically
from calque.text.growing_array import GrowingArray
from calque.tools.embedder import choose_output, embed_blocks, normalize_rows
from calque.tools.windows import EmbedReport
from calque.types import InputError

if TYPE_CHECKING:
    import numpy.typing as npt

    from calque.models.encoder import Encoder

    Vectors = npt.NDArray[np.float32]

BLOCK_ROWS = 4096


def write_vectors(
    encoder: Encoder,
    sentences: Iterable[str],
    path: Path,
    *,
    layer: int | None = None,
    raw: bool = False,
    map_from: str | None = None,
    center: bool = False,
    normalize: bool = False,
    on_block: Callable[[int], None] | None = None,
) -> EmbedReport:
    """Embed a stream of sentences into a .npy file that appears only when it is whole.

    With `center` the mean of all vectors is subtracted, which takes a second pass over the file.
    """
    check_output(path)
    number, finish = choose_output(encoder, layer, raw, map_from)
    report = EmbedReport()
    with write_atomically(path, binary=True) as stream:
        array = GrowingArray(stream, "<f4", (encoder.hidden_size,))
        total = np.zeros(encoder.hidden_size)
        for block in embed_blocks(encoder, sentences, [number]):
            vectors = finish(block.vectors[number])
            array.append(normalize_rows(vectors) if normalize and not center else vectors)
            total += vectors.sum(axis=0, dtype=np.float64)
            report += block.report
            if on_block is not None:
                on_block(block.report.n_sentences)
        array.close()
        if center:
            n_filled = max(1, report.n_sentences - report.n_empty)
            _center_file(Path(stream.name), total / n_filled, normalize)
    return report


def check_output(path: Path, inputs: Iterable[str] = ()) -> None:
    """Refuse an output that cannot become a .npy file, or that is read, before the work begins."""
    if path.suffix != ".npy":
        raise InputError("vectors are written as .npy", file=path, fix=f"try {path.stem}.npy")
    check_target(path, inputs)


def _center_file(path: Path, mean: npt.NDArray[np.float64], normalize: bool) -> None:
    """Subtract the mean from every row in place; empty sentences stay zero."""
    array = np.load(path, mmap_mode="r+", allow_pickle=False)
    for start in range(0, len(array), BLOCK_ROWS):
        rows = array[start : start + BLOCK_ROWS]
        centered = np.where(rows.any(axis=1, keepdims=True), rows - mean, 0).astype(np.float32)
        rows[:] = normalize_rows(centered) if normalize else centered
    array.flush()
