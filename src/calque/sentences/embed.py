"""One vector a sentence: states of one layer, averaged over the sentence's tokens.

Vectors of a whole file, as a NumPy array on disk, in constant memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from calque.errors import InputError
from calque.io.files import check_target, write_atomically
from calque.models.inference import BATCH_TOKENS, check_maps, cut_blocks, device_of, run_batches
from calque.models.pooling import pool_sentences
from calque.tokens.ragged import Ragged, add_special_tokens, bucket_batches, pack
from calque.tokens.store import GrowingArray
from calque.tokens.tokenizer import boundary_ids
from calque.tokens.windows import TextWindows, split_long_sentences

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Float
    from torch import Tensor

    from calque.models.encoder import Encoder
    from calque.models.language_maps import LanguageMaps

    Vectors = npt.NDArray[np.float32]


# A block is what is tokenised and sorted by length at once; the second bound is for huge lines.
BLOCK_SENTENCES, BLOCK_CHARACTERS = 2048, 1 << 21


@dataclass(frozen=True, slots=True)
class EmbeddedBlock:
    """The vectors of some consecutive sentences, by layer, and what was met on the way."""

    vectors: dict[int, Vectors]
    report: EmbedReport


def embed_sentences(
    encoder: Encoder,
    sentences: Iterable[str],
    *,
    layer: int | None = None,
    raw: bool = False,
    languages: Sequence[str] | None = None,
    map_from: str | Sequence[str] | None = None,
    normalize: bool = False,
    batch_tokens: int | None = None,
) -> Vectors:
    """Embed sentences, by default at the encoder's best layer and in its neutral space.

    The neutral space (see `NeutralSpace`) is left alone with `raw`, and whenever a layer is
    asked for by number. With `languages`, one for each sentence, every language's mean is
    subtracted. An encoder with maps needs to know which to apply: `map_from` is the language of
    the sentences, or one for each; it takes the place of the neutral space. Sentences longer than
    the model are embedded in windows, so nothing is cut off; an empty one is zero.
    """
    number, finish = choose_output(encoder, layer, raw, map_from)
    vectors = finish(embed_layers(encoder, sentences, [number], batch_tokens=batch_tokens)[number])
    if languages is not None:
        vectors = center_by_language(vectors, languages)
    return normalize_rows(vectors) if normalize else vectors


def choose_output(
    encoder: Encoder, layer: int | None, raw: bool, map_from: str | Sequence[str] | None = None
) -> tuple[int, Callable[[Vectors], Vectors]]:
    """Choose the layer to embed at and what is done to its vectors."""
    maps = check_maps(encoder, map_from)
    if layer is None and encoder.neutral is not None and not raw and maps is None:
        return encoder.neutral.layer, encoder.neutral.apply
    number = encoder.choose_layer("sentences", layer)
    if maps is None or map_from is None:
        return number, lambda vectors: vectors
    for language in {map_from} if isinstance(map_from, str) else set(map_from):
        maps.check(language, number)  # before any work
    return number, lambda vectors: map_vectors(maps, vectors, map_from, number)


def map_vectors(
    maps: LanguageMaps, vectors: Vectors, languages: str | Sequence[str], layer: int
) -> Vectors:
    """Map vectors of one language, or of one for each: pooled states map like the states."""
    if isinstance(languages, str):
        return maps.apply(vectors, languages, layer)
    if len(languages) != len(vectors):
        raise InputError(
            f"{len(languages)} languages for {len(vectors)} sentences",
            fix="give one language for each sentence",
        )
    mapped, names = vectors.copy(), np.asarray(languages)
    for language in np.unique(names).tolist():
        rows = names == language
        mapped[rows] = maps.apply(vectors[rows], language, layer)
    return mapped


def embed_layers(
    encoder: Encoder,
    sentences: Iterable[str],
    layers: Sequence[int],
    *,
    batch_tokens: int | None = None,
) -> dict[int, Vectors]:
    """Embed sentences at several layers in one pass."""
    numbers = [encoder.check_layer(layer) for layer in layers]
    empty: Vectors = np.zeros((0, encoder.hidden_size), dtype=np.float32)
    parts: dict[int, list[Vectors]] = {number: [empty] for number in numbers}
    for block in embed_blocks(encoder, sentences, numbers, batch_tokens=batch_tokens):
        for number in parts:
            parts[number].append(block.vectors[number])
    return {number: np.concatenate(part) for number, part in parts.items()}


def embed_blocks(
    encoder: Encoder,
    sentences: Iterable[str],
    layers: Sequence[int],
    *,
    batch_tokens: int | None = None,
) -> Iterator[EmbeddedBlock]:
    """Embed a stream of sentences block by block, in constant memory."""
    if isinstance(sentences, str):
        raise InputError("one string was given for sentences", fix="give a list: embed([text])")
    numbers = [encoder.check_layer(layer) for layer in layers]
    budget = batch_tokens or BATCH_TOKENS.get(device_of(encoder).type, BATCH_TOKENS["cpu"])
    for block in cut_blocks(sentences, BLOCK_SENTENCES, BLOCK_CHARACTERS):
        windows = split_long_sentences(encoder.tokenizer, block, encoder.max_tokens)
        pooled = _pool_windows(encoder, windows, numbers, budget)
        vectors = {
            number: join_windows(windows, rows, len(block))
            for number, rows in zip(numbers, pooled, strict=True)
        }
        report = EmbedReport(
            windows.n_lines, windows.n_empty, windows.n_long, windows.n_long_windows
        )
        yield EmbeddedBlock(vectors, report)


def center_by_language(vectors: Vectors, languages: Sequence[str]) -> Vectors:
    """Subtract from every vector the mean vector of its language; zero vectors stay out of it.

    >>> center_by_language(np.float32([[1], [3], [9]]), ["de", "de", "fr"]).tolist()
    [[-1.0], [1.0], [0.0]]
    """
    if len(languages) != len(vectors):
        raise InputError(
            f"{len(languages)} languages for {len(vectors)} sentences",
            fix="give one language for each sentence",
        )
    centered, names, filled = vectors.copy(), np.asarray(languages), vectors.any(axis=1)
    for language in np.unique(names[filled]):
        rows = filled & (names == language)
        centered[rows] -= vectors[rows].mean(axis=0, dtype=np.float64).astype(np.float32)
    return centered


def normalize_rows(vectors: Vectors) -> Vectors:
    """Scale every vector to length one; a zero vector stays zero.

    >>> normalize_rows(np.float32([[3, 4], [0, 0]])).round(3).tolist()
    [[0.6000000238418579, 0.800000011920929], [0.0, 0.0]]
    """
    norms: Vectors = np.sqrt(np.square(vectors).sum(axis=1, keepdims=True))
    norms[norms == 0] = 1
    return vectors / norms


def _pool_windows(
    encoder: Encoder, windows: TextWindows, layers: Sequence[int], budget: int
) -> list[Tensor]:
    """Run the encoder on batches of similar length and average each window's own tokens."""
    device, marks = device_of(encoder), boundary_ids(encoder.tokenizer)
    size = (len(windows.ids), encoder.hidden_size)
    pooled = [torch.empty(size, dtype=torch.float32, device=device) for _ in layers]

    @torch.inference_mode()
    def pool_batch(rows: npt.NDArray[np.int64]) -> None:
        ragged = Ragged.of([windows.ids[row] for row in rows])
        batch = pack(add_special_tokens(ragged, *marks), pad_id=encoder.tokenizer.pad_token_id or 0)
        keep = torch.from_numpy(_keep_text(ragged.lengths, marks)).to(device, non_blocking=True)
        batch = batch.to(device)
        places = torch.from_numpy(rows).to(device)
        for result, states in zip(pooled, encoder(batch, layers), strict=True):
            result[places] = pool_sentences(states, batch.offsets, keep)

    n_workers = torch.get_num_threads() if device.type == "cpu" else 1
    run_batches(pool_batch, bucket_batches(windows.lengths, budget), n_workers)
    return pooled


def _keep_text(
    lengths: npt.NDArray[np.int64], marks: tuple[int | None, int | None]
) -> npt.NDArray[np.bool_]:
    """Tell the tokens of the text from the marks around each sequence."""
    ones = np.ones(int(lengths.sum()), dtype=np.int64)
    first, last = (None if mark is None else 0 for mark in marks)
    return add_special_tokens(Ragged(ones, lengths), first, last).ids.astype(np.bool_)


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


@dataclass(frozen=True, slots=True)
class EmbedReport:
    """What was embedded: `n_long` sentences exceeded the model and took `n_windows` windows."""

    n_sentences: int = 0
    n_empty: int = 0
    n_long: int = 0
    n_windows: int = 0

    def __add__(self, other: EmbedReport) -> EmbedReport:
        return EmbedReport(
            self.n_sentences + other.n_sentences,
            self.n_empty + other.n_empty,
            self.n_long + other.n_long,
            self.n_windows + other.n_windows,
        )


def join_windows(
    windows: TextWindows, pooled: Float[Tensor, "windows hidden"], n_sentences: int
) -> npt.NDArray[np.float32]:
    """Average the windows of each sentence, weighted by their tokens; no window gives zero."""
    lengths = windows.lengths
    n_tokens = np.bincount(windows.line_numbers, lengths, minlength=n_sentences)
    weights = (lengths / n_tokens[windows.line_numbers]).astype(np.float32)
    rows = pooled.cpu() * torch.from_numpy(weights)[:, None]
    joined = torch.zeros(n_sentences, rows.shape[1])
    result: npt.NDArray[np.float32] = joined.index_add_(
        0, torch.from_numpy(windows.line_numbers), rows
    ).numpy()
    return result
