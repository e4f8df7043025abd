"""Extractive question answering: a span of the text, from the window that is surest of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from calque.models.heads import mean_cross_entropy
from calque.models.layer_mixture import make_linear
from calque.models.padding import spread_rows
from calque.models.spans import find_best_spans
from calque.tasks.finetuning import predict
from calque.tasks.head_task import HeadModel, place_on
from calque.tasks.question_windows import NOT_HERE

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from calque.models.encoder import Encoder
    from calque.tasks.question_windows import QuestionExamples, WindowBatch
    from calque.tasks.task_settings import TaskSettings
    from calque.text.questions import Question

# Far below any score, and finite, so that what is no text has no gradient and makes no NaN.
IMPOSSIBLE = -1e6


@dataclass(frozen=True, slots=True)
class FoundAnswer:
    """An answer, the characters of the original text it consists of, and its log-probability."""

    text: str
    start: int
    end: int
    score: float


class SpanFinder(HeadModel):
    """Scores every token of a window as the first and as the last of the answer.

    The window's own first token stands for "not here", so that probabilities of windows compare.
    """

    def __init__(
        self, encoder: Encoder, settings: TaskSettings, generator: torch.Generator
    ) -> None:
        super().__init__(encoder, settings, generator)
        self.output = make_linear(encoder.hidden_size, 2, generator)
        place_on(self, encoder)

    def score(
        self, batch: WindowBatch
    ) -> tuple[Float[Tensor, "windows longest"], Float[Tensor, "windows longest"]]:
        """Give the scores of starts and of ends; what may not answer has none to speak of."""
        flat = self.output(self.read(batch.tokens)).float()
        scores = spread_rows(flat, batch.cells, batch.is_text.shape)
        may_answer = batch.is_text.clone()
        may_answer[:, NOT_HERE] = True
        masked = scores.masked_fill(~may_answer[:, :, None], IMPOSSIBLE)
        return masked[..., 0], masked[..., 1]

    def forward(self, batch: WindowBatch) -> Float[Tensor, ""]:
        """Give the mean of the losses of starts and of ends."""
        starts, ends = self.score(batch)
        total = mean_cross_entropy(starts, batch.starts) + mean_cross_entropy(ends, batch.ends)
        return total / 2

    def answer(
        self,
        examples: QuestionExamples,
        questions: Sequence[Question],
        settings: TaskSettings,
    ) -> list[FoundAnswer]:
        """Answer every question; a text without tokens has the empty answer."""

        def find(batch: WindowBatch) -> tuple[Tensor, Tensor, Tensor]:
            starts, ends = (scores.log_softmax(dim=1) for scores in self.score(batch))
            return find_best_spans(starts, ends, batch.is_text, settings.max_answer)

        found = [FoundAnswer("", 0, 0, float("-inf"))] * len(questions)
        for rows, _, parts in list(predict(self, examples, settings, find)):
            firsts, lasts, scores = (part.tolist() for part in parts)
            for window, first, last, score in zip(
                rows.tolist(), firsts, lasts, scores, strict=True
            ):
                owner = int(examples.owners[window])
                if score > found[owner].score:
                    start, end = examples.characters(window, first, last)
                    found[owner] = _trim(questions[owner].context, start, end, score)
        return found


def _trim(context: str, start: int, end: int, score: float) -> FoundAnswer:
    """Leave out blanks at both ends, which tokens may begin with."""
    text = context[start:end]
    start += len(text) - len(text.lstrip())
    text = text.strip()
    return FoundAnswer(text, start, start + len(text), score)
