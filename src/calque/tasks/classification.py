"""A classifier of texts on top of an encoder, and how it learns."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from calque.models.heads import SentenceClassifier, mean_cross_entropy
from calque.tasks.class_examples import ClassBatch, ClassExamples, encode_texts
from calque.tasks.class_pairs import ClassPairs, encode_class_pairs
from calque.tasks.finetuning import predict
from calque.tasks.head_task import HeadModel, longest_sequence, place_on
from calque.tasks.lesson import Lesson, PlugIn, Scored
from calque.tasks.outcome import Items
from calque.tasks.partners import Partners
from calque.text.labelled import LabelledText

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch
    from jaxtyping import Float
    from torch import Tensor

    from calque.models.encoder import Encoder
    from calque.tasks.corpus import Corpus
    from calque.tasks.task_settings import TaskSettings

    IntArray = npt.NDArray[np.int64]


class TextClassifier(HeadModel):
    """Classifies a sequence by the state of its first token."""

    can_plug = True

    def __init__(
        self, encoder: Encoder, n_classes: int, settings: TaskSettings, generator: torch.Generator
    ) -> None:
        super().__init__(encoder, settings, generator)
        self.head = SentenceClassifier(self.width, n_classes, settings.dropout, generator)
        place_on(self, encoder)

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
    encoder: Encoder, corpus: Corpus[LabelledText], settings: TaskSettings
) -> Lesson[LabelledText]:
    """Say how a classifier learns a corpus; its score is accuracy, an item an example."""
    longest, tokenizer = longest_sequence(encoder, settings), encoder.tokenizer

    def make_model(
        encoder: Encoder, classes: list[str], generator: torch.Generator
    ) -> TextClassifier:
        return TextClassifier(encoder, len(classes), settings, generator)

    def score(model: TextClassifier, test: ClassExamples | ClassPairs) -> Scored:
        right = model.classify(test, settings) == test.labels
        items = Items(right.astype(np.float64), np.ones(len(right)))
        return Scored({"accuracy": items.score}, items)

    def encode(examples: Sequence[LabelledText], classes: list[str]) -> ClassExamples:
        return encode_texts(tokenizer, examples, classes, longest)

    plug = None
    if settings.plug == "in":
        partners = Partners(corpus, corpus.read, _find_original)
        plug = PlugIn(partners, partial(encode_class_pairs, encode))
    return Lesson(
        corpus,
        labels_of=lambda example: (example.label,),
        check_labels=list,
        encode=encode,
        make_model=make_model,
        score=score,
        plug=plug,
    )


def _find_original(example: LabelledText) -> LabelledText | None:
    """Give what was translated, where the file of translations has it."""
    return None if example.original is None else LabelledText(example.original, example.label)
