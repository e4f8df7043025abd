"""Masked language modeling that also learns from a monolingual teacher (knowledge distillation).

Hinton et al., 2015; XLM+KD in Chi et al., 2021, "Cross-Lingual Language Model Meta-Pretraining".
If the vocabularies differ, the teacher reads the same text in its own pieces. It then teaches those
masked tokens that are the same single piece in both vocabularies, by its distribution over the
pieces that both vocabularies share.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
import torch
from pydantic import Field
from torch import nn
from torch.nn import functional as F

from calque.errors import InputError
from calque.models.encoder import Encoder
from calque.models.heads import INITIAL_DEVIATION, NO_LABEL
from calque.models.loading import MissingHeadWarning
from calque.objectives.base import Objective, ObjectiveSettings, TensorBatch
from calque.objectives.masked_lm import (
    mask_batch,
    masked_lm_loss,
    masking_rules,
    vocabulary_logits,
)
from calque.objectives.regression import l2_loss
from calque.tokens.ragged import Ragged, add_special_tokens, pack, ranges, reorder
from calque.tokens.tokenizer import SpecialTokens
from calque.tokens.vocabularies import Retokenization, Retokenizer, match_vocabularies
from calque.types import LossTerms, MaskedBatch, TokenBatch

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Float, Int
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

    from calque.objectives.base import Collate
    from calque.tokens.masking import MaskingRules
    from calque.tokens.ragged import BatchShape

    IntArray = npt.NDArray[np.int64]
    BoolArray = npt.NDArray[np.bool_]

# The logit of entries that only pad a vocabulary: the logarithm of their probability is finite.
PADDING_LOGIT = -1e4
# Number of batches that are checked before a run, and the least fraction of taught tokens.
N_CHECKED_BATCHES, MIN_TAUGHT = 8, 0.1
# With fixed shapes, how many different sizes the taught part of a batch can have.
N_SIZES = 4


class DistillationSettings(ObjectiveSettings):
    """Settings of MLM with a teacher in a recipe."""

    kind: Literal["distillation"] = "distillation"
    probability: float = Field(0.15, gt=0, lt=1)
    # Folder, hub name or calque-mini, and its languages: sentences of others are used for MLM only.
    teacher: str
    languages: list[str] = Field(min_length=1)
    # "tokens": the distribution of masked tokens; "states": the last states of all tokens, which
    # needs neither a language-modeling head nor shared pieces.
    target: Literal["tokens", "states"] = "tokens"
    temperature: float = Field(2.0, gt=0)
    teacher_weight: float = Field(1.0, ge=0)


def distillation_loss(
    student: Float[Tensor, "rows classes"],
    teacher: Float[Tensor, "rows classes"],
    weights: Float[Tensor, "rows"],
    temperature: float,
) -> Float[Tensor, ""]:
    """Return the weighted mean of T² KL(p ‖ q), p and q the softmax of the logits divided by T.

    T² keeps the size of the gradient independent of the temperature (Hinton et al., section 2). The
    loss is 0 if all weights are 0.

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


class Teacher:
    """A frozen encoder in evaluation mode.

    This is not a module, so that an objective that stores it neither trains nor saves nor shards
    its weights. A resumed run loads it again.
    """

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder.eval().requires_grad_(False)

    @classmethod
    def load(cls, name: str, *, needs_head: bool) -> Self:
        """Load a folder, a hub name or `calque-mini`; check that it has a head if needed."""
        with warnings.catch_warnings():
            warnings.simplefilter("error" if needs_head else "ignore", MissingHeadWarning)
            try:
                return cls(Encoder.load(name))
            except MissingHeadWarning as warning:
                raise InputError(
                    "this teacher has no language-modeling head, so it cannot predict tokens",
                    file=name,
                    fix="set target: states, or use a masked language model",
                ) from warning

    @torch.no_grad()
    def encode(
        self, batch: TokenBatch, tokens: Int[Tensor, "taught"], *, head: bool
    ) -> Float[Tensor, "taught hidden"]:
        """Return the last states of some tokens; with `head`, their language-modeling features."""
        if not len(batch.ids):  # no text in its languages: the tokens only fill a shape
            return torch.zeros(len(tokens), self.encoder.hidden_size, device=tokens.device)
        (states,) = self.encoder(batch)
        return self.encoder.lm_features(states[tokens]) if head else states[tokens]


@dataclass(frozen=True, slots=True)
class DistillationBatch(TensorBatch):
    """Sentences with masked tokens, and the sentences that the teacher reads.

    Token `student_tokens[k]` of the student is taught by token `teacher_tokens[k]` of
    `teacher_text`; a weight of 0 marks rows that only fill the shape. `share` is the fraction of
    tokens that are taught, `unread` that of the teacher's sentences that are too long for it.
    """

    masked: MaskedBatch
    teacher_text: TokenBatch
    student_tokens: Int[Tensor, "taught"]
    teacher_tokens: Int[Tensor, "taught"]
    weights: Float[Tensor, "taught"]
    share: Float[Tensor, ""]
    unread: Float[Tensor, ""]
    # The output of the teacher, added by `prepare`.
    teacher_features: Float[Tensor, "taught hidden"] | None = None

    @property
    def tokens(self) -> TokenBatch:
        """The sentences that the student reads."""
        return self.masked.tokens


class Distillation(Objective):
    """Predict masked tokens and, in the teacher's languages, also what the teacher predicts.

    The loss is a mean over all masked tokens; those that are taught have an additional term, so
    that a batch with little text for the teacher learns little from it. Paper: neither the weight
    nor the temperature is given.
    """

    n_sides: ClassVar[int] = 1
    n_special_tokens: ClassVar[int] = 2  # <s> and </s>
    needs_languages: ClassVar[bool] = True

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self.reader = TeacherReader(settings.target)
        # Only used if the states of teacher and student have different sizes.
        self.projection: nn.Linear | None = None
        self._teacher: Teacher | None = None
        # Vocabulary rows of the student (None: all), and output layer of the teacher, that match.
        self._student_rows: Tensor | None = None
        self._teacher_output: tuple[Tensor, Tensor | None] | None = None

    @property
    def teacher(self) -> Teacher:
        """The teacher, loaded at first use."""
        if self._teacher is None:
            settings = self.settings
            self._teacher = Teacher.load(settings.teacher, needs_head=settings.target == "tokens")
        return self._teacher

    def build_collator(self, special_tokens: SpecialTokens, shape: BatchShape | None) -> Collate:
        """Return a collator of single sentences, and of those that the teacher reads."""
        rules = masking_rules(special_tokens, self.settings.probability)
        return DistillationCollator(special_tokens, rules, shape, self.reader)

    def add_weights(self, hidden_size: int, generator: torch.Generator) -> None:
        """Create the projection of the student's states if the teacher's have another size."""
        width = self.teacher.encoder.hidden_size
        if self.settings.target == "tokens" or width == hidden_size:
            return
        # Created on the meta device: otherwise torch would draw from the global generator.
        self.projection = nn.Linear(hidden_size, width, device="meta").to_empty(device="cpu")
        with torch.no_grad():
            self.projection.weight.normal_(0.0, INITIAL_DEVIATION, generator=generator)
            self.projection.bias.zero_()

    def start(self, encoder: Encoder, languages: Sequence[str]) -> None:
        """Move the teacher to the encoder's device, and match the vocabularies."""
        settings, device = self.settings, next(encoder.parameters()).device
        if missing := sorted(set(settings.languages) - set(languages)):
            raise InputError(
                f"distillation: there is no text in the teacher's language {missing[0]}",
                fix=f"the text is in {', '.join(languages)}: correct `languages`, or add text",
            )
        teacher = self.teacher.encoder.to(device)
        numbers = [languages.index(language) for language in settings.languages]
        self.reader.set_models(encoder.tokenizer, teacher, numbers)
        if settings.target == "tokens":
            self._match_output_layers(encoder, teacher)

    def _match_output_layers(self, encoder: Encoder, teacher: Encoder) -> None:
        """Select the rows of the output layers whose pieces are in both vocabularies."""
        n_pieces, (weight, bias) = len(encoder.tokenizer), teacher.output_layer()
        shared = self.reader.shared
        if shared is not None and not len(shared[0]):
            raise InputError(
                "the vocabularies of the teacher and of this model have no piece in common",
                file=self.settings.teacher,
                fix="set target: states",
            )
        if shared is not None:
            self._student_rows, rows = (torch.from_numpy(ids).to(weight.device) for ids in shared)
            self._teacher_output = weight[rows], None if bias is None else bias[rows]
        else:  # there may be more rows than pieces
            is_exact = len(encoder.output_layer()[0]) == n_pieces
            self._student_rows = None if is_exact else torch.arange(n_pieces, device=weight.device)
            self._teacher_output = weight[:n_pieces], None if bias is None else bias[:n_pieces]

    def find_problem(
        self,
        encoder: Encoder,
        special_tokens: SpecialTokens,
        examples: Iterator[tuple[Ragged, ...]],
    ) -> str | None:
        """Return a warning if little can be taught or sentences are too long for the teacher."""
        n_taught = n_known = n_sentences = 0
        n_unread, problems = 0.0, []
        for text, languages in islice(examples, N_CHECKED_BATCHES):
            is_masked = np.ones(len(text.ids), dtype=np.bool_)
            taught = self.reader.read(text, languages.ids, text.ids, is_masked)
            is_known = np.isin(languages.ids, self.reader.languages)
            n_known += int(text.lengths[is_known].sum())
            n_sentences += int(is_known.sum())
            n_taught += len(taught.student_tokens)
            n_unread += taught.unread * int(is_known.sum())
        if n_unread > 0:
            longest = self.teacher.encoder.max_tokens
            share = n_unread / n_sentences
            problems.append(
                f"{share:.0%} of the teacher's sentences are longer than its {longest} tokens"
            )
        if self.settings.target == "tokens" and n_taught < MIN_TAUGHT * n_known:
            problems.append(
                f"only {n_taught / n_known:.0%} of {n_known} tokens are pieces of the teacher too "
                "(set target: states, or use a teacher with a more similar tokenizer)"
            )
        return "; ".join(problems) or None

    def prepare(self, encoder: Encoder, batch: DistillationBatch) -> DistillationBatch:
        """Add the output of the teacher."""
        head = self.settings.target == "tokens"
        features = self.teacher.encode(batch.teacher_text, batch.teacher_tokens, head=head)
        return replace(batch, teacher_features=features)

    def forward(self, encoder: Encoder, batch: DistillationBatch) -> LossTerms:
        """Return the MLM loss and the distance to the teacher's output."""
        (states,) = encoder(batch.tokens)
        features = encoder.lm_features(states[batch.masked.masked])
        mlm = masked_lm_loss(features, *encoder.output_layer(), batch.masked.labels)
        teacher = self._teacher_loss(encoder, states[batch.student_tokens], batch)
        loss = mlm + self.settings.teacher_weight * batch.share * teacher
        metrics = {"mlm": mlm, "teacher": teacher, "share": batch.share, "unread": batch.unread}
        return LossTerms(loss, metrics)

    def _teacher_loss(
        self, encoder: Encoder, states: Float[Tensor, "taught hidden"], batch: DistillationBatch
    ) -> Float[Tensor, ""]:
        """Return the distance of the student's states or predictions to the teacher's."""
        assert batch.teacher_features is not None, "prepare comes first"
        if self.settings.target == "states":
            projected = states if self.projection is None else self.projection(states)
            wide = torch.promote_types(projected.dtype, torch.float32)
            targets = batch.teacher_features.to(wide)
            return l2_loss(projected.to(wide), targets, batch.weights) / targets.shape[1]
        assert self._teacher_output is not None, "start comes first"
        weight, bias = encoder.output_layer()
        rows = self._student_rows
        if rows is not None:
            weight, bias = weight[rows], None if bias is None else bias[rows]
        student = vocabulary_logits(encoder.lm_features(states), weight, bias, PADDING_LOGIT)
        features = batch.teacher_features.detach()
        teacher = vocabulary_logits(features, *self._teacher_output, PADDING_LOGIT)
        return distillation_loss(student, teacher, batch.weights, self.settings.temperature)


@dataclass(frozen=True, slots=True)
class TeacherInput:
    """What the teacher reads, without special tokens, and which of its tokens teach which.

    `student_tokens` and `teacher_tokens` are indices of corresponding tokens in the text of the
    batch and in `text`. `share` and `unread` are as in the batch.
    """

    text: Ragged
    student_tokens: IntArray
    teacher_tokens: IntArray
    share: float
    unread: float


class TeacherReader:
    """Chooses what the teacher reads of a batch; `set_models` must be called first.

    With the student's vocabulary the teacher sees what the student sees. With another vocabulary it
    reads the retokenized text in segments that both tokenizers delimit: if the student's part of a
    segment is masked, so is the teacher's.
    """

    special_tokens: SpecialTokens

    def __init__(self, target: Literal["tokens", "states"]) -> None:
        self.target = target
        # The ids of shared pieces in the student's and the teacher's vocabulary; None: all.
        self.shared: tuple[IntArray, IntArray] | None = None
        self._retokenizer: Retokenizer | None = None
        # The teacher's id of each piece of the student, −1 if it has none.
        self._teacher_ids = self.languages = np.zeros(0, dtype=np.int64)
        self._max_tokens = 0

    def set_models(
        self, student: PreTrainedTokenizerFast, teacher: Encoder, languages: Sequence[int]
    ) -> None:
        """Store the numbers of the teacher's languages, and match its vocabulary."""
        self.languages = np.array(languages, dtype=np.int64)
        self.special_tokens = SpecialTokens.of(teacher.tokenizer)
        self._max_tokens = teacher.max_tokens
        self._teacher_ids = np.arange(len(student))
        if student.get_vocab() == teacher.tokenizer.get_vocab():
            return
        self.shared = match_vocabularies(student, teacher.tokenizer)
        self._teacher_ids = np.full(len(student), -1)
        self._teacher_ids[self.shared[0]] = self.shared[1]
        self._teacher_ids[student.mask_token_id] = self.special_tokens.mask_id
        self._retokenizer = Retokenizer(student, teacher.tokenizer)

    def read(
        self, text: Ragged, languages: IntArray, seen: IntArray, is_masked: BoolArray
    ) -> TeacherInput:
        """Return what the teacher reads of the sentences in its languages.

        `seen` are the ids that the student sees instead of those of the text.
        """
        known = np.flatnonzero(np.isin(languages, self.languages))
        retokenized, n_known = self._retokenize(reorder(text, known)), len(known)
        fits = retokenized.pieces.lengths + 2 <= self._max_tokens
        if not fits.all():
            known = known[fits]
            retokenized = self._retokenize(reorder(text, known))
        starts = np.cumsum(text.lengths) - text.lengths
        numbers = ranges(starts[known], text.lengths[known])
        unread = 1 - len(known) / max(1, n_known)
        if self.target == "states":
            return _pair_segments(retokenized, numbers, len(text.ids), unread)
        return self._pair_masked_tokens(retokenized, numbers, text.ids, seen, is_masked, unread)

    def _retokenize(self, text: Ragged) -> Retokenization:
        if self._retokenizer is None:
            return Retokenization.identity(text)
        return self._retokenizer.retokenize(text)

    def _pair_masked_tokens(
        self,
        retokenized: Retokenization,
        numbers: IntArray,
        ids: IntArray,
        seen: IntArray,
        is_masked: BoolArray,
        unread: float,
    ) -> TeacherInput:
        """Teach masked tokens that are the same single piece in both vocabularies."""
        is_single = retokenized.one_to_one()
        first = find_first_pieces(retokenized.tgt, retokenized.n_segments)
        teacher_ids = np.append(retokenized.pieces.ids, -1)[first[retokenized.src]]
        is_same = is_single[retokenized.src] & (self._teacher_ids[ids[numbers]] == teacher_ids)
        taught = np.flatnonzero(is_masked[numbers] & is_same)
        is_changed = seen[numbers] != ids[numbers]
        text = self._mask(retokenized, is_single, is_changed, seen[numbers])
        share = len(taught) / max(1, int(is_masked.sum()))
        teacher_tokens = first[retokenized.src[taught]]
        return TeacherInput(text, numbers[taught], teacher_tokens, share, unread)

    def _mask(
        self,
        retokenized: Retokenization,
        is_single: BoolArray,
        is_changed: BoolArray,
        seen: IntArray,
    ) -> Ragged:
        """Return what the teacher sees: the student's replacements, or masks if it lacks the piece.

        A masked token that was left unchanged is unchanged for both.
        """
        segments, teacher_ids = retokenized.src[is_changed], self._teacher_ids[seen[is_changed]]
        has_piece = is_single[segments] & (teacher_ids >= 0)
        replacements = np.full(retokenized.n_segments, -1)
        replacements[segments] = np.where(has_piece, teacher_ids, self.special_tokens.mask_id)
        new_ids, pieces = replacements[retokenized.tgt], retokenized.pieces
        return Ragged(np.where(new_ids >= 0, new_ids, pieces.ids), pieces.lengths)


def _pair_segments(
    retokenized: Retokenization, numbers: IntArray, n_tokens: int, unread: float
) -> TeacherInput:
    """Teach every segment by its first token on both sides; nothing is masked for the teacher."""
    both = np.intersect1d(retokenized.src, retokenized.tgt)
    src, tgt = (
        find_first_pieces(side, retokenized.n_segments)[both]
        for side in (retokenized.src, retokenized.tgt)
    )
    share = int(np.isin(retokenized.src, both).sum()) / max(1, n_tokens)
    return TeacherInput(retokenized.pieces, numbers[src], tgt, share, unread)


def find_first_pieces(segments: IntArray, n_segments: int) -> IntArray:
    """Return the first piece of every segment; 0 for a segment without pieces.

    >>> find_first_pieces(np.array([0, 0, 2]), 3).tolist()
    [0, 0, 2]
    """
    first = np.zeros(n_segments, dtype=np.int64)
    first[segments[::-1]] = np.arange(len(segments))[::-1]
    return first


@dataclass(frozen=True, slots=True)
class DistillationCollator:
    """Builds batches as for masked language modeling, and the teacher's part."""

    special_tokens: SpecialTokens
    rules: MaskingRules
    shape: BatchShape | None
    reader: TeacherReader

    def __call__(self, sides: tuple[Ragged, ...], generator: torch.Generator) -> DistillationBatch:
        """Return one batch of sentences and the numbers of their languages."""
        text, languages = sides
        tokens, slots = self._pack(text)
        masked = mask_batch(tokens, self.rules, generator, self.shape)
        is_masked = np.zeros(len(tokens.ids), dtype=np.bool_)
        is_masked[masked.masked[masked.labels != NO_LABEL].numpy()] = True
        seen = masked.tokens.ids.numpy()[slots]
        taught = self.reader.read(text, languages.ids, seen, is_masked[slots])
        teacher_text, teacher_slots = self._pack_for_teacher(taught.text)
        n_rows = len(taught.student_tokens)
        n_fill = 0 if self.shape is None else self._round_size(n_rows, masked) - n_rows
        return DistillationBatch(
            masked,
            teacher_text,
            F.pad(torch.from_numpy(slots[taught.student_tokens]), (0, n_fill)),
            F.pad(torch.from_numpy(teacher_slots[taught.teacher_tokens]), (0, n_fill)),
            F.pad(torch.ones(n_rows), (0, n_fill)),
            torch.tensor(taught.share),
            torch.tensor(taught.unread),
        )

    def _pack(self, text: Ragged) -> tuple[TokenBatch, IntArray]:
        """Pack the sentences; return the index in the batch of every token of the text too."""
        special = self.special_tokens
        numbers = Ragged(np.arange(len(text.ids)), text.lengths)
        packed = pack(add_special_tokens(numbers, -1, -2), shape=self.shape, pad_id=-3)
        origins = packed.ids.numpy()
        special_ids = np.array([special.pad_id, special.sep_id, special.cls_id])  # −3, −2 and −1
        is_text = origins >= 0
        ids = np.where(
            is_text, text.ids[np.maximum(origins, 0)], special_ids[np.minimum(origins, -1)]
        )
        slots = np.empty(len(text.ids), dtype=np.int64)
        slots[origins[is_text]] = np.flatnonzero(is_text)
        return replace(packed, ids=torch.from_numpy(ids)), slots

    def _pack_for_teacher(self, text: Ragged) -> tuple[TokenBatch, IntArray]:
        """Pack what the teacher reads; return the index of every token too.

        The shape may vary, because the teacher runs outside the compiled step.
        """
        special = self.reader.special_tokens
        tokens = pack(
            add_special_tokens(text, special.cls_id, special.sep_id), pad_id=special.pad_id
        )
        lengths = text.lengths + 2
        return tokens, ranges(np.cumsum(lengths) - lengths + 1, text.lengths)

    def _round_size(self, n_rows: int, masked: MaskedBatch) -> int:
        """Return the next of the few sizes that the taught part can have in a compiled step."""
        most = len(masked.masked) if self.reader.target == "tokens" else len(masked.tokens.ids)
        step = -(-most // N_SIZES)
        return step * max(1, -(-n_rows // step))
