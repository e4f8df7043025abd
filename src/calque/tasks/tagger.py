"""A tagger of words on top of an encoder: each word for itself, or whole sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from calque.models.crf import LinearChain, allow_spans
from calque.models.heads import NO_LABEL, mean_cross_entropy
from calque.models.layer_mixture import make_linear
from calque.tasks.finetuning import predict
from calque.tasks.head_task import HeadModel, place_on

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Float, Int
    from torch import Tensor

    from calque.models.encoder import Encoder
    from calque.tasks.tag_examples import TagBatch, TagExamples
    from calque.tasks.tag_pairs import TagPairs
    from calque.tasks.task_settings import TaskSettings

    IntArray = npt.NDArray[np.int64]


class Tagger(HeadModel):
    """Scores tags linearly from a word's first subword; with a CRF, whole sequences of them.

    With `spans`, a CRF only gives sequences in which every I- continues a span of its kind.
    """

    can_plug = True

    def __init__(
        self,
        encoder: Encoder,
        names: Sequence[str],
        settings: TaskSettings,
        generator: torch.Generator,
        *,
        spans: bool = False,
    ) -> None:
        super().__init__(encoder, settings, generator)
        self.head = make_linear(self.width, len(names), generator)
        self.chain = LinearChain(len(names)) if settings.head == "crf" else None
        self.allowed = allow_spans(names) if spans else None
        place_on(self, encoder)

    def forward(self, batch: TagBatch) -> Float[Tensor, ""]:
        """Give the mean loss of a word."""
        scores = self.head(self.read(batch.tokens))
        if self.chain is None:
            return mean_cross_entropy(scores, batch.labels)
        # In single precision: the forward algorithm adds up over a whole sentence.
        tags = batch.labels[batch.grid].clamp(min=0)
        losses = self.chain(scores[batch.grid].float(), tags, batch.inside)
        total: Tensor = losses.sum() / batch.inside.sum().clamp(min=1)
        return total

    def answer(self, batch: TagBatch) -> Int[Tensor, "windows words"]:
        """Give the best tags, in the places of the batch's grid."""
        scores: Tensor = self.head(self.read(batch.tokens))[batch.grid].float()
        if self.chain is None:
            return scores.argmax(-1)
        allowed = None
        if self.allowed is not None:
            allowed = self.allowed[0].to(scores.device), self.allowed[1].to(scores.device)
        return self.chain.decode(scores, batch.inside, allowed)

    def tag(self, examples: TagExamples | TagPairs, settings: TaskSettings) -> IntArray:
        """Give every word of the text its tag; `NO_LABEL` for one that was not asked about."""
        found = np.full(len(examples.tags), NO_LABEL, dtype=np.int64)
        for rows, batch, best in list(predict(self, examples, settings, self.answer)):
            words, _ = examples.find_words(rows)
            found[examples.words[words]] = best[batch.inside].cpu().numpy()
        return found
