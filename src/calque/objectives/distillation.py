"""Masked language modelling that also learns from a monolingual teacher (knowledge distillation).

Hinton et al., 2015; XLM+KD in Chi et al., 2021, "Cross-Lingual Language Model Meta-Pretraining".
Where the vocabularies differ, the teacher reads the same text in its own pieces, and teaches the
hidden tokens that are one piece of the same spelling in both, by its distribution over such pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import nn
from torch.nn import functional as F

from calque.objectives.base import Marks, Objective, ObjectiveSettings
from calque.objectives.distillation_batches import (
    DistillationBatch,
    DistillationCollator,
    TeacherReader,
)
from calque.objectives.masked_lm import masked_lm_loss, masking_rules
from calque.objectives.regression import l2_loss
from calque.objectives.teacher import Teacher
from calque.types import InputError, LossTerms

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from calque.models.encoder import Encoder
    from calque.objectives.base import Collate
    from calque.text.batching import BatchShape, Ragged

# As the encoders' own matrices begin.
INITIAL_SPREAD = 0.02
# The logit of entries that only widen a vocabulary: their probability is 0, its logarithm finite.
NEVER = -1e4
# Batches that are looked at before a run, and the share of tokens that is worth a teacher.
N_LOOKED_AT, LEAST_TAUGHT = 8, 0.1


class DistillationSettings(ObjectiveSettings):
    """MLM with a teacher as the recipe describes it."""

    kind: Literal["distillation"] = "distillation"
    probability: float = Field(0.15, gt=0, lt=1)
    # A folder or a hub name, and the languages it knows: sentences of others are MLM alone.
    teacher: str
    languages: list[str] = Field(min_length=1)
    # "tokens": what hidden tokens may be; "states": the last states of all tokens, which needs
    # neither a language-modelling head nor shared pieces.
    target: Literal["tokens", "states"] = "tokens"
    temperature: float = Field(2.0, gt=0)
    teacher_weight: float = Field(1.0, ge=0)


def distillation_loss(
    student: Float[Tensor, "rows classes"],
    teacher: Float[Tensor, "rows classes"],
    weights: Float[Tensor, "rows"],
    temperature: float,
) -> Float[Tensor, ""]:
    """Give the weighted mean of T² KL(p ‖ q), p and q the softmax of the logits over T.

    T² keeps the gradient's size, whatever the temperature. 0 if no row counts.

    >>> teacher, student = torch.tensor([[3.0, 1.0]]).log(), torch.zeros(1, 2)
    >>> loss = distillation_loss(student, teacher, torch.ones(1), temperature=1)
    >>> round(loss.item(), 4)  # ¾ ln(¾ / ½) + ¼ ln(¼ / ½)
    0.1308
    """
    wide = torch.promote_types(student.dtype, torch.float32)
    log_q, log_p = ((x.to(wide) / temperature).log_softmax(dim=-1) for x in (student, teacher))
    rows = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(dim=-1)
    total = weights.sum()
    return temperature**2 * (weights * rows).sum() / torch.where(total > 0, total, 1.0)


def project(
    features: Float[Tensor, "rows hidden"],
    weight: Float[Tensor, "classes hidden"],
    bias: Float[Tensor, "classes"] | None,
) -> Float[Tensor, "rows _"]:
    """Give logits; on a GPU of a number of classes that matrix units like, some never chosen."""
    n_missing = -len(weight) % 64
    if weight.is_cuda and n_missing:
        bias = weight.new_zeros(len(weight)) if bias is None else bias
        weight = F.pad(weight, (0, 0, 0, n_missing))
        bias = F.pad(bias, (0, n_missing), value=NEVER)
    return F.linear(features, weight, bias)


class Distillation(Objective):
    """Guess hidden tokens; in the teacher's languages, also guess what the teacher guesses.

    The loss is a mean over all hidden tokens, of which those that are taught have a term more: a
    batch with little for the teacher learns little from it. Paper: neither the weight nor the
    temperature is told.
    """

    n_sides: ClassVar[int] = 1
    needs_languages: ClassVar[bool] = True

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self.reader = TeacherReader(settings.target)
        # Only where the states of teacher and student are of different widths.
        self.projection: nn.Linear | None = None
        self._teacher: Teacher | None = None
        self._rows: Tensor | None = None
        self._answers: tuple[Tensor, Tensor | None] | None = None

    @property
    def teacher(self) -> Teacher:
        """The model to learn from, loaded when it is first asked for."""
        if self._teacher is None:
            settings = self.settings
            self._teacher = Teacher.load(settings.teacher, needs_head=settings.target == "tokens")
        return self._teacher

    def n_marks(self, marks: Marks) -> int:
        """Count `<s>` and `</s>`."""
        return 2

    def make_collate(self, marks: Marks, shape: BatchShape | None) -> Collate:
        """Batches of single sentences, and of those that the teacher reads."""
        rules = masking_rules(marks, self.settings.probability)
        return DistillationCollator(marks, rules, shape, self.reader)

    def add_weights(self, hidden_size: int, generator: torch.Generator) -> None:
        """Make the map from the student's states to wider or narrower ones of the teacher."""
        width = self.teacher.encoder.hidden_size
        if self.settings.target == "tokens" or width == hidden_size:
            return
        # On no device at first: torch would draw weights from the global generator.
        self.projection = nn.Linear(hidden_size, width, device="meta").to_empty(device="cpu")
        with torch.no_grad():
            self.projection.weight.normal_(0.0, INITIAL_SPREAD, generator=generator)
            self.projection.bias.zero_()

    def start(self, encoder: Encoder, languages: Sequence[str]) -> None:
        """Bring the teacher to the encoder's device, and find out which pieces they share."""
        settings, device = self.settings, next(encoder.parameters()).device
        if missing := sorted(set(settings.languages) - set(languages)):
            raise InputError(
                f"distillation: no text in the teacher's language {missing[0]}",
                fix=f"there is {', '.join(languages)}: correct `languages`, or add text",
            )
        teacher = self.teacher.encoder.to(device)
        numbers = [languages.index(language) for language in settings.languages]
        self.reader.meet(encoder.tokenizer, teacher, numbers)
        if settings.target == "tokens":
            self._choose_rows(encoder, teacher)

    def _choose_rows(self, encoder: Encoder, teacher: Encoder) -> None:
        """Take the rows of the teacher's output layer that the student has, too."""
        n_pieces, (weight, bias) = len(encoder.tokenizer), teacher.output_layer()
        pairs = self.reader.shared
        if pairs is not None and not len(pairs[0]):
            raise InputError(
                "the teacher's vocabulary has no piece of this model's",
                file=self.settings.teacher,
                fix="set target: states",
            )
        if pairs is not None:
            self._rows, theirs = (torch.from_numpy(ids).to(weight.device) for ids in pairs)
            self._answers = weight[theirs], None if bias is None else bias[theirs]
        else:  # there may be more rows than pieces
            is_exact = len(encoder.output_layer()[0]) == n_pieces
            self._rows = None if is_exact else torch.arange(n_pieces, device=weight.device)
            self._answers = weight[:n_pieces], None if bias is None else bias[:n_pieces]

    def find_fault(
        self, encoder: Encoder, marks: Marks, examples: Iterator[tuple[Ragged, ...]]
    ) -> str | None:
        """Warn where little can be taught, or where sentences are too long for the teacher."""
        n_taught = n_known = n_sentences = 0
        n_unread, faults = 0.0, []
        for text, languages in islice(examples, N_LOOKED_AT):
            everything = np.ones(len(text.ids), dtype=np.bool_)
            lesson = self.reader.read(text, languages.ids, text.ids, everything)
            is_known = np.isin(languages.ids, self.reader.languages)
            n_known += int(text.lengths[is_known].sum())
            n_sentences += int(is_known.sum())
            n_taught += len(lesson.src)
            n_unread += lesson.unread * int(is_known.sum())
        if n_unread > 0:
            longest = self.teacher.encoder.max_tokens
            share = n_unread / n_sentences
            faults.append(f"{share:.0%} of the teacher's sentences exceed its {longest} tokens")
        if self.settings.target == "tokens" and n_taught < LEAST_TAUGHT * n_known:
            faults.append(
                f"{n_taught / n_known:.0%} of {n_known} tokens are pieces of the teacher's, too: "
                "it teaches little (set target: states, or take a teacher whose tokenizer cuts "
                "alike)"
            )
        return "; ".join(faults) or None

    def prepare(self, encoder: Encoder, batch: DistillationBatch) -> DistillationBatch:
        """Ask the teacher."""
        predict = self.settings.target == "tokens"
        features = self.teacher.read(batch.reading, batch.heard, predict=predict)
        return replace(batch, features=features)

    def forward(self, encoder: Encoder, batch: DistillationBatch) -> LossTerms:
        """Encode once, predict the hidden tokens, and compare with what the teacher said."""
        (states,) = encoder(batch.tokens)
        hidden = batch.hidden
        features = encoder.predict_features(states[hidden.masked])
        mlm = masked_lm_loss(features, *encoder.output_layer(), hidden.labels)
        taught = self._compare(encoder, states[batch.places], batch)
        loss = mlm + self.settings.teacher_weight * batch.share * taught
        figures = {"mlm": mlm, "teacher": taught, "share": batch.share, "unread": batch.unread}
        return LossTerms(loss, figures)

    def _compare(
        self, encoder: Encoder, states: Float[Tensor, "taught hidden"], batch: DistillationBatch
    ) -> Float[Tensor, ""]:
        """Measure how far the student's answers are from the teacher's."""
        assert batch.features is not None, "prepare comes first"
        if self.settings.target == "states":
            mine = states if self.projection is None else self.projection(states)
            wide = torch.promote_types(mine.dtype, torch.float32)
            far = l2_loss(mine.to(wide), batch.features.to(wide), batch.weights)
            return far / batch.features.shape[1]
        assert self._answers is not None, "start comes first"
        weight, bias = encoder.output_layer()
        if self._rows is not None:
            weight, bias = weight[self._rows], None if bias is None else bias[self._rows]
        mine = project(encoder.predict_features(states), weight, bias)
        theirs = project(batch.features.detach(), *self._answers)
        return distillation_loss(mine, theirs, batch.weights, self.settings.temperature)
