"""A model that others learn from: read without gradients, never trained, never saved with them.

Batches of masked text, beside what a teacher reads of the sentences in its own languages.

Masked language modelling that also learns from a monolingual teacher (knowledge distillation).

Hinton et al., 2015; XLM+KD in Chi et al., 2021, "Cross-Lingual Language Model Meta-Pretraining".
Where the vocabularies differ, the teacher reads the same text in its own pieces, and teaches the
hidden tokens that are one piece of the same spelling in both, by its distribution over such pieces.
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
from calque.models.loading import HeadlessCheckpoint
from calque.objectives.base import BatchOfArrays, Marks, Objective, ObjectiveSettings
from calque.objectives.masked_lm import IGNORED, mask_batch, masked_lm_loss, masking_rules
from calque.objectives.regression import l2_loss
from calque.tokens.ragged import Ragged, add_marks, pack, ranges, reorder
from calque.tokens.vocabularies import Rereader, Rereading, match_pieces
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


class Teacher:
    """A frozen encoder in evaluation mode.

    This is no module: an objective that holds it neither trains nor saves nor spreads its weights.
    A run that goes on loads it again.
    """

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder.eval().requires_grad_(False)

    @classmethod
    def load(cls, name: str, *, needs_head: bool) -> Self:
        """Load a folder or a hub name; without a language-modelling head, if none is needed."""
        with warnings.catch_warnings():
            warnings.simplefilter("error" if needs_head else "ignore", HeadlessCheckpoint)
            try:
                return cls(Encoder.load(name))
            except HeadlessCheckpoint as warning:
                raise InputError(
                    "this teacher has no language-modelling head: it cannot guess tokens",
                    file=name,
                    fix="set target: states, or take a masked language model",
                ) from warning

    @torch.no_grad()
    def read(
        self, batch: TokenBatch, places: Int[Tensor, "places"], *, predict: bool
    ) -> Float[Tensor, "places hidden"]:
        """Give the last states of some tokens; to predict, as its head changes them first."""
        if not len(batch.ids):  # nothing in its language: the places only fill a shape
            return torch.zeros(len(places), self.encoder.hidden_size, device=places.device)
        (states,) = self.encoder(batch)
        return self.encoder.predict_features(states[places]) if predict else states[places]


# With fixed shapes, how many sizes what is taught may have: its share of a batch varies.
N_SIZES = 4


@dataclass(frozen=True, slots=True)
class DistillationBatch(BatchOfArrays):
    """Sentences with hidden tokens, and what the teacher reads of those that it knows.

    At token `places[k]` the student is taught what the teacher says at token `heard[k]` of its
    `reading`; a weight of 0 marks what only fills the shape. `share` is how much of the batch is
    taught, and `unread` how many of the teacher's sentences are too long for it.
    """

    hidden: MaskedBatch
    reading: TokenBatch
    places: Int[Tensor, "taught"]
    heard: Int[Tensor, "taught"]
    weights: Float[Tensor, "taught"]
    share: Float[Tensor, ""]
    unread: Float[Tensor, ""]
    # What the teacher says, once it was asked.
    features: Float[Tensor, "taught hidden"] | None = None

    @property
    def tokens(self) -> TokenBatch:
        """Give what the student reads."""
        return self.hidden.tokens


@dataclass(frozen=True, slots=True)
class Lesson:
    """What the teacher reads, without marks, and which of its tokens teaches which of the batch's.

    `share` and `unread` are as in the batch.
    """

    text: Ragged
    src: IntArray
    tgt: IntArray
    share: float
    unread: float


class TeacherReader:
    """Chooses what a teacher reads of a batch; `meet` completes it before there is any.

    With the student's vocabulary the teacher sees what the student sees. With another one it reads
    the text anew, in segments that both tokenizers cut out: where the student's part of one is
    hidden, so is the teacher's.
    """

    marks: Marks

    def __init__(self, target: Literal["tokens", "states"]) -> None:
        self.target = target
        # The pieces of both vocabularies, as ids of the student's and the teacher's; None: all.
        self.shared: tuple[IntArray, IntArray] | None = None
        self._rereader: Rereader | None = None
        self._partners = self.languages = np.zeros(0, dtype=np.int64)
        self._longest = 0

    def meet(
        self, student: PreTrainedTokenizerFast, teacher: Encoder, languages: Sequence[int]
    ) -> None:
        """Learn the numbers of the teacher's languages, and match its vocabulary."""
        self.languages = np.array(languages, dtype=np.int64)
        self.marks, self._longest = Marks.of(teacher.tokenizer), teacher.max_tokens
        self._partners = np.arange(len(student))
        if student.get_vocab() == teacher.tokenizer.get_vocab():
            return
        self.shared = match_pieces(student, teacher.tokenizer)
        self._partners = np.full(len(student), -1)
        self._partners[self.shared[0]] = self.shared[1]
        self._partners[student.mask_token_id] = self.marks.mask
        self._rereader = Rereader(student, teacher.tokenizer)

    def read(
        self, text: Ragged, languages: IntArray, seen: IntArray, is_hidden: BoolArray
    ) -> Lesson:
        """Read the sentences in the teacher's languages.

        `seen` is what the student sees of the text's tokens, of which some are hidden.
        """
        known = np.flatnonzero(np.isin(languages, self.languages))
        again, n_known = self._reread(reorder(text, known)), len(known)
        fits = again.pieces.lengths + 2 <= self._longest
        if not fits.all():
            known = known[fits]
            again = self._reread(reorder(text, known))
        starts = np.cumsum(text.lengths) - text.lengths
        numbers = ranges(starts[known], text.lengths[known])
        unread = 1 - len(known) / max(1, n_known)
        if self.target == "states":
            return _pair_states(again, numbers, len(text.ids), unread)
        return self._pair_tokens(again, numbers, text.ids, seen, is_hidden, unread)

    def _reread(self, text: Ragged) -> Rereading:
        if self._rereader is None:
            return Rereading.of_itself(text)
        return self._rereader.reread(text)

    def _pair_tokens(
        self,
        again: Rereading,
        numbers: IntArray,
        ids: IntArray,
        seen: IntArray,
        is_hidden: BoolArray,
        unread: float,
    ) -> Lesson:
        """Teach hidden tokens that are one piece in both vocabularies, and the same."""
        is_lone, first = again.lone(), find_first(again.tgt, again.n_segments)
        theirs = np.append(again.pieces.ids, -1)[first[again.src]]
        is_same = is_lone[again.src] & (self._partners[ids[numbers]] == theirs)
        taught = np.flatnonzero(is_hidden[numbers] & is_same)
        is_changed = seen[numbers] != ids[numbers]
        read = self._hide(again, is_lone, is_changed, seen[numbers])
        share = len(taught) / max(1, int(is_hidden.sum()))
        return Lesson(read, numbers[taught], first[again.src[taught]], share, unread)

    def _hide(
        self, again: Rereading, is_lone: BoolArray, is_changed: BoolArray, seen: IntArray
    ) -> Ragged:
        """Let the teacher see what the student sees, or a mask where it has no such piece.

        A token that was hidden but kept is not changed, and stays for both.
        """
        segments, partners = again.src[is_changed], self._partners[seen[is_changed]]
        stands_in = np.full(again.n_segments, -1)
        has_partner = is_lone[segments] & (partners >= 0)
        stands_in[segments] = np.where(has_partner, partners, self.marks.mask)
        put = stands_in[again.tgt]
        return Ragged(np.where(put >= 0, put, again.pieces.ids), again.pieces.lengths)


def _pair_states(again: Rereading, numbers: IntArray, n_tokens: int, unread: float) -> Lesson:
    """Teach every segment by its first token on either side; the teacher sees it all."""
    both = np.intersect1d(again.src, again.tgt)
    src, tgt = (find_first(side, again.n_segments)[both] for side in (again.src, again.tgt))
    share = int(np.isin(again.src, both).sum()) / max(1, n_tokens)
    return Lesson(again.pieces, numbers[src], tgt, share, unread)


def find_first(segments: IntArray, n_segments: int) -> IntArray:
    """Give the first piece of every segment; 0 for one that has none.

    >>> find_first(np.array([0, 0, 2]), 3).tolist()
    [0, 0, 2]
    """
    first = np.zeros(n_segments, dtype=np.int64)
    first[segments[::-1]] = np.arange(len(segments))[::-1]
    return first


@dataclass(frozen=True, slots=True)
class DistillationCollator:
    """Builds batches of masked text as masked language modelling does, and the teacher's part."""

    marks: Marks
    rules: MaskingRules
    shape: BatchShape | None
    reader: TeacherReader

    def __call__(self, sides: tuple[Ragged, ...], generator: torch.Generator) -> DistillationBatch:
        """Build one batch of sentences and the numbers of their languages."""
        text, languages = sides
        tokens, places = self._lay(text)
        hidden = mask_batch(tokens, self.rules, generator, self.shape)
        was_hidden = np.zeros(len(tokens.ids), dtype=np.bool_)
        was_hidden[hidden.masked[hidden.labels != IGNORED].numpy()] = True
        seen = hidden.tokens.ids.numpy()[places]
        lesson = self.reader.read(text, languages.ids, seen, was_hidden[places])
        reading, heard = self._mark(lesson)
        n_rows = len(lesson.src)
        n_fill = 0 if self.shape is None else self._round(n_rows, hidden) - n_rows
        return DistillationBatch(
            hidden,
            reading,
            F.pad(torch.from_numpy(places[lesson.src]), (0, n_fill)),
            F.pad(torch.from_numpy(heard[lesson.tgt]), (0, n_fill)),
            F.pad(torch.ones(n_rows), (0, n_fill)),
            torch.tensor(lesson.share),
            torch.tensor(lesson.unread),
        )

    def _lay(self, text: Ragged) -> tuple[TokenBatch, IntArray]:
        """Pack the sentences; also give the place in the batch of every token of the text."""
        marks = self.marks
        numbers = Ragged(np.arange(len(text.ids)), text.lengths)
        packed = pack(add_marks(numbers, -1, -2), shape=self.shape, pad_id=-3)
        laid = packed.ids.numpy()
        added = np.array([marks.pad, marks.last, marks.first])  # at −3, −2 and −1
        ids = np.where(laid >= 0, text.ids[np.maximum(laid, 0)], added[np.minimum(laid, -1)])
        places = np.empty(len(text.ids), dtype=np.int64)
        places[laid[laid >= 0]] = np.flatnonzero(laid >= 0)
        return replace(packed, ids=torch.from_numpy(ids)), places

    def _mark(self, lesson: Lesson) -> tuple[TokenBatch, IntArray]:
        """Pack what the teacher reads, its marks around; also give the place of every token."""
        marks, lengths = self.reader.marks, lesson.text.lengths
        # It is read outside the compiled step, so that its shape may vary.
        tokens = pack(add_marks(lesson.text, marks.first, marks.last), pad_id=marks.pad)
        marked = lengths + 2
        return tokens, ranges(np.cumsum(marked) - marked + 1, lengths)

    def _round(self, n_rows: int, hidden: MaskedBatch) -> int:
        """Give the next of the few sizes that what is taught may have in a compiled step."""
        most = len(hidden.masked) if self.reader.target == "tokens" else len(hidden.tokens.ids)
        step = -(-most // N_SIZES)
        return step * max(1, -(-n_rows // step))


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
