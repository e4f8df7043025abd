"""The recipe's `model.decoder`: what makes an encoder–decoder of the encoder."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from calque.models.seq2seq_start import DecoderPlan


class DecoderSection(BaseModel):
    """A decoder with the encoder's own shape and weights.

    Its cross-attention is that of `model.start`, if that has one (VECO's folder `veco`, or another
    encoder–decoder), and else random.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    # How many of the encoder's layers it is made of, by default all; and which of them.
    layers: int | None = Field(None, gt=0)
    which: Literal["first", "last"] = "last"
    # "random" draws it even if `model.start` has some.
    cross_attention: Literal["start", "random"] = "start"
    # Weights that stay the encoder's own: none, the word embeddings, or all but cross-attention.
    tie: Literal["nothing", "embeddings", "all"] = "embeddings"
    # Languages it learns to write, each with a token to begin with; none needed for a single one.
    languages: list[str] = []

    def plan(self) -> DecoderPlan:
        """Give what the model is built from."""
        languages = tuple(self.languages)
        return DecoderPlan(self.layers, self.which, self.cross_attention, self.tie, languages)
