"""Texts and pairs of texts with their classes, laid out for an encoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from calque.models.heads import NO_LABEL
from calque.text.batching import BatchShape, Ragged, reorder
from calque.text.labelled import LabelledText
from calque.text.placing import place_sequences
from calque.text.tokenization import lift_limits

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Int
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

    from calque.tasks.plugging import PluggedTokens
    from calque.types import TokenBatch

    IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ClassBatch:
    """Sequences, the place of each one's first token, and its class."""

    tokens: TokenBatch | PluggedTokens
    firsts: Int[Tensor, "sentences"]
    labels: Int[Tensor, "sentences"]

    def to(self, device: torch.device | str) -> ClassBatch:
        """Copy the tensors to a device, without waiting for the copy."""
        return ClassBatch(
            self.tokens.to(device),
            self.firsts.to(device, non_blocking=True),
            self.labels.to(device, non_blocking=True),
        )


@dataclass(frozen=True, slots=True)
class ClassExamples:
    """Encoded texts with their classes; one unknown to the classifier is `NO_LABEL`."""

    text: Ragged
    labels: IntArray
    pad_id: int
    counts: Mapping[str, int]

    @property
    def lengths(self) -> IntArray:
        """Give the number of tokens of every example."""
        return self.text.lengths

    def collate(self, rows: IntArray, shape: BatchShape | None = None) -> ClassBatch:
        """Lay out some examples, without padding or up to a fixed shape."""
        placed = place_sequences(reorder(self.text, rows), pad_id=self.pad_id, shape=shape)
        n_most = len(rows) if shape is None else max(shape.sequences, len(rows))
        firsts, labels = np.zeros(n_most, np.int64), np.full(n_most, NO_LABEL, np.int64)
        firsts[: len(rows)], labels[: len(rows)] = placed.starts, self.labels[rows]
        return ClassBatch(placed.tokens, torch.from_numpy(firsts), torch.from_numpy(labels))


def encode_texts(
    tokenizer: PreTrainedTokenizerFast,
    examples: Sequence[LabelledText],
    classes: Sequence[str],
    longest: int,
) -> ClassExamples:
    """Encode texts with the tokenizer's own special tokens; count those that had to be cut.

    Of a pair the longer text loses tokens at its end, one after the other, as is usual.
    """
    inputs = [example.texts if len(example.texts) > 1 else example.texts[0] for example in examples]
    backend = lift_limits(tokenizer.backend_tokenizer)
    found = [encoding.ids for encoding in backend.encode_batch_fast(inputs)]
    long = [k for k, ids in enumerate(found) if len(ids) > longest]
    if long:
        backend.enable_truncation(longest, strategy="longest_first")
        try:
            cut = backend.encode_batch_fast([inputs[k] for k in long])
        finally:
            lift_limits(backend)
        for k, encoding in zip(long, cut, strict=True):
            found[k] = encoding.ids
    numbers = {name: number for number, name in enumerate(classes)}
    labels = np.array([numbers.get(e.label, NO_LABEL) for e in examples], dtype=np.int64)
    counts = {"texts_cut": len(long), "unknown_classes": int((labels == NO_LABEL).sum())}
    kept = {name: count for name, count in counts.items() if count}
    return ClassExamples(Ragged.of(found), labels, tokenizer.pad_token_id or 0, kept)
