"""Watching a run: losses that stop being numbers, and requests to stop."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

import torch

from calque.types import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from calque.text.streams import Place


class Diverged(InputError):
    """A loss or a gradient stopped being a number."""


class Watch:
    """Notices a loss or gradient that is not finite, without waiting for the GPU at every step.

    The verdicts stay on the device until `check` reads them; nothing is saved unchecked.
    """

    def __init__(self) -> None:
        self._notes: list[tuple[int, list[int], list[str], Tensor]] = []
        self._n_tokens = 0

    def note(
        self,
        losses: Mapping[str, Tensor],
        norm: Tensor,
        step: int,
        places: Sequence[Place],
        n_tokens: int,
    ) -> None:
        """Remember whether this step's numbers are finite, and how many tokens it saw."""
        values = torch.stack([*(v.detach() for v in losses.values()), norm.detach()]).isfinite()
        batches = [place.count - 1 for place in places]
        self._notes.append((step, batches, [*losses, "gradient"], values))
        self._n_tokens += n_tokens

    def check(self) -> None:
        """Stop the run if any number since the last check was not finite."""
        notes, self._notes = self._notes, []
        for step, batches, names, finite in notes:
            if bool(finite.all()):
                continue
            bad = names[int((~finite).int().argmax())]
            raise Diverged(
                f"{bad} is not finite at step {step + 1} (batches {batches} of the streams)",
                fix="lower the learning rate, or look at those batches",
            )

    def take_tokens(self) -> int:
        """Give the tokens seen since the last call."""
        taken, self._n_tokens = self._n_tokens, 0
        return taken


class StopRequest:
    """Turns SIGINT and SIGTERM into a wish that the loop grants after its step."""

    def __init__(self) -> None:
        self.made = False

    def _make(self, number: int, frame: FrameType | None) -> None:
        self.made = True

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen while training; a second signal of the kind is not taken as a harder one."""
        kinds = (signal.SIGINT, signal.SIGTERM)
        before = {kind: signal.signal(kind, self._make) for kind in kinds}
        try:
            yield
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)
