"""models.inference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from calque.tokens.tokenizer import encode_sentences

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Float
    from torch import Tensor

    from calque.models.encoder import Encoder

    IntArray = npt.NDArray[np.int64]

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from calque.errors import InputError

if TYPE_CHECKING:
    import numpy.typing as npt

    from calque.models.encoder import Encoder
    from calque.models.language_maps import LanguageMaps

    Vectors = npt.NDArray[np.float32]


BatchT = TypeVar("BatchT")


# On a CPU a batch should fit one core's cache, on a GPU fill the machine.
BATCH_TOKENS = {"cpu": 1024, "cuda": 1 << 16}


def check_maps(encoder: Encoder, map_from: object) -> LanguageMaps | None:
    """Give the maps to apply; to be silent about the language where there are maps is an error."""
    if encoder.maps is None and map_from is not None:
        fix = "load it with maps=True, or the folder of other maps"
        raise InputError("this model was loaded without maps", fix=fix)
    if encoder.maps is not None and map_from is None:
        raise InputError(
            "this model maps by language, and is not told the language",
            fix=f"give map_from, {encoder.maps.pivot!r} for what stays, or load it without maps",
        )
    return encoder.maps


def cut_blocks(sentences: Iterable[str], most: int, most_characters: int) -> Iterator[list[str]]:
    """Cut a stream of lines into blocks of bounded size."""
    block: list[str] = []
    n_characters = 0
    for sentence in sentences:
        block.append(sentence)
        n_characters += len(sentence)
        if len(block) == most or n_characters >= most_characters:
            yield block
            block, n_characters = [], 0
    if block:
        yield block


def run_batches(work: Callable[[BatchT], None], batches: Sequence[BatchT], n_workers: int) -> None:
    """Do the work for every batch, one core a batch.

    Several cores on one batch would wait for each other after every operation: that took twice
    the CPU time on two busy cores.
    """
    if n_workers == 1:
        for batch in batches:
            work(batch)
        return
    pool = ThreadPoolExecutor(n_workers, initializer=partial(torch.set_num_threads, 1))
    try:
        deque(pool.map(work, batches), maxlen=0)
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(n_workers)  # for threads yet to start; this one never changed


def device_of(encoder: Encoder) -> torch.device:
    """Tell where an encoder is."""
    return next(encoder.parameters()).device


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


@dataclass(frozen=True, slots=True)
class Windows:
    """Token sequences that fit the model, and the sentence each is a part of."""

    ids: list[npt.NDArray[np.int64]]
    owners: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    report: EmbedReport


def cut_windows_windows(encoder: Encoder, sentences: list[str]) -> Windows:
    """Tokenise sentences; a long one becomes consecutive windows of even size."""
    room = encoder.max_tokens - sum(mark is not None for mark in marks_of(encoder))
    pieces, owners, n_long, n_empty = [], [], 0, 0
    texts = ["" if sentence.isspace() else sentence for sentence in sentences]
    for number, ids in enumerate(encode_sentences(encoder.tokenizer, texts)):
        cuts = np.array_split(ids, -(-len(ids) // room)) if len(ids) > room else [ids]
        n_long, n_empty = n_long + (len(cuts) > 1), n_empty + (len(ids) == 0)
        if len(ids):
            pieces += cuts
            owners += [number] * len(cuts)
    n_extra = len(pieces) + n_empty - len(sentences)
    report = EmbedReport(len(sentences), n_empty, n_long, n_extra + n_long)
    lengths = np.array([len(piece) for piece in pieces], dtype=np.int64)
    return Windows(pieces, np.array(owners, dtype=np.int64), lengths, report)


def join_windows(
    windows: Windows, pooled: Float[Tensor, "windows hidden"], n_sentences: int
) -> npt.NDArray[np.float32]:
    """Average the windows of each sentence, weighted by their tokens; no window gives zero."""
    n_tokens = np.bincount(windows.owners, windows.lengths, minlength=n_sentences)
    weights = (windows.lengths / n_tokens[windows.owners]).astype(np.float32)
    rows = pooled.cpu() * torch.from_numpy(weights)[:, None]
    joined = torch.zeros(n_sentences, rows.shape[1])
    result: npt.NDArray[np.float32] = joined.index_add_(
        0, torch.from_numpy(windows.owners), rows
    ).numpy()
    return result


def marks_of(encoder: Encoder) -> tuple[int | None, int | None]:
    """Give the ids of the marks before and after a sequence."""
    return encoder.tokenizer.cls_token_id, encoder.tokenizer.sep_token_id
