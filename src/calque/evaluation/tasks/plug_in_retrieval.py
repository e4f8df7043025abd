"""Sentence vectors of VECO with its cross-attention, for the retrieval tasks with plug=in.

Both sides of a test are read beside machine translations of themselves. The human translation of
a sentence is what the tasks ask for, so it is never read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from calque.errors import InputError
from calque.evaluation.finetuning.plug_in import check_plug_in
from calque.models.inference import BATCH_TOKENS, device_of, run_batches
from calque.models.pooling import pool_sentences
from calque.models.veco import Veco
from calque.sentences.embed import average_windows, pack_windows
from calque.tokens.ragged import batch_by_length
from calque.tokens.windows import split_long_sentences

if TYPE_CHECKING:
    import numpy.typing as npt

    from calque.evaluation.settings import TaskSettings
    from calque.models.encoder import Encoder
    from calque.tokens.windows import TextWindows

    IntArray = npt.NDArray[np.int64]
    Vectors = npt.NDArray[np.float32]


def check_retrieval_plug_in(encoder: Encoder, settings: TaskSettings) -> Veco:
    """Return the model; raise an InputError if it or another setting does not fit plug=in."""
    check_plug_in(encoder, supports_plug_in=True)
    assert isinstance(encoder, Veco)
    if settings.neutral or encoder.maps is not None:
        problem = "plug=in cannot be combined with a language-neutral space or maps"
        raise InputError(problem, fix="they are made for H alone: leave them out, or set plug=out")
    return encoder


def missing_translations(folder: Path, example: str) -> InputError:
    """Return the error for a test without machine translations."""
    return InputError(
        "plug=in needs machine translations of both sides of the test",
        file=folder,
        fix=f"write them to {folder.name}/{example} and so on, or set plug=out",
    )


def embed_with_translations(
    veco: Veco, sentences: Sequence[str], translations: Sequence[str], layers: Sequence[int]
) -> tuple[dict[int, Vectors], int]:
    """Return the mean [H ; S] of sentences at several layers, and how many are in windows.

    S reads the translation of the sentence; a sentence with an empty one has [H ; H]. Window k of
    a long sentence reads window k of its translation, or the last. Paper: retrieval with plug-in
    is reported, but how a sentence is read is not described; [H ; S] is that of other tasks.
    """
    numbers = [veco.check_layer(layer) for layer in layers]
    own, others = (
        split_long_sentences(veco.tokenizer, texts, veco.max_tokens)
        for texts in (sentences, translations)
    )
    partners = _pair_windows(own, others)
    pooled = [torch.empty(len(own.ids), 2 * veco.hidden_size) for _ in numbers]
    device = device_of(veco)

    @torch.inference_mode()
    def pool_batch(rows: IntArray) -> None:
        """Pool windows that all have a translation, or that all have none."""
        batch, is_text = pack_windows(veco, [own.ids[row] for row in rows])
        alone = crossed = veco(batch, numbers)
        if partners[rows[0]] >= 0:
            read, _ = pack_windows(veco, [others.ids[row] for row in partners[rows]])
            crossed = veco.cross_layers(batch, veco(read)[0], read, numbers)
        index = torch.from_numpy(rows)
        for result, *both in zip(pooled, alone, crossed, strict=True):
            result[index] = pool_sentences(torch.cat(both, dim=-1), batch.offsets, is_text).cpu()

    lengths = own.lengths + np.append(others.lengths, 0)[partners]  # −1 is the last one
    budget = BATCH_TOKENS.get(device.type, BATCH_TOKENS["cpu"])
    batches = [
        rows[batch]
        for rows in (np.flatnonzero(partners >= 0), np.flatnonzero(partners < 0))
        for batch in batch_by_length(lengths[rows], budget)
    ]
    run_batches(pool_batch, batches, torch.get_num_threads() if device.type == "cpu" else 1)
    for number, rows in zip(numbers, pooled, strict=True):
        veco.check_finite(rows, number)
    vectors = [average_windows(own, rows) for rows in pooled]
    return dict(zip(numbers, vectors, strict=True)), own.n_long


def _pair_windows(own: TextWindows, others: TextWindows) -> IntArray:
    """Return the window of the translation that every window reads; −1 if there is none."""
    n_own, n_others = (
        np.bincount(each.line_numbers, minlength=each.n_lines) for each in (own, others)
    )
    lines = own.line_numbers
    rank = np.arange(len(lines)) - (np.cumsum(n_own) - n_own)[lines]
    last = n_others[lines] - 1
    first = (np.cumsum(n_others) - n_others)[lines]
    return np.where(last < 0, -1, first + np.minimum(rank, last))
