"""Watching a run: losses that stop being numbers, and requests to stop."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

import torch
from accelerate.utils import gather_object

from calque.types import InputError

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor


class Diverged(InputError):
    """A loss or a gradient stopped being a number."""


class Watch:
    """Notices a loss or gradient that is not finite, without waiting for the GPU at every step.

    The verdicts stay on the device until `check` reads them; nothing is saved unchecked.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator, self.n_tokens = accelerator, 0
        self._names: list[str] = []
        self._verdicts: list[Tensor] = []

    def note(self, step: int, values: Mapping[str, Tensor], batches: Mapping[str, int]) -> None:
        """Remember whether numbers are finite, and which batch of its stream each came from."""
        self._verdicts.append(torch.stack([v.detach().float() for v in values.values()]).isfinite())
        for name in values:
            number = batches.get(name.partition("/")[0])
            place = "" if number is None else f", batch {number} of its stream"
            self._names.append(f"{name} is not finite at step {step}{place}")

    def check(self) -> None:
        """Stop the run, on all processes, if any number since the last check was not finite."""
        names, verdicts = self._names, self._verdicts
        self._names, self._verdicts = [], []
        if not verdicts:
            return
        bad = ~torch.cat(verdicts)
        if not self.accelerator.reduce(bad.sum().float(), reduction="sum"):
            return
        first = int(bad.int().argmax()) if bad.any() else len(names)
        found: list[tuple[int, str]] = gather_object([(first, [*names, ""][first])])
        raise Diverged(
            min(found)[1], fix="lower optimizer.learning_rate, or look at the text of that batch"
        )

    def take_tokens(self) -> int:
        """Give the tokens this process has seen since the last call."""
        taken, self.n_tokens = self.n_tokens, 0
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
