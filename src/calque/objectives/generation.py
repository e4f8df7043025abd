"""Batches of what an encoder reads beside what a decoder writes.

Translation by an encoder–decoder: label-smoothed cross-entropy of the target, forced by itself.

Vaswani et al., 2017; Szegedy et al., 2016 (label smoothing).

Denoising by an encoder–decoder: write the text that was damaged, in its own language.

Lewis et al., 2020 (BART); Liu et al., 2020 (mBART).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field

from calque.errors import InputError
from calque.io.segmentation import HARD, SOFT
from calque.models.seq2seq import Seq2Seq
from calque.objectives.base import BatchOfArrays, Marks, Objective, ObjectiveSettings
from calque.objectives.masked_lm import IGNORED, predict_tokens
from calque.tokens.masking import infill_spans, permute_sentences
from calque.tokens.ragged import BatchShape, Ragged, add_marks, interleave, pack, ranges, reorder
from calque.types import LossTerms, TokenBatch

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Float, Int
    from torch import Tensor

    from calque.models.encoder import Encoder
    from calque.objectives.base import Collate

    IntArray = npt.NDArray[np.int64]

# Sizes of a fixed shape are odd sixteenths of the budget: halves, and whole, have room to vary.
STEPS = 16


@dataclass(frozen=True, slots=True)
class Seq2SeqBatch(BatchOfArrays):
    """Sequence k of `tgt` is written from sequence k of `src`; labels are its next tokens.

    A label of −100 marks what only fills the shape.
    """

    src: TokenBatch
    tgt: TokenBatch
    labels: Int[Tensor, "tgt_tokens"]

    @property
    def tokens(self) -> TokenBatch:
        """Give the source, with the tokens of both sides counted."""
        return replace(self.src, n_real=self.src.n_real + self.tgt.n_real)


class Beginnings:
    """The token that the decoder begins with, by the number of the language to write.

    A collator has it before the languages are known, which `meet` tells.
    """

    def __init__(self, marks: Marks) -> None:
        self.default = marks.first
        self.ids: IntArray = np.zeros(0, dtype=np.int64)

    def meet(self, encoder: Encoder, languages: Sequence[str]) -> None:
        """Learn the tokens of languages, in the order of their numbers."""
        model = check_decoder(encoder)
        different = sorted({*languages, *model.taught})
        if not model.targets and len(different) > 1:
            raise InputError(
                f"{', '.join(different)}: the decoder cannot tell which language to write",
                fix=f"set model.decoder.languages=[{', '.join(different)}]",
            )
        self.default = model.default_start
        self.ids = np.array([model.start_token(name) for name in languages], dtype=np.int64)

    def find(self, numbers: IntArray) -> IntArray:
        """Give the token for each example."""
        return self.ids[numbers] if len(self.ids) else np.full(len(numbers), self.default)


def check_decoder(encoder: Encoder) -> Seq2Seq:
    """Refuse an encoder that cannot write."""
    if not isinstance(encoder, Seq2Seq):
        raise InputError(
            "this objective writes text, and the model has no decoder",
            fix="add model.decoder to the recipe, if only {}",
        )
    return encoder


def lay_seq2seq(
    src: Ragged,
    tgt: Ragged,
    first: IntArray,
    marks: Marks,
    shape: BatchShape | None,
    least: tuple[int, int],
) -> Seq2SeqBatch:
    """Lay out sources, with marks, and targets, each after the token it begins with.

    A shape is filled up: to at least so many sixteenths of the budget on either side.
    """
    marked = add_marks(src, marks.first, marks.last)
    ones = np.ones(len(first), dtype=np.int64)
    begun, _ = interleave(Ragged(first, ones), tgt)
    labels = add_marks(tgt, None, marks.last)
    if shape is None:
        read, written = (pack(side, pad_id=marks.pad) for side in (marked, begun))
        return Seq2SeqBatch(read, written, torch.from_numpy(labels.ids))
    n_tail = -(-max(least) * shape.budget // (STEPS * shape.row)) + 1
    read = _fill_up(marked, shape, least[0], n_tail, marks.pad)
    written = _fill_up(begun, shape, least[1], n_tail, marks.pad)
    n_fill = len(written.ids) - len(labels.ids)
    return Seq2SeqBatch(
        read, written, torch.from_numpy(np.pad(labels.ids, (0, n_fill), constant_values=IGNORED))
    )


def _fill_up(ragged: Ragged, shape: BatchShape, least: int, n_tail: int, pad_id: int) -> TokenBatch:
    """Fill a batch up to a fixed size with padding, cut into sequences that both sides have."""
    step, size = 2 * shape.budget // STEPS, least * shape.budget // STEPS
    needed = len(ragged.ids) + n_tail
    size += max(0, -(-(needed - size) // step)) * step
    n_empty = max(0, shape.sequences - len(ragged.lengths))
    tail = np.full(n_tail, (size - len(ragged.ids)) // n_tail, dtype=np.int64)
    tail[: (size - len(ragged.ids)) % n_tail] += 1
    lengths = np.concatenate([ragged.lengths, np.zeros(n_empty, dtype=np.int64), tail])
    ids = np.pad(ragged.ids, (0, size - len(ragged.ids)), constant_values=pad_id)
    positions = ranges(np.zeros_like(lengths), lengths)
    positions[len(ragged.ids) :] = 0
    packed = pack(Ragged(ids, lengths), positions=positions, pad_id=pad_id)
    return replace(packed, longest=max(shape.row, int(tail.max())), n_real=len(ragged.ids))


# The share of a batch, in sixteenths, that either side of a pair may take before shapes change.
HALF = (9, 9)


class TranslationSettings(ObjectiveSettings):
    """Translation as the recipe describes it."""

    kind: Literal["translation"] = "translation"
    # Of bitext en-de: forward is from en to de. "both": each pair in either direction, by a coin.
    direction: Literal["forward", "backward", "both"] = "forward"
    smoothing: float = Field(0.1, ge=0, lt=1)


def smoothed_cross_entropy(
    features: Float[Tensor, "tokens hidden"],
    weight: Float[Tensor, "vocabulary hidden"],
    bias: Float[Tensor, "vocabulary"],
    labels: Int[Tensor, "tokens"],
    smoothing: float,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Mean of (1 − ε)·(−log p(y)) + ε·mean over v of (−log p(v)); and of −log p(y) alone.

    The mean logit is that of the mean row of the output layer, so that smoothing costs no second
    pass over the vocabulary. Labels of −100 do not count.
    """
    logits = predict_tokens(features, weight, bias)
    dtype = logits.dtype
    normalizer = logits.logsumexp(-1)
    is_real = labels != IGNORED
    hit = logits.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    mean = (features.to(dtype) * weight.to(dtype).mean(0)).sum(-1) + bias.to(dtype).mean()
    surprise, spread = normalizer - hit, normalizer - mean
    n_real = is_real.sum().clamp(min=1)
    smoothed = (1 - smoothing) * surprise + smoothing * spread
    zero = torch.zeros_like(surprise)
    loss, plain = (torch.where(is_real, x, zero).sum() / n_real for x in (smoothed, surprise))
    return loss, plain


class Writing(Objective):
    """What objectives share that read with the encoder and write with the decoder."""

    needs_languages: ClassVar[bool] = True

    def __init__(self, settings: ObjectiveSettings) -> None:
        super().__init__(settings)
        self.beginnings: Beginnings | None = None

    def begin(self, marks: Marks) -> Beginnings:
        """Give what collators look up first tokens in."""
        self.beginnings = self.beginnings or Beginnings(marks)
        return self.beginnings

    def find_written(self, languages: Sequence[str]) -> list[str]:
        """Name the language that is written, by the numbers that collators ask for."""
        return list(languages)

    def start(self, encoder: Encoder, languages: Sequence[str]) -> None:
        """Look up the tokens that the languages begin with."""
        assert self.beginnings is not None
        self.beginnings.meet(encoder, self.find_written(languages))

    def forward(self, encoder: Encoder, batch: Seq2SeqBatch) -> LossTerms:
        """Read, write what is to be written, and predict its every next token."""
        model = check_decoder(encoder)
        (memory,) = model(batch.src)
        states = model.decode(batch.tgt, batch.src, memory)
        weight, bias = model.output_layer()
        if bias is None:
            bias = weight.new_zeros(len(weight))
        loss, plain = smoothed_cross_entropy(
            model.predict_features(states), weight, bias, batch.labels, self.settings.smoothing
        )
        return LossTerms(loss, {"nll": plain})


class Translation(Writing):
    """Write the translation of a sentence."""

    n_sides: ClassVar[int] = 2
    reads_apart: ClassVar[bool] = True

    def n_marks(self, marks: Marks) -> int:
        """Count two marks of either side: the target has one before and one after it."""
        return 4

    def make_collate(self, marks: Marks, shape: BatchShape | None) -> Collate:
        """Batches of sentence pairs."""
        return TranslationCollator(marks, shape, self.begin(marks), self.settings.direction)

    def start(self, encoder: Encoder, languages: Sequence[str]) -> None:
        """Look up the tokens that the languages begin with; the model remembers its directions."""
        super().start(encoder, languages)
        pairs = [(pair[0], pair[-1]) for pair in (name.split("-") for name in languages)]
        there = pairs if self.settings.direction != "backward" else []
        back = pairs if self.settings.direction != "forward" else []
        check_decoder(encoder).learn_directions([*there, *((tgt, src) for src, tgt in back)])

    def find_written(self, languages: Sequence[str]) -> list[str]:
        """Name the second language of every pair, then the first: as far as they are written."""
        pairs = [name.split("-") for name in languages]
        if self.settings.direction == "both":
            return [pair[-1] for pair in pairs] + [pair[0] for pair in pairs]
        return [pair[0 if self.settings.direction == "backward" else -1] for pair in pairs]


@dataclass(frozen=True, slots=True)
class TranslationCollator:
    """Builds batches of sources and targets in the direction asked for."""

    marks: Marks
    shape: BatchShape | None
    beginnings: Beginnings
    direction: str

    def __call__(self, arrays: tuple[Ragged, ...], generator: torch.Generator) -> Seq2SeqBatch:
        """Build one batch."""
        src, tgt, pairs = arrays
        numbers = pairs.ids
        if self.direction == "backward":
            src, tgt = tgt, src
        if self.direction == "both":
            n_pairs = len(src.lengths)
            turned = torch.randint(2, (n_pairs,), generator=generator).numpy()
            both = Ragged(*map(np.concatenate, ((src.ids, tgt.ids), (src.lengths, tgt.lengths))))
            places = np.arange(n_pairs)
            src = reorder(both, places + turned * n_pairs)
            tgt = reorder(both, places + (1 - turned) * n_pairs)
            # The tokens of the first languages follow those of the second ones.
            numbers = numbers + turned * (len(self.beginnings.ids) // 2)
        first = self.beginnings.find(numbers)
        return lay_seq2seq(src, tgt, first, self.marks, self.shape, HALF)


# What damaged and whole text may take of a batch, in sixteenths: about three quarters, and all.
SHARES = (13, 17)


class DenoisingSeq2SeqSettings(ObjectiveSettings):
    """Denoising as the recipe describes it."""

    kind: Literal["denoising_seq2seq"] = "denoising_seq2seq"
    # The share of tokens hidden, and the mean length of spans, each of which becomes one mask.
    rate: float = Field(0.35, gt=0, lt=1)
    mean_span: float = Field(3.5, gt=0)
    # Also put the sentences of an example into another order, where it has several.
    permute: bool = False
    smoothing: float = Field(0.0, ge=0, lt=1)


class DenoisingSeq2Seq(Writing):
    """Write a text whose spans are hidden; the decoder begins with the token of its language."""

    n_sides: ClassVar[int] = 1

    def __init__(self, settings: DenoisingSeq2SeqSettings) -> None:
        super().__init__(settings)
        # Whether a token ends a sentence; known from `start` on.
        self.ends = SentenceEnds()

    def n_marks(self, marks: Marks) -> int:
        """Count `<s>` and `</s>`."""
        return 2

    def make_collate(self, marks: Marks, shape: BatchShape | None) -> Collate:
        """Batches of damaged and whole text."""
        return DenoisingCollator(marks, shape, self.begin(marks), self.settings, self.ends)

    def start(self, encoder: Encoder, languages: Sequence[str]) -> None:
        """Look up the tokens that the languages begin with, and those that end sentences."""
        super().start(encoder, languages)
        self.ends.meet(encoder)


class SentenceEnds:
    """Knows the tokens that end a sentence, once it has met the tokenizer."""

    def __init__(self) -> None:
        self.flags: npt.NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)

    def meet(self, encoder: Encoder) -> None:
        """Find the pieces that are nothing but final marks."""
        self.flags = np.zeros(len(encoder.tokenizer), dtype=np.bool_)
        for piece, number in encoder.tokenizer.get_vocab().items():
            bare = piece.strip("▁Ġ#")
            self.flags[number] = bool(bare) and set(bare) <= set(HARD + SOFT)


@dataclass(frozen=True, slots=True)
class DenoisingCollator:
    """Damages text, and lays it beside what it was."""

    marks: Marks
    shape: BatchShape | None
    beginnings: Beginnings
    settings: DenoisingSeq2SeqSettings
    ends: SentenceEnds

    def __call__(self, arrays: tuple[Ragged, ...], generator: torch.Generator) -> Seq2SeqBatch:
        """Build one batch."""
        text, languages = arrays
        seed = int(torch.randint(1 << 62, (), generator=generator))
        noise, settings = np.random.default_rng(seed), self.settings
        damaged = text
        if settings.permute:
            damaged = permute_sentences(text, self.ends.flags[text.ids], noise)
        damaged = infill_spans(
            damaged, self.marks.mask, noise, rate=settings.rate, mean_span=settings.mean_span
        )
        first = self.beginnings.find(languages.ids)
        return lay_seq2seq(damaged, text, first, self.marks, self.shape, SHARES)
