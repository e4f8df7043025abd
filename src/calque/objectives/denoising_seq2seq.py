"""Denoising by an encoder–decoder: write the text that was damaged, in its own language.

Lewis et al., 2020 (BART); Liu et al., 2020 (mBART).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field

from calque.objectives.base import Marks, ObjectiveSettings
from calque.objectives.seq2seq_batches import Beginnings, Seq2SeqBatch, lay_seq2seq
from calque.objectives.translation import Writing
from calque.text.batching import BatchShape, Ragged
from calque.text.infilling import infill_spans, permute_sentences
from calque.text.sentences import HARD, SOFT

if TYPE_CHECKING:
    import numpy.typing as npt

    from calque.models.encoder import Encoder
    from calque.objectives.base import Collate

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
