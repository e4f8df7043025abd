"""Classification by fine-tuning: inference (XNLI), paraphrases (PAWS-X), sentiment of reviews.

Reviews are those of Prettenhofer & Stein (2010), of all domains or of one, or plain `text ⇥ label`
lines.
"""

from __future__ import annotations

from collections import Counter
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
from calque.evaluation.finetuning.labeled_corpus import LabeledCorpus
from calque.evaluation.finetuning.plug_in import PairRows, TranslatedExample, TranslatedPairs
from calque.evaluation.finetuning.transfer import choose_tests
from calque.evaluation.records import ItemScores
from calque.evaluation.settings import remember
from calque.io.labeled import (
    REVIEW_FOLDERS,
    LabeledText,
    find_reviews,
    read_labeled_pairs,
    read_labeled_texts,
    read_reviews,
)
from calque.io.xtreme import TaskFiles, find_xtreme_files
from calque.models.heads import NO_LABEL, SentenceClassifier, mean_cross_entropy
from calque.objectives.base import TensorBatch
from calque.tokens.layout import build_packed_layout
from calque.tokens.ragged import BatchShape, Ragged, reorder
from calque.tokens.tokenizer import disable_truncation_and_padding

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Float, Int
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

    from calque.evaluation.finetuning.plug_in import PlugInTokens
    from calque.evaluation.finetuning.transfer import OnProgress
    from calque.evaluation.records import LanguageScores
    from calque.evaluation.settings import TaskSettings
    from calque.models.encoder import Encoder
    from calque.types import TokenBatch

    IntArray = npt.NDArray[np.int64]

TaskName = Literal["xnli", "pawsx", "reviews", "reviews_books", "reviews_dvd", "reviews_music"]
REVIEWS: TaskName = "reviews"


def measure(
    encoder: Encoder,
    data: Path,
    *,
    task: TaskName,
    languages: Sequence[str] | None = None,
    settings: TaskSettings,
    seed: int,
    on_progress: OnProgress = lambda done, total: None,
) -> list[LanguageScores]:
    """Train a classifier as the setting requires and return its accuracy by language.

    If pairs have no training file, the development file is split such that pairs that share a
    sentence stay together, and all languages are tested on the same part of it, because their
    files are translations of each other. An item is an example.
    """
    tests = list_languages(data, settings, task) if languages is None else list(languages)
    key = (task, str(data), settings.hash())
    experiment = remember(
        encoder.tokenizer,
        key,
        lambda: build_experiment(encoder, _open_corpus(data, settings, task), settings),
    )
    return experiment.measure(encoder, tests, seed, on_progress)


def list_languages(data: Path, settings: TaskSettings, task: TaskName) -> list[str]:
    """List the languages that can be tested in this setting, the source first."""
    corpus = _open_corpus(data, settings, task)
    return choose_tests(settings, corpus.trainable, corpus.files.test_languages)


def find_files(data: Path, task: TaskName) -> TaskFiles:
    """Find the files of a task: XTREME's layout, or for reviews also that of their corpus."""
    if task.startswith(REVIEWS):
        domain = task.removeprefix(REVIEWS).removeprefix("_")
        files = find_reviews(data, domain or "*")
        names = f"{REVIEW_FOLDERS[0]}/LANGUAGE/{domain or 'DOMAIN'}/train.review"
        if not domain:
            for name in REVIEW_FOLDERS:
                files = files or find_xtreme_files(data, name, n_columns=2)
            names += f" or {REVIEWS}/train-XX.tsv"
    else:
        files = find_xtreme_files(data, task, n_columns=3)
        names = f"{task}/train-en.tsv and dev-XX.tsv"
    if files is None:
        problem = f"the folder has no files of {task}"
        raise InputError(problem, file=data, fix=f"pass a folder with {names}")
    return files


def _open_corpus(data: Path, settings: TaskSettings, task: TaskName) -> LabeledCorpus[LabeledText]:
    files = find_files(data, task)
    if not task.startswith(REVIEWS):
        return LabeledCorpus(
            files,
            read_labeled_pairs,
            settings,
            texts_of=lambda example: example.texts,
            label_of=lambda example: example.label,
        )
    dropped: dict[Path, Counter[str]] = {}

    def read(path: Path) -> list[LabeledText]:
        if ".review" not in path.suffixes:
            return read_labeled_texts(path)
        return read_reviews(path, dropped.setdefault(path, Counter()))

    return LabeledCorpus(files, read, settings, dropped=dropped)


def build_experiment(
    encoder: Encoder, corpus: LabeledCorpus[LabeledText], settings: TaskSettings
) -> FinetuneExperiment[LabeledText]:
    """Return the experiment that trains a classifier on a corpus."""
    longest, tokenizer = max_sequence_length(encoder, settings), encoder.tokenizer

    def make_model(
        encoder: Encoder, classes: list[str], generator: torch.Generator
    ) -> TextClassifier:
        return TextClassifier(encoder, len(classes), settings, generator)

    def score(model: TextClassifier, test: ClassExamples | ClassPairs) -> TestScores:
        is_correct = model.classify(test, settings) == test.labels
        items = ItemScores(is_correct.astype(np.float64), np.ones(len(is_correct)))
        return TestScores({"accuracy": items.score}, items)

    def encode(examples: Sequence[LabeledText], classes: list[str]) -> ClassExamples:
        return encode_texts(tokenizer, examples, classes, longest)

    def find_original(example: LabeledText) -> LabeledText | None:
        return None if example.original is None else LabeledText(example.original, example.label)

    plug = None
    if settings.plug == "in":
        pairs = TranslatedPairs(corpus, corpus.read, find_original)
        plug = PlugInSetup(pairs, partial(encode_class_pairs, encode))
    return FinetuneExperiment(
        corpus,
        labels_of=lambda example: (example.label,),
        check_labels=list,
        encode=encode,
        make_model=make_model,
        score=score,
        plug=plug,
    )


@dataclass(frozen=True, slots=True)
class ClassBatch(TensorBatch):
    """Sequences, the positions of their first tokens, and their labels."""

    tokens: TokenBatch | PlugInTokens
    firsts: Int[Tensor, "sentences"]
    labels: Int[Tensor, "sentences"]

    @staticmethod
    def build(
        tokens: TokenBatch | PlugInTokens, starts: IntArray, labels: IntArray, n_rows: int
    ) -> ClassBatch:
        """Return a batch that is padded to a number of rows."""
        rows = np.zeros(n_rows, np.int64), np.full(n_rows, NO_LABEL, np.int64)
        rows[0][: len(starts)], rows[1][: len(labels)] = starts, labels
        return ClassBatch(tokens, *map(torch.from_numpy, rows))


@dataclass(frozen=True, slots=True)
class ClassExamples:
    """Encoded texts with their labels; a class that the classifier does not know is `NO_LABEL`."""

    text: Ragged
    labels: IntArray
    pad_id: int
    counts: Mapping[str, int]

    @property
    def lengths(self) -> IntArray:
        """The number of tokens of every example."""
        return self.text.lengths

    def collate(self, rows: IntArray, shape: BatchShape | None = None) -> ClassBatch:
        """Return a batch of some examples, without padding or padded to a fixed shape."""
        layout = build_packed_layout(reorder(self.text, rows), pad_id=self.pad_id, shape=shape)
        n_rows = len(rows) if shape is None else max(shape.sequences, len(rows))
        return ClassBatch.build(layout.tokens, layout.starts, self.labels[rows], n_rows)


def encode_texts(
    tokenizer: PreTrainedTokenizerFast,
    examples: Sequence[LabeledText],
    classes: Sequence[str],
    longest: int,
) -> ClassExamples:
    """Encode texts with the tokenizer's special tokens, and count those that are truncated.

    Of a pair, the longer text is truncated first, token by token.
    """
    inputs = [example.texts if len(example.texts) > 1 else example.texts[0] for example in examples]
    backend = disable_truncation_and_padding(tokenizer.backend_tokenizer)
    encoded = [encoding.ids for encoding in backend.encode_batch_fast(inputs)]
    too_long = [k for k, ids in enumerate(encoded) if len(ids) > longest]
    if too_long:
        backend.enable_truncation(longest, strategy="longest_first")
        try:
            truncated = backend.encode_batch_fast([inputs[k] for k in too_long])
        finally:
            disable_truncation_and_padding(backend)
        for k, encoding in zip(too_long, truncated, strict=True):
            encoded[k] = encoding.ids
    numbers = {name: number for number, name in enumerate(classes)}
    labels = np.array([numbers.get(e.label, NO_LABEL) for e in examples], dtype=np.int64)
    counts = {"texts_cut": len(too_long), "unknown_classes": int((labels == NO_LABEL).sum())}
    counts = {name: count for name, count in counts.items() if count}
    return ClassExamples(Ragged.of(encoded), labels, tokenizer.pad_token_id or 0, counts)


@dataclass(frozen=True, slots=True)
class ClassPairs:
    """Pairs of encoded texts and their translations, for plug-in fine-tuning."""

    texts: ClassExamples
    rows: PairRows
    counts: Mapping[str, int]

    @property
    def labels(self) -> IntArray:
        """The labels of the examples, without those of their translations."""
        return self.texts.labels[self.rows.left]

    @property
    def lengths(self) -> IntArray:
        """The number of tokens of every pair."""
        return self.rows.count_tokens(self.texts.text)

    def collate(self, rows: IntArray, shape: BatchShape | None = None) -> ClassBatch:
        """Return a batch of some pairs, all examples before all translations."""
        texts = self.texts
        tokens, layout = self.rows.collate(texts.text, rows, pad_id=texts.pad_id, shape=shape)
        numbers, is_counted = self.rows.sequences(rows), self.rows.counted(rows)
        labels = np.where(is_counted, texts.labels[numbers], NO_LABEL)
        n_rows = 2 * (len(rows) if shape is None else max(shape.sequences, len(rows)))
        return ClassBatch.build(tokens, layout.starts, labels, n_rows)


def encode_class_pairs(
    encode: Callable[[Sequence[LabeledText], list[str]], ClassExamples],
    pairs: Sequence[TranslatedExample[LabeledText]],
    classes: list[str],
) -> ClassPairs:
    """Encode examples and their translations."""
    own = encode([pair.example for pair in pairs], classes)
    others = encode([pair.other for pair in pairs if pair.other is not None], classes)
    is_translated = np.array([pair.other is not None for pair in pairs], dtype=np.bool_)
    right = np.full(len(pairs), -1, dtype=np.int64)
    right[is_translated] = len(pairs) + np.arange(int(is_translated.sum()))
    learns = np.array([pair.learns_other for pair in pairs], dtype=np.bool_) & is_translated
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
    """Classifies a sequence by the hidden state of its first token."""

    supports_plug_in = True

    def __init__(
        self, encoder: Encoder, n_classes: int, settings: TaskSettings, generator: torch.Generator
    ) -> None:
        super().__init__(encoder, settings, generator)
        self.head = SentenceClassifier(
            self.width, n_classes, settings.dropout, generator, pooler=settings.pooler
        )
        move_to_device_of(self, encoder)

    def score(self, batch: ClassBatch) -> Float[Tensor, "sentences classes"]:
        """Return the scores of all classes."""
        scores: Tensor = self.head(self.read(batch.tokens)[batch.firsts])
        return scores

    def forward(self, batch: ClassBatch) -> Float[Tensor, ""]:
        """Return the mean loss of a batch."""
        return mean_cross_entropy(self.score(batch), batch.labels)

    def classify(self, examples: ClassExamples | ClassPairs, settings: TaskSettings) -> IntArray:
        """Return the most probable class of every example."""
        classes = np.empty(len(examples.lengths), dtype=np.int64)
        batches = predict(self, examples, settings, lambda batch: self.score(batch).argmax(1))
        for rows, _, best in list(batches):
            # In batches of pairs, translations come after the examples.
            classes[rows] = best[: len(rows)].cpu().numpy()
        return classes
