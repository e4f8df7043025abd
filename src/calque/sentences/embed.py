"""Sentence vectors: the hidden states of one layer, averaged over the tokens of each sentence."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from calque.errors import InputError
from calque.io.files import (
    check_output_file,
    check_skip_list,
    count_input_lines,
    open_skip_list,
    read_lines,
    write_atomically,
)
from calque.io.locks import lock_output
from calque.models.inference import (
    BATCH_TOKENS,
    check_maps,
    cut_blocks,
    device_of,
    load_encoder,
    run_batches,
)
from calque.models.pooling import pool_sentences
from calque.tokens.ragged import Ragged, add_special_tokens, batch_by_length, pack
from calque.tokens.store import NpyWriter
from calque.tokens.tokenizer import boundary_ids
from calque.tokens.windows import TextWindows, split_long_sentences

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Bool, Float
    from torch import Tensor

    from calque.io.files import PathLike
    from calque.models.encoder import Encoder
    from calque.models.language_maps import LanguageMaps
    from calque.types import Progress, TokenBatch

    Vectors = npt.NDArray[np.float32]
    IntArray = npt.NDArray[np.int64]


# A block is tokenized and sorted by length at once; the second limit is for very long lines.
BLOCK_SENTENCES, BLOCK_CHARACTERS = 2048, 1 << 21
# Rows centered at once in a file.
CENTER_ROWS = 4096


@dataclass(frozen=True, slots=True)
class EmbedCounts:
    """Number of sentences; `n_long` exceeded the model's length and were split into `n_windows`."""

    n_sentences: int = 0
    n_empty: int = 0
    n_long: int = 0
    n_windows: int = 0

    def __add__(self, other: EmbedCounts) -> EmbedCounts:
        return EmbedCounts(
            self.n_sentences + other.n_sentences,
            self.n_empty + other.n_empty,
            self.n_long + other.n_long,
            self.n_windows + other.n_windows,
        )


@dataclass(frozen=True, slots=True)
class EmbeddedBlock:
    """Vectors of consecutive sentences, by layer, and their counts."""

    vectors: dict[int, Vectors]
    counts: EmbedCounts


@dataclass(frozen=True, slots=True)
class EmbedResult:
    """Where `embed_file` wrote the vectors, what it read, and how many lines were invalid."""

    output: Path
    counts: EmbedCounts
    n_skipped: int


def embed_file(
    file: PathLike,
    *,
    output: PathLike,
    model: str | Path | Encoder | None = None,
    layer: int | None = None,
    raw: bool = False,
    language: str | None = None,
    maps: PathLike | None = None,
    center: bool = False,
    normalize: bool = False,
    skip_bad: PathLike | None = None,
    device: str = "auto",
    precision: str = "auto",
    progress: Progress | None = None,
) -> EmbedResult:
    """Write one vector per line of a text to a .npy file; row k is line k.

    Lines longer than the model's maximum length are split into windows, whose vectors are averaged.
    An empty line gets a zero vector. The file appears only when it is complete.

    Args:
        file: Text with one sentence per line; plain, .gz, .xz, .zst, or "-" for standard input.
        output: The .npy file to write.
        model: Model folder, hub name, `calque-mini` (the default) or a loaded model.
        layer: Layer: 0 is the embedding layer, -1 the last. Default: the model's best layer.
        raw: Ignore the language-neutral space stored with the model.
        language: Language of the text: apply the model's linear map of it.
        maps: Folder with the linear maps. Default: the model folder.
        center: Subtract the mean of all vectors of the file.
        normalize: Scale every vector to length one.
        skip_bad: Give invalid lines a zero vector and list them in this file.
        device: `auto`, `cpu`, `cuda`, `cuda:1`, ...
        precision: `fp32`, `bf16`, or `auto`: bf16 on CUDA, fp32 elsewhere.
        progress: Called with the stage, the lines done and their number.

    Examples:
        >>> calque.embed_file("news.de", output="news.npy").counts.n_sentences  # doctest: +SKIP
        2000
    """
    output = Path(output)
    if output.suffix != ".npy":
        raise InputError(
            "the vectors are written as a .npy file", file=output, fix=f"try {output.stem}.npy"
        )
    check_output_file(output, [str(file)])
    skip_list = None if skip_bad is None else Path(skip_bad)
    check_skip_list(skip_list, [file], output)
    if maps is not None and language is None:
        raise InputError(
            "maps are given, but not the language of the text", fix="add it: --language de"
        )
    with ExitStack() as stack:
        stack.enter_context(lock_output(output))
        skipped = open_skip_list(skip_list, stack)
        if progress is not None:
            progress("reading", 0, None)
        n_lines = count_input_lines(file, skip_bad=skipped is not None)
        map_folder = True if maps is None else os.fspath(maps)
        own_maps = None if language is None else map_folder
        encoder = load_encoder(model, device, maps=own_maps, precision=precision)
        lines = read_lines(file, skipped, blank_bad=True)
        number, transform = choose_output(encoder, layer, raw, language)
        counts, total = EmbedCounts(), np.zeros(encoder.hidden_size)
        with write_atomically(output, binary=True) as stream:
            array = NpyWriter(stream, "<f4", (encoder.hidden_size,))
            for block in embed_blocks(encoder, lines, [number]):
                vectors = transform(block.vectors[number])
                normalize_now = normalize and not center
                array.append(normalize_vectors(vectors) if normalize_now else vectors)
                total += vectors.sum(axis=0, dtype=np.float64)
                counts += block.counts
                if progress is not None:
                    progress("embedding", counts.n_sentences, n_lines)
            array.close()
            if center:
                n_filled = max(1, counts.n_sentences - counts.n_empty)
                _center_file(Path(stream.name), total / n_filled, normalize)
    return EmbedResult(output, counts, 0 if skipped is None else skipped.n_lines)


def embed_sentences(
    encoder: Encoder,
    sentences: Iterable[str],
    *,
    layer: int | None = None,
    raw: bool = False,
    language: str | Sequence[str] | None = None,
    center_by: Sequence[str] | None = None,
    normalize: bool = False,
    batch_tokens: int | None = None,
) -> Vectors:
    """Return one vector per sentence, shape (sentences, hidden size).

    Sentences longer than the model's maximum length are split into windows, whose vectors are
    averaged. An empty sentence gets a zero vector.

    Args:
        encoder: The encoder.
        sentences: The sentences.
        layer: Layer: 0 is the embedding layer, -1 the last. Default: the model's best layer, in
            its language-neutral space if it has one.
        raw: Ignore the language-neutral space (see `NeutralSpace`).
        language: Language of the sentences, or one per sentence: apply the encoder's linear maps
            instead of the neutral space. Required if the encoder was loaded with maps.
        center_by: One label per sentence, usually its language: subtract the mean vector of all
            sentences with the same label.
        normalize: Scale every vector to length one.
        batch_tokens: Tokens per batch. Default: chosen for the device.
    """
    number, transform = choose_output(encoder, layer, raw, language)
    by_layer = embed_layers(encoder, sentences, [number], batch_tokens=batch_tokens)
    vectors = transform(by_layer[number])
    if center_by is not None:
        vectors = center_by_language(vectors, center_by)
    return normalize_vectors(vectors) if normalize else vectors


def choose_output(
    encoder: Encoder, layer: int | None, raw: bool, language: str | Sequence[str] | None = None
) -> tuple[int, Callable[[Vectors], Vectors]]:
    """Return the layer to embed at and the function that transforms its vectors."""
    maps = check_maps(encoder, language)
    if layer is None and encoder.neutral is not None and not raw and maps is None:
        return encoder.neutral.layer, encoder.neutral.apply
    number = encoder.check_layer(encoder.retrieval_layer if layer is None else layer)
    if maps is None or language is None:
        return number, lambda vectors: vectors
    for name in {language} if isinstance(language, str) else set(language):
        maps.check(name, number)  # before any work
    return number, lambda vectors: _apply_maps(maps, vectors, language, number)


def _apply_maps(
    maps: LanguageMaps, vectors: Vectors, languages: str | Sequence[str], layer: int
) -> Vectors:
    """Map vectors of one language, or each of its own: mean-pooled states map like the states."""
    if isinstance(languages, str):
        return maps.apply(vectors, languages, layer)
    _check_one_per_sentence(languages, vectors)
    mapped, names = vectors.copy(), np.asarray(languages)
    for language in np.unique(names).tolist():
        rows = names == language
        mapped[rows] = maps.apply(vectors[rows], language, layer)
    return mapped


def _check_one_per_sentence(languages: Sequence[str], vectors: Vectors) -> None:
    if len(languages) != len(vectors):
        raise InputError(
            f"there are {len(languages)} languages for {len(vectors)} sentences",
            fix="pass one language per sentence",
        )


def embed_layers(
    encoder: Encoder,
    sentences: Iterable[str],
    layers: Sequence[int],
    *,
    batch_tokens: int | None = None,
) -> dict[int, Vectors]:
    """Return the vectors of sentences at several layers, computed in one pass."""
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
        raise InputError(
            "the sentences are a single string", fix="pass a list of strings: embed([text])"
        )
    numbers = [encoder.check_layer(layer) for layer in layers]
    budget = batch_tokens or BATCH_TOKENS.get(device_of(encoder).type, BATCH_TOKENS["cpu"])
    for block in cut_blocks(sentences, BLOCK_SENTENCES, BLOCK_CHARACTERS):
        windows = split_long_sentences(encoder.tokenizer, block, encoder.max_tokens)
        pooled = _pool_windows(encoder, windows, numbers, budget)
        vectors = {
            number: average_windows(windows, rows)
            for number, rows in zip(numbers, pooled, strict=True)
        }
        n_windows = windows.n_long_windows
        counts = EmbedCounts(windows.n_lines, windows.n_empty, windows.n_long, n_windows)
        yield EmbeddedBlock(vectors, counts)


def _pool_windows(
    encoder: Encoder, windows: TextWindows, layers: Sequence[int], budget: int
) -> list[Float[Tensor, "windows hidden"]]:
    """Average the states of every window at each layer, without special tokens."""
    device, shape = device_of(encoder), (len(windows.ids), encoder.hidden_size)
    pooled = [torch.empty(shape, dtype=torch.float32, device=device) for _ in layers]

    @torch.inference_mode()
    def pool_batch(rows: IntArray) -> None:
        batch, is_text = pack_windows(encoder, [windows.ids[row] for row in rows])
        index = torch.from_numpy(rows).to(device)
        for result, states in zip(pooled, encoder(batch, layers), strict=True):
            result[index] = pool_sentences(states, batch.offsets, is_text)

    n_workers = torch.get_num_threads() if device.type == "cpu" else 1
    run_batches(pool_batch, batch_by_length(windows.lengths, budget), n_workers)
    for layer, rows in zip(layers, pooled, strict=True):
        encoder.check_finite(rows, layer)
    return pooled


def pack_windows(
    encoder: Encoder, ids: Sequence[IntArray]
) -> tuple[TokenBatch, Bool[Tensor, "tokens"]]:
    """Return windows with special tokens on the encoder's device, and which tokens are text."""
    device, special_tokens = device_of(encoder), boundary_ids(encoder.tokenizer)
    # Of every sequence, 1 for the tokens of the text and 0 for the special tokens around them.
    not_text = [None if token is None else 0 for token in special_tokens]
    text = Ragged.of(ids)
    batch = pack(
        add_special_tokens(text, *special_tokens), pad_id=encoder.tokenizer.pad_token_id or 0
    )
    is_text = add_special_tokens(Ragged(np.ones_like(text.ids), text.lengths), *not_text)
    mask = torch.from_numpy(is_text.ids.astype(np.bool_))
    return batch.to(device), mask.to(device, non_blocking=True)


def average_windows(windows: TextWindows, pooled: Float[Tensor, "windows hidden"]) -> Vectors:
    """Average the windows of each sentence, weighted by their number of tokens."""
    lengths, owners = windows.lengths, windows.line_numbers
    n_tokens = np.bincount(owners, lengths, minlength=windows.n_lines)
    weights = (lengths / n_tokens[owners]).astype(np.float32)
    rows = pooled.cpu() * torch.from_numpy(weights)[:, None]
    means = torch.zeros(windows.n_lines, rows.shape[1])
    vectors: Vectors = means.index_add_(0, torch.from_numpy(owners), rows).numpy()
    return vectors


def center_by_language(vectors: Vectors, languages: Sequence[str]) -> Vectors:
    """Subtract from every vector the mean of its language; zero vectors are ignored and stay zero.

    >>> center_by_language(np.float32([[1], [3], [9]]), ["de", "de", "fr"]).tolist()
    [[-1.0], [1.0], [0.0]]
    """
    _check_one_per_sentence(languages, vectors)
    centered, names, filled = vectors.copy(), np.asarray(languages), vectors.any(axis=1)
    for language in np.unique(names[filled]):
        rows = filled & (names == language)
        centered[rows] -= vectors[rows].mean(axis=0, dtype=np.float64).astype(np.float32)
    return centered


def normalize_vectors(vectors: Vectors) -> Vectors:
    """Scale every vector to length one; a zero vector stays zero.

    >>> normalize_vectors(np.float32([[3, 4], [0, 0]])).round(3).tolist()
    [[0.6000000238418579, 0.800000011920929], [0.0, 0.0]]
    """
    norms: Vectors = np.sqrt(np.square(vectors).sum(axis=1, keepdims=True))
    norms[norms == 0] = 1
    return vectors / norms


def _center_file(path: Path, mean: npt.NDArray[np.float64], normalize: bool) -> None:
    """Subtract the mean from every row of a .npy file in place; zero rows stay zero."""
    array = np.load(path, mmap_mode="r+", allow_pickle=False)
    for start in range(0, len(array), CENTER_ROWS):
        rows = array[start : start + CENTER_ROWS]
        centered = np.where(rows.any(axis=1, keepdims=True), rows - mean, 0).astype(np.float32)
        rows[:] = normalize_vectors(centered) if normalize else centered
    array.flush()
