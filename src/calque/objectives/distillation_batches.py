"""Batches of masked text, beside what a teacher reads of the sentences in its own languages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch.nn import functional as F

from calque.objectives.apart import BatchOfArrays
from calque.objectives.base import Marks
from calque.objectives.masked_lm import IGNORED, mask_batch
from calque.text.batching import Ragged, add_marks, pack, ranges, reorder
from calque.text.rereading import Rereader, Rereading, match_pieces
from calque.types import MaskedBatch, TokenBatch

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Float, Int
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

    from calque.models.encoder import Encoder
    from calque.text.batching import BatchShape
    from calque.text.masking import MaskingRules

    IntArray = npt.NDArray[np.int64]
    BoolArray = npt.NDArray[np.bool_]

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
