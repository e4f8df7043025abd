"""Vectors to mine with: of stored sentences, embedded so that a kill cannot spoil it, or given."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import astuple
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calque.align.neighbors import UnitRows
from calque.tools.embedder import BLOCK_SENTENCES, choose_output, embed_blocks
from calque.tools.resumable_file import ResumableFile
from calque.tools.windows import EmbedReport
from calque.types import InputError, first_line

if TYPE_CHECKING:
    import numpy.typing as npt

    from calque.models.encoder import Encoder
    from calque.tools.sentence_store import SentenceStore

BLOCK_ROWS = 4096


def embed_store(
    encoder: Encoder,
    store: SentenceStore,
    folder: Path,
    *,
    layer: int | None = None,
    raw: bool = False,
    resume: bool = False,
    on_block: Callable[[int], None] | None = None,
) -> tuple[npt.NDArray[np.float32], int]:
    """Embed stored sentences into a file of `folder`; give it, and how many were in windows.

    The file is named after the model, the text and the choices, so that with `resume` a whole one
    is taken as it is, and one half-done is gone on with.
    """
    name = _name_vectors(encoder, store, layer, raw)
    path = folder / f"{name}.f32"
    n_long = 0
    if not (resume and path.exists()):
        settings: dict[str, str | int | float | bool | None] = {
            "pairs": len(store),
            "vectors": name,
        }
        with ResumableFile(path, settings, resume=resume) as file:
            for block in _cut(store):
                if file.wants("\n".join(block).encode()):
                    file.append(*_embed(encoder, block, layer, raw))
                if on_block is not None:
                    on_block(len(block))
            n_long = EmbedReport(*file.finish()).n_long
    elif on_block is not None:
        on_block(len(store))
    array = np.memmap(path, dtype="<f4", mode="r").reshape(-1, encoder.hidden_size)
    return array, n_long


def open_vectors(path: Path, n_lines: int | None = None) -> npt.NDArray[Any]:
    """Map a .npy file of vectors into memory; it must have a row for each of so many lines."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        problem = (error.strerror or first_line(error)).lower()
        raise InputError(problem, file=path, fix="check the path") from error
    except ValueError as error:
        fix = "make it with calque embed or numpy.save"
        raise InputError("not a whole .npy file of numbers", file=path, fix=fix) from error
    if not isinstance(array, np.ndarray) or array.ndim != 2 or array.dtype.kind != "f":
        raise InputError("not a table of vectors", file=path, fix="make it with calque embed")
    if n_lines is not None and len(array) != n_lines:
        problem = f"{len(array):,} vectors for {n_lines:,} lines"
        raise InputError(problem, file=path, fix="embed the same file, line by line")
    return array


def usable_rows(
    array: npt.NDArray[Any],
    file: object,
    lines: npt.NDArray[np.int64] | None = None,
    device: Any = "cpu",
) -> tuple[UnitRows, npt.NDArray[np.int64]]:
    """Give the vectors of some lines that are not zero, and which of them these are."""
    n_rows = len(array if lines is None else lines)
    kept: list[npt.NDArray[np.int64]] = []
    for start in range(0, n_rows, BLOCK_ROWS):
        part = slice(start, start + BLOCK_ROWS)
        lengths = np.square(array[part if lines is None else lines[part]], dtype=np.float32).sum(1)
        if not np.isfinite(lengths).all():
            row = start + int(np.argmin(np.isfinite(lengths)))
            row = row if lines is None else int(lines[row])
            raise InputError(
                f"vector {row + 1} is not finite", file=file, fix="embed the text again"
            )
        kept.append(start + np.flatnonzero(lengths))
    rows = np.concatenate(kept) if kept else np.zeros(0, dtype=np.int64)
    if lines is None and len(rows) == n_rows:
        return UnitRows(array, None, device), rows
    return UnitRows(array, rows if lines is None else lines[rows], device), rows


def _embed(
    encoder: Encoder, sentences: list[str], layer: int | None, raw: bool
) -> tuple[bytes, tuple[int, ...]]:
    """Give the vectors of some sentences as bytes, and the figures of their report."""
    number, finish = choose_output(encoder, layer, raw)
    content, report = b"", EmbedReport()
    for block in embed_blocks(encoder, sentences, [number]):
        content += finish(block.vectors[number]).astype("<f4", copy=False).tobytes()
        report += block.report
    return content, astuple(report)


def _cut(store: SentenceStore) -> Iterator[list[str]]:
    sentences = iter(store)
    for _ in range(math.ceil(len(store) / BLOCK_SENTENCES)):
        yield list(islice(sentences, BLOCK_SENTENCES))


def _name_vectors(encoder: Encoder, store: SentenceStore, layer: int | None, raw: bool) -> str:
    files = sorted(Path(encoder.folder).glob("*.safetensors"))
    stamps = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    told = repr((stamps, layer, raw, store.digest, len(store)))
    return hashlib.blake2b(told.encode(), digest_size=8).hexdigest()
