"""Objectives of encoder–decoders: translation, and denoising as in BART and mBART.

Vaswani et al., 2017; Szegedy et al., 2016 (label smoothing); Lewis et al., 2020 (BART); Liu et al.,
2020 (mBART).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, model_validator

from calque.errors import InputError
from calque.io.segmentation import HARD_ENDS, SOFT_ENDS
from calque.models.heads import NO_LABEL
from calque.models.seq2seq import Seq2Seq
from calque.objectives.base import Objective, ObjectiveSettings, TensorBatch
from calque.objectives.masked_lm import vocabulary_logits
from calque.tokens.masking import infill_spans, mask_each, permute_sentences
from calque.tokens.ragged import (
    BatchShape,
    Ragged,
    add_special_tokens,
    interleave,
    pack,
    ranges,
    reorder,
)
from calque.tokens.tokenizer import SpecialTokens
from calque.types import LossTerms, TokenBatch

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Float, Int
    from torch import Tensor

    from calque.models.encoder import Encoder
    from calque.objectives.base import Collate

    IntArray = npt.NDArray[np.int64]

# Sizes of a fixed shape are odd sixteenths of the token budget, which leaves room around a half
# and around the whole.
STEPS = 16
# The initial size of (source, target) in sixteenths: for translation about a half each.
TRANSLATION_SIZES = (9, 9)
# For denoising: the masked text is about three quarters of the original.
DENOISING_SIZES = (13, 17)


class TranslationSettings(ObjectiveSettings):
    """Settings of translation in a recipe."""

    kind: Literal["translation"] = "translation"
    # For bitext en-de, "forward" is from en to de; "both" chooses a random direction per pair.
    direction: Literal["forward", "backward", "both"] = "forward"
    smoothing: float = Field(0.1, ge=0, lt=1)
    # The fraction of masked source tokens, as in VECO's mBART control; 0 masks none.
    mask_rate: float = Field(0.0, ge=0, lt=1)

    newer_keys: ClassVar[tuple[str, ...]] = (*ObjectiveSettings.newer_keys, "mask_rate")


class DenoisingSeq2SeqSettings(ObjectiveSettings):
    """Settings of denoising in a recipe."""

    kind: Literal["denoising_seq2seq"] = "denoising_seq2seq"
    # The fraction of masked tokens, and the mean length of spans; each span becomes one mask.
    rate: float = Field(0.35, gt=0, lt=1)
    mean_span: float = Field(3.5, gt=0)
    # Also permute the sentences of an example.
    permute: bool = False
    smoothing: float = Field(0.0, ge=0, lt=1)
    # "text": write the whole text (mBART). "masked": every masked token becomes one mask, and only
    # these tokens are written, in their order (VECO's mBART control); `mean_span` is ignored.
    target: Literal["text", "masked"] = "text"

    newer_keys: ClassVar[tuple[str, ...]] = (*ObjectiveSettings.newer_keys, "target")

    @model_validator(mode="after")
    def _check_permute(self) -> DenoisingSeq2SeqSettings:
        if self.permute and self.target == "masked":
            raise ValueError("permute=true needs target=text: masked tokens are written in order")
        return self


def smoothed_cross_entropy(
    features: Float[Tensor, "tokens hidden"],
    weight: Float[Tensor, "vocabulary hidden"],
    bias: Float[Tensor, "vocabulary"],
    labels: Int[Tensor, "tokens"],
    smoothing: float,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Return the mean of (1 − ε)·(−log p(y)) + ε·mean over v of (−log p(v)), and of −log p(y).

    The mean logit is computed from the mean row of the output layer, so that smoothing needs no
    second pass over the vocabulary. Labels of `NO_LABEL` are ignored.
    """
    logits = vocabulary_logits(features, weight, bias)
    dtype = logits.dtype
    normalizer = logits.logsumexp(-1)
    is_real = labels != NO_LABEL
    label_logits = logits.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    mean_logits = (features.to(dtype) * weight.to(dtype).mean(0)).sum(-1) + bias.to(dtype).mean()
    nll, uniform = normalizer - label_logits, normalizer - mean_logits
    n_real = is_real.sum().clamp(min=1)
    smoothed = (1 - smoothing) * nll + smoothing * uniform
    zero = torch.zeros_like(nll)
    loss, mean_nll = (torch.where(is_real, x, zero).sum() / n_real for x in (smoothed, nll))
    return loss, mean_nll


@dataclass(frozen=True, slots=True)
class Seq2SeqBatch(TensorBatch):
    """Decoder input `tgt` is generated from `src`, sequence by sequence; labels are next tokens.

    Labels of `NO_LABEL` only fill the shape.
    """

    src: TokenBatch
    tgt: TokenBatch
    labels: Int[Tensor, "tgt_tokens"]

    @property
    def tokens(self) -> TokenBatch:
        """The source, with the tokens of both sides counted."""
        return replace(self.src, n_real=self.src.n_real + self.tgt.n_real)


class DecoderStarts:
    """The first token of the decoder by the number of the target language.

    Collators have this object before the languages are known; `set_languages` completes it.
    """

    def __init__(self, special_tokens: SpecialTokens) -> None:
        self.default = special_tokens.cls_id
        self.ids: IntArray = np.zeros(0, dtype=np.int64)

    def set_languages(self, encoder: Encoder, languages: Sequence[str]) -> None:
        """Look up the tokens of languages, in the order of their numbers."""
        model = check_decoder(encoder)
        different = sorted({*languages, *model.target_languages})
        if not model.start_tokens and len(different) > 1:
            raise InputError(
                f"there are several target languages ({', '.join(different)}), but the decoder "
                "has no start tokens to distinguish them",
                fix=f"set model.decoder.languages=[{', '.join(different)}]",
            )
        self.default = model.default_start_token
        self.ids = np.array([model.start_token(name) for name in languages], dtype=np.int64)

    def find(self, numbers: IntArray) -> IntArray:
        """Return the first token for each example."""
        return self.ids[numbers] if len(self.ids) else np.full(len(numbers), self.default)


def check_decoder(encoder: Encoder) -> Seq2Seq:
    """Return the model; raise an error if it has no decoder."""
    if not isinstance(encoder, Seq2Seq):
        raise InputError(
            "this objective generates text, but the model has no decoder",
            fix="add `decoder: {}` to the model section of the recipe",
        )
    return encoder


class Seq2SeqObjective(Objective):
    """Base class of objectives that read with the encoder and generate with the decoder."""

    needs_languages: ClassVar[bool] = True

    def __init__(self, settings: ObjectiveSettings) -> None:
        super().__init__(settings)
        self.decoder_starts: DecoderStarts | None = None

    def get_decoder_starts(self, special_tokens: SpecialTokens) -> DecoderStarts:
        """Return the object in which collators look up the first decoder tokens."""
        self.decoder_starts = self.decoder_starts or DecoderStarts(special_tokens)
        return self.decoder_starts

    def list_targets(self, languages: Sequence[str]) -> list[str]:
        """Return the target languages by the numbers that collators use."""
        return list(languages)

    def start(self, encoder: Encoder, languages: Sequence[str]) -> None:
        """Look up the start tokens of the languages."""
        assert self.decoder_starts is not None
        self.decoder_starts.set_languages(encoder, self.list_targets(languages))

    def forward(self, encoder: Encoder, batch: Seq2SeqBatch) -> LossTerms:
        """Return the label-smoothed cross-entropy with teacher forcing."""
        model = check_decoder(encoder)
        (memory,) = model(batch.src)
        states = model.decode(batch.tgt, batch.src, memory)
        weight, bias = model.output_layer()
        if bias is None:
            bias = weight.new_zeros(len(weight))
        loss, nll = smoothed_cross_entropy(
            model.lm_features(states), weight, bias, batch.labels, self.settings.smoothing
        )
        return LossTerms(loss, {"nll": nll})


class Translation(Seq2SeqObjective):
    """Generate the translation of a sentence."""

    n_sides: ClassVar[int] = 2
    n_special_tokens: ClassVar[int] = 4  # <s> and </s> of both sentences
    encodes_separately: ClassVar[bool] = True

    def build_collator(self, special_tokens: SpecialTokens, shape: BatchShape | None) -> Collate:
        """Return a collator of sentence pairs."""
        starts = self.get_decoder_starts(special_tokens)
        return TranslationCollator(special_tokens, shape, starts, self.settings)

    def start(self, encoder: Encoder, languages: Sequence[str]) -> None:
        """Look up the start tokens, and store the directions with the model."""
        super().start(encoder, languages)
        pairs = [(pair[0], pair[-1]) for pair in (name.split("-") for name in languages)]
        forward = pairs if self.settings.direction != "backward" else []
        backward = pairs if self.settings.direction != "forward" else []
        directions = [*forward, *((tgt, src) for src, tgt in backward)]
        check_decoder(encoder).add_directions(directions)

    def list_targets(self, languages: Sequence[str]) -> list[str]:
        """Return the target language of every pair, for "both" those of both directions."""
        pairs = [name.split("-") for name in languages]
        if self.settings.direction == "both":
            return [pair[-1] for pair in pairs] + [pair[0] for pair in pairs]
        return [pair[0 if self.settings.direction == "backward" else -1] for pair in pairs]


class DenoisingSeq2Seq(Seq2SeqObjective):
    """Generate a text, or its masked tokens, from a masked version of it.

    The first token is that of the language. Paper: VECO's control predicts "the masked words of
    source input x"; whether the decoder also reads the words between them is not described. Here
    it writes the masked tokens alone, so that all of them are masks: a token that stays unchanged
    or becomes a random one, as in BERT, could not be recognized as one to write.
    """

    n_sides: ClassVar[int] = 1
    n_special_tokens: ClassVar[int] = 2  # <s> and </s>

    def __init__(self, settings: DenoisingSeq2SeqSettings) -> None:
        super().__init__(settings)
        self.sentence_ends = SentenceEnds()

    def build_collator(self, special_tokens: SpecialTokens, shape: BatchShape | None) -> Collate:
        """Return a collator of masked and original text."""
        starts = self.get_decoder_starts(special_tokens)
        return DenoisingCollator(special_tokens, shape, starts, self.settings, self.sentence_ends)

    def start(self, encoder: Encoder, languages: Sequence[str]) -> None:
        """Look up the start tokens of the languages, and the tokens that end sentences."""
        super().start(encoder, languages)
        self.sentence_ends.set_tokenizer(encoder)


class SentenceEnds:
    """Whether each token ends a sentence; `set_tokenizer` must be called first."""

    def __init__(self) -> None:
        self.flags: npt.NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)

    def set_tokenizer(self, encoder: Encoder) -> None:
        """Find the pieces that consist of sentence-final punctuation."""
        self.flags = np.zeros(len(encoder.tokenizer), dtype=np.bool_)
        for piece, number in encoder.tokenizer.get_vocab().items():
            text = piece.strip("▁Ġ#")
            self.flags[number] = bool(text) and set(text) <= set(HARD_ENDS + SOFT_ENDS)


@dataclass(frozen=True, slots=True)
class TranslationCollator:
    """Builds batches of sources and targets in the given direction."""

    special_tokens: SpecialTokens
    shape: BatchShape | None
    starts: DecoderStarts
    settings: TranslationSettings

    def __call__(self, arrays: tuple[Ragged, ...], generator: torch.Generator) -> Seq2SeqBatch:
        """Return one batch."""
        src, tgt, pairs = arrays
        numbers, settings = pairs.ids, self.settings
        if settings.direction == "backward":
            src, tgt = tgt, src
        if settings.direction == "both":
            n_pairs = len(src.lengths)
            is_swapped = torch.randint(2, (n_pairs,), generator=generator).numpy()
            both = Ragged(*map(np.concatenate, ((src.ids, tgt.ids), (src.lengths, tgt.lengths))))
            rows = np.arange(n_pairs)
            src = reorder(both, rows + is_swapped * n_pairs)
            tgt = reorder(both, rows + (1 - is_swapped) * n_pairs)
            # The start tokens of the backward direction follow those of the forward direction.
            numbers = numbers + is_swapped * (len(self.starts.ids) // 2)
        if settings.mask_rate:
            noise = make_noise(generator)
            src, _ = mask_each(src, self.special_tokens.mask_id, noise, rate=settings.mask_rate)
        first = self.starts.find(numbers)
        return pack_seq2seq(src, tgt, first, self.special_tokens, self.shape, TRANSLATION_SIZES)


@dataclass(frozen=True, slots=True)
class DenoisingCollator:
    """Builds batches of masked text and original text."""

    special_tokens: SpecialTokens
    shape: BatchShape | None
    starts: DecoderStarts
    settings: DenoisingSeq2SeqSettings
    sentence_ends: SentenceEnds

    def __call__(self, arrays: tuple[Ragged, ...], generator: torch.Generator) -> Seq2SeqBatch:
        """Return one batch."""
        text, languages = arrays
        noise, settings = make_noise(generator), self.settings
        special, first = self.special_tokens, self.starts.find(languages.ids)
        if settings.target == "masked":
            masked, words = mask_each(text, special.mask_id, noise, rate=settings.rate)
            # The start token of a sentence counts too: short sentences need more than the rate.
            sizes = DENOISING_SIZES[1], 2 * math.ceil(STEPS / 2 * settings.rate) + 3
            return pack_seq2seq(masked, words, first, special, self.shape, sizes)
        noisy = text
        if settings.permute:
            noisy = permute_sentences(text, self.sentence_ends.flags[text.ids], noise)
        noisy = infill_spans(
            noisy, special.mask_id, noise, rate=settings.rate, mean_span=settings.mean_span
        )
        return pack_seq2seq(noisy, text, first, special, self.shape, DENOISING_SIZES)


def make_noise(generator: torch.Generator) -> np.random.Generator:
    """Return a generator of numpy that is seeded with one number of a generator of torch."""
    return np.random.default_rng(int(torch.randint(1 << 62, (), generator=generator)))


def pack_seq2seq(
    src: Ragged,
    tgt: Ragged,
    first: IntArray,
    special_tokens: SpecialTokens,
    shape: BatchShape | None,
    sizes: tuple[int, int],
) -> Seq2SeqBatch:
    """Return a batch of sources with special tokens, and targets after their first tokens.

    With a shape, both sides are padded: to at least `sizes` sixteenths of the token budget.
    """
    cls_id, sep_id, pad_id = special_tokens.cls_id, special_tokens.sep_id, special_tokens.pad_id
    src = add_special_tokens(src, cls_id, sep_id)
    labels = add_special_tokens(tgt, None, sep_id)
    tgt, _ = interleave(Ragged(first, np.ones(len(first), dtype=np.int64)), tgt)
    if shape is None:
        src_batch, tgt_batch = (pack(side, pad_id=pad_id) for side in (src, tgt))
        return Seq2SeqBatch(src_batch, tgt_batch, torch.from_numpy(labels.ids))
    n_tail = -(-max(sizes) * shape.budget // (STEPS * shape.row)) + 1
    src_batch = _pack_padded(src, shape, sizes[0], n_tail, pad_id)
    tgt_batch = _pack_padded(tgt, shape, sizes[1], n_tail, pad_id)
    n_fill = len(tgt_batch.ids) - len(labels.ids)
    padded = np.pad(labels.ids, (0, n_fill), constant_values=NO_LABEL)
    return Seq2SeqBatch(src_batch, tgt_batch, torch.from_numpy(padded))


def _pack_padded(
    ragged: Ragged, shape: BatchShape, min_size: int, n_tail: int, pad_id: int
) -> TokenBatch:
    """Pack sequences and add padding up to a fixed size, as `n_tail` sequences of padding."""
    step, size = 2 * shape.budget // STEPS, min_size * shape.budget // STEPS
    needed = len(ragged.ids) + n_tail
    size += max(0, -(-(needed - size) // step)) * step
    n_padding = size - len(ragged.ids)
    n_empty = max(0, shape.sequences - len(ragged.lengths))
    tail = np.full(n_tail, n_padding // n_tail, dtype=np.int64)
    tail[: n_padding % n_tail] += 1
    lengths = np.concatenate([ragged.lengths, np.zeros(n_empty, dtype=np.int64), tail])
    ids = np.pad(ragged.ids, (0, n_padding), constant_values=pad_id)
    positions = ranges(np.zeros_like(lengths), lengths)
    positions[len(ragged.ids) :] = 0
    packed = pack(Ragged(ids, lengths), positions=positions, pad_id=pad_id)
    return replace(packed, longest=max(shape.row, int(tail.max())), n_real=len(ragged.ids))
