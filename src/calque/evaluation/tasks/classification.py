"""Texts and pairs of texts with their classes, laid out for an encoder.

Texts with their classes beside their translations, for a classifier that plugs VECO in.

A classifier of texts on top of an encoder, and how it learns.

Classes of pairs of sentences by fine-tuning: inference (XNLI), paraphrase (PAWS-X).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from calque.errors import InputError
from calque.evaluation.finetuning.experiment import FinetuneExperiment, PlugInSetup, TestScores
from calque.evaluation.finetuning.finetune import predict
from calque.evaluation.finetuning.head_model import (
    HeadModel,
    max_sequence_length,
    move_to_device_of,
)
from calque.evaluation.finetuning.plug_in import PairRows, TranslatedExample
from calque.evaluation.finetuning.transfer import LabeledCorpus, TranslatedPairs, choose_tests
from calque.evaluation.records import ItemScores
from calque.evaluation.settings import remember
from calque.io.labeled import LabeledText, read_labeled_pairs
from calque.io.xtreme import TaskFiles, find_xtreme_files
from calque.models.heads import NO_LABEL, SentenceClassifier, mean_cross_entropy
from calque.tokens.layout import build_packed_layout
from calque.tokens.ragged import BatchShape, Ragged, reorder
from calque.tokens.tokenizer import disable_truncation_and_padding

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Float, Int
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

    from calque.evaluation.finetuning.plug_in import PlugInTokens
    from calque.evaluation.records import LanguageScores
    from calque.evaluation.settings import TaskSettings
    from calque.models.encoder import Encoder
    from calque.types import TokenBatch

    IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ClassBatch:
    """Sequences, the place of each one's first token, and its class."""

    tokens: TokenBatch | PlugInTokens
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
        placed = build_packed_layout(reorder(self.text, rows), pad_id=self.pad_id, shape=shape)
        n_most = len(rows) if shape is None else max(shape.sequences, len(rows))
        firsts, labels = np.zeros(n_most, np.int64), np.full(n_most, NO_LABEL, np.int64)
        firsts[: len(rows)], labels[: len(rows)] = placed.starts, self.labels[rows]
        return ClassBatch(placed.tokens, torch.from_numpy(firsts), torch.from_numpy(labels))


def encode_texts(
    tokenizer: PreTrainedTokenizerFast,
    examples: Sequence[LabeledText],
    classes: Sequence[str],
    longest: int,
) -> ClassExamples:
    """Encode texts with the tokenizer's own special tokens; count those that had to be cut.

    Of a pair the longer text loses tokens at its end, one after the other, as is usual.
    """
    inputs = [example.texts if len(example.texts) > 1 else example.texts[0] for example in examples]
    backend = disable_truncation_and_padding(tokenizer.backend_tokenizer)
    found = [encoding.ids for encoding in backend.encode_batch_fast(inputs)]
    long = [k for k, ids in enumerate(found) if len(ids) > longest]
    if long:
        backend.enable_truncation(longest, strategy="longest_first")
        try:
            cut = backend.encode_batch_fast([inputs[k] for k in long])
        finally:
            disable_truncation_and_padding(backend)
        for k, encoding in zip(long, cut, strict=True):
            found[k] = encoding.ids
    numbers = {name: number for number, name in enumerate(classes)}
    labels = np.array([numbers.get(e.label, NO_LABEL) for e in examples], dtype=np.int64)
    counts = {"texts_cut": len(long), "unknown_classes": int((labels == NO_LABEL).sum())}
    kept = {name: count for name, count in counts.items() if count}
    return ClassExamples(Ragged.of(found), labels, tokenizer.pad_token_id or 0, kept)


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
        tokens, placed = self.rows.collate(texts.text, rows, pad_id=texts.pad_id, shape=shape)
        n_most = 2 * (len(rows) if shape is None else max(shape.sequences, len(rows)))
        firsts, labels = np.zeros(n_most, np.int64), np.full(n_most, NO_LABEL, np.int64)
        numbers, is_counted = self.rows.sequences(rows), self.rows.counted(rows)
        firsts[: len(numbers)] = placed.starts
        labels[: len(numbers)] = np.where(is_counted, texts.labels[numbers], NO_LABEL)
        return ClassBatch(tokens, torch.from_numpy(firsts), torch.from_numpy(labels))


def encode_class_pairs(
    encode: Callable[[Sequence[LabeledText], list[str]], ClassExamples],
    pairs: Sequence[TranslatedExample[LabeledText]],
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


class TextClassifier(HeadModel):
    """Classifies a sequence by the state of its first token."""

    supports_plug_in = True

    def __init__(
        self, encoder: Encoder, n_classes: int, settings: TaskSettings, generator: torch.Generator
    ) -> None:
        super().__init__(encoder, settings, generator)
        self.head = SentenceClassifier(self.width, n_classes, settings.dropout, generator)
        move_to_device_of(self, encoder)

    def score(self, batch: ClassBatch) -> Float[Tensor, "sentences classes"]:
        """Give every class its score."""
        scores: Tensor = self.head(self.read(batch.tokens)[batch.firsts])
        return scores

    def forward(self, batch: ClassBatch) -> Float[Tensor, ""]:
        """Give the mean loss of a batch."""
        return mean_cross_entropy(self.score(batch), batch.labels)

    def classify(self, examples: ClassExamples | ClassPairs, settings: TaskSettings) -> IntArray:
        """Give every example its most probable class."""
        found = np.empty(len(examples.lengths), dtype=np.int64)
        answers = predict(self, examples, settings, lambda batch: self.score(batch).argmax(1))
        for rows, _, answer in list(answers):
            # Of pairs the answers on the translations come after those on the examples.
            found[rows] = answer[: len(rows)].cpu().numpy()
        return found


def make_lesson(
    encoder: Encoder, corpus: LabeledCorpus[LabeledText], settings: TaskSettings
) -> FinetuneExperiment[LabeledText]:
    """Say how a classifier learns a corpus; its score is accuracy, an item an example."""
    longest, tokenizer = max_sequence_length(encoder, settings), encoder.tokenizer

    def make_model(
        encoder: Encoder, classes: list[str], generator: torch.Generator
    ) -> TextClassifier:
        return TextClassifier(encoder, len(classes), settings, generator)

    def score(model: TextClassifier, test: ClassExamples | ClassPairs) -> TestScores:
        right = model.classify(test, settings) == test.labels
        items = ItemScores(right.astype(np.float64), np.ones(len(right)))
        return TestScores({"accuracy": items.score}, items)

    def encode(examples: Sequence[LabeledText], classes: list[str]) -> ClassExamples:
        return encode_texts(tokenizer, examples, classes, longest)

    plug = None
    if settings.plug == "in":
        partners = TranslatedPairs(corpus, corpus.read, _find_original)
        plug = PlugInSetup(partners, partial(encode_class_pairs, encode))
    return FinetuneExperiment(
        corpus,
        labels_of=lambda example: (example.label,),
        check_labels=list,
        encode=encode,
        make_model=make_model,
        score=score,
        plug=plug,
    )


def _find_original(example: LabeledText) -> LabeledText | None:
    """Give what was translated, where the file of translations has it."""
    return None if example.original is None else LabeledText(example.original, example.label)


TaskName = Literal["xnli", "pawsx"]
XNLI: TaskName = "xnli"
PAWSX: TaskName = "pawsx"


def measure_pairs(
    encoder: Encoder,
    data: Path,
    *,
    task: TaskName,
    languages: Sequence[str] | None = None,
    settings: TaskSettings,
    seed: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[LanguageScores]:
    """Train a classifier of pairs as the setting says, and give its accuracy by language.

    Without a training file the dev file is divided by groups of pairs that share a sentence, and
    every language is tested on the same part of it, since the files translate each other.
    """
    tests = list_languages(data, settings, task) if languages is None else list(languages)
    key = (task, str(data), settings.hash())
    lesson = remember(
        encoder.tokenizer, key, lambda: make_lesson(encoder, _open(data, settings, task), settings)
    )
    return lesson.measure(encoder, tests, seed, on_progress)


def list_languages(data: Path, settings: TaskSettings, task: TaskName) -> list[str]:
    """List the languages that the files allow to test in this setting, the source first."""
    corpus = _open(data, settings, task)
    return choose_tests(settings, corpus.trainable, corpus.files.test_languages)


def find_files(data: Path, task: TaskName) -> TaskFiles:
    """Find XTREME's files of a task."""
    files = find_xtreme_files(data, task, n_columns=3)
    if files is None:
        fix = f"give {task}/train-en.tsv and dev-XX.tsv"
        raise InputError(f"no files of {task} here", file=data, fix=fix)
    return files


def _open(data: Path, settings: TaskSettings, task: TaskName) -> LabeledCorpus[LabeledText]:
    return LabeledCorpus(
        find_files(data, task),
        read_labeled_pairs,
        settings,
        texts_of=lambda example: example.texts,
        label_of=lambda example: example.label,
    )
