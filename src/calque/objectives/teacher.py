"""A model that others learn from: read without gradients, never trained, never saved with them."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Self

import torch

from calque.models.encoder import Encoder
from calque.models.loading import HeadlessCheckpoint
from calque.types import InputError

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from calque.types import TokenBatch


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
