"""Texts with their classes beside their translations, for a classifier that plugs VECO in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from calque.models.heads import NO_LABEL
from calque.tasks.class_examples import ClassBatch, ClassExamples
from calque.tasks.plugging import Paired, PairRows
from calque.text.batching import BatchShape, Ragged
from calque.text.labelled import LabelledText

if TYPE_CHECKING:
    import numpy.typing as npt

    IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ClassPairs:
    """Pairs among encoded texts; `counts` says what happened to those that are asked about."""

    texts: ClassExamples
    rows: PairRows
    counts: Mapping[str, int]

    @property
    def labels(self) -> IntArray:
        """Give the classes of the examples, not those of their translations."""
        return self.texts.labels[self.rows.left]

    @property
    def lengths(self) -> IntArray:
        """Give the number of tokens of every pair."""
        return self.rows.count_tokens(self.texts.text)

    def collate(self, rows: IntArray, shape: BatchShape | None = None) -> ClassBatch:
        """Lay out some pairs, without padding or up to a fixed shape; examples come first."""
        texts = self.texts
        tokens, placed = self.rows.place(texts.text, rows, pad_id=texts.pad_id, shape=shape)
        n_most = 2 * (len(rows) if shape is None else max(shape.sequences, len(rows)))
        firsts, labels = np.zeros(n_most, np.int64), np.full(n_most, NO_LABEL, np.int64)
        numbers, is_asked = self.rows.sequences(rows), self.rows.asked(rows)
        firsts[: len(numbers)] = placed.starts
        labels[: len(numbers)] = np.where(is_asked, texts.labels[numbers], NO_LABEL)
        return ClassBatch(tokens, torch.from_numpy(firsts), torch.from_numpy(labels))


def encode_class_pairs(
    encode: Callable[[Sequence[LabelledText], list[str]], ClassExamples],
    pairs: Sequence[Paired[LabelledText]],
    classes: list[str],
) -> ClassPairs:
    """Encode examples and their translations as a plain classifier would read them."""
    own = encode([pair.example for pair in pairs], classes)
    others = encode([pair.other for pair in pairs if pair.other is not None], classes)
    is_there = np.array([pair.other is not None for pair in pairs], dtype=np.bool_)
    right = np.full(len(pairs), -1, dtype=np.int64)
    right[is_there] = len(pairs) + np.arange(int(is_there.sum()))
    learns = np.array([pair.learns_other for pair in pairs], dtype=np.bool_) & is_there
    text = Ragged(
        np.concatenate([own.text.ids, others.text.ids]),
        np.concatenate([own.text.lengths, others.text.lengths]),
    )
    labels = np.concatenate([own.labels, others.labels])
    counts = dict(own.counts)
    if others.counts.get("texts_cut"):
        counts["translations_cut"] = others.counts["texts_cut"]
    rows = PairRows(np.arange(len(pairs)), right, np.ones(len(pairs), np.bool_), learns)
    return ClassPairs(ClassExamples(text, labels, own.pad_id, own.counts), rows, counts)
