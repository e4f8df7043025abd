"""The learning rate as a pure function of the step.

Watching a run: losses that stop being numbers, and requests to stop.

One training step as a module: the encoder and all objectives, so that DDP wraps them as one.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

import torch
from accelerate.utils import gather_object
from torch import nn

from calque.errors import InputError

if TYPE_CHECKING:
    from accelerate import Accelerator
    from jaxtyping import Float
    from torch import Tensor
    from torch.optim import Optimizer

    from calque.models.encoder import Encoder
    from calque.objectives.base import Objective
    from calque.training.recipe import OptimizerSection, Recipe


def rate_factor(
    step: int, *, kind: Literal["linear", "cosine", "constant"], warmup: int, steps: int
) -> float:
    """Rise to 1 over the warm-up, then fall to 0 (linear, cosine) or stay (constant).

    >>> [rate_factor(step, kind="linear", warmup=2, steps=6) for step in (0, 1, 2, 4, 6)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    if step < warmup:
        return step / max(1, warmup)
    if kind == "constant":
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    if kind == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    return 1 - progress


def set_rate(optimizer: Optimizer, recipe: Recipe, step: int) -> float:
    """Give an optimizer the learning rate of a step, counted from 1, and return it.

    Weights that were frozen for a time are new to the optimizer: for them, it warms up again.
    """
    schedule, thaw = recipe.schedule, recipe.freeze_steps
    factor = rate_factor(step, kind=schedule.kind, warmup=schedule.warmup, steps=schedule.steps)
    if thaw is not None and step > thaw:
        factor *= min(1.0, (step - thaw) / max(1, schedule.warmup))
    rate = factor * recipe.optimizer.learning_rate
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


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


class TrainStep(nn.Module):
    """Computes the weighted sum of all objectives on one micro-batch each."""

    def __init__(self, encoder: Encoder, objectives: Sequence[Objective]) -> None:
        super().__init__()
        self.encoder = encoder
        self.objectives = nn.ModuleList(objectives)
        self.weights = [objective.settings.weight for objective in objectives]

    def forward(
        self, batches: Sequence[Any]
    ) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, ""]]]:
        """Return the loss to follow and every objective's own; None for a batch leaves one out."""
        total: Tensor | None = None
        figures: dict[str, Tensor] = {}
        objectives: Sequence[Any] = list(self.objectives)
        names = name_objectives(objectives)
        for name, objective, weight, batch in zip(
            names, objectives, self.weights, batches, strict=True
        ):
            if batch is None:
                continue
            batch = objective.prepare(self.encoder, batch)
            # Validation is rare: compiling it too would cost more than it saves.
            compute = objective if self.training else objective.forward
            terms = compute(self.encoder, batch)
            total = weight * terms.loss if total is None else total + weight * terms.loss
            figures[name] = terms.loss.detach()
            figures |= {f"{name}/{key}": value.detach() for key, value in terms.figures.items()}
        assert total is not None
        return total, figures

    def compile_objectives(self) -> None:
        """Compile each objective whole; batches of one shape make that one graph."""
        for objective in self.objectives:
            objective.compile(dynamic=False)


def name_objectives(objectives: Iterable[Any]) -> list[str]:
    """Name objectives by their kind, numbered where one comes twice."""
    kinds = [objective.settings.kind for objective in objectives]
    return [
        kind if kinds.count(kind) == 1 else f"{kind}_{kinds[: i + 1].count(kind)}"
        for i, kind in enumerate(kinds)
    ]


def freeze(module: nn.Module, patterns: Sequence[str], *, free: bool = False) -> int:
    """Stop training the parameters whose names match, or set them free; give how many are held."""
    names = dict(module.named_parameters(remove_duplicate=False))
    for name in match_parameters(names, patterns):
        names[name].requires_grad_(free)
    return sum(p.numel() for p in module.parameters() if not p.requires_grad)


def match_parameters(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """Choose the names that match; a pattern that changes nothing is an error.

    A pattern `!…` takes back what it matches of those before: alone it means nothing. Shared
    weights, such as embeddings that are also the output layer, go by either name.

    >>> match_parameters(["a.weight", "a.bias", "b.weight"], ["*.weight", "!b.*"])
    ['a.weight']
    """
    names, chosen = list(names), set[str]()
    for pattern in patterns:
        matches = [name for name in names if fnmatchcase(name, pattern.removeprefix("!"))]
        if not matches:
            raise InputError(
                f"freeze: {pattern!r} matches no parameter",
                fix=f"names look like {names[0]}, and * stands for anything",
            )
        takes_back = pattern.startswith("!")
        if takes_back and not chosen & set(matches):
            fix = f"name before it what is frozen, such as '{names[0].split('.')[0]}.*'"
            raise InputError(f"freeze: {pattern!r} takes nothing back", fix=fix)
        chosen = chosen - set(matches) if takes_back else chosen | set(matches)
    return [name for name in names if name in chosen]


def find_trained(module: nn.Module) -> list[nn.Parameter]:
    """List the parameters that are not frozen; without any there is nothing to train."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not trained:
        raise InputError("every parameter is frozen", fix="freeze less")
    return trained


def build_optimizer(module: nn.Module, settings: OptimizerSection) -> torch.optim.AdamW:
    """Make AdamW with weight decay on matrices only, fused on a GPU."""
    trained = find_trained(module)
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=(settings.betas[0], settings.betas[1]),
        eps=settings.epsilon,
        fused=trained[0].is_cuda,
    )
