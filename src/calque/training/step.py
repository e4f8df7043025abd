"""One training step as a module, and the check that its losses stay finite."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from torch import nn

from calque.errors import InputError

if TYPE_CHECKING:
    from accelerate import Accelerator
    from jaxtyping import Float
    from torch import Tensor

    from calque.models.encoder import Encoder
    from calque.objectives.base import Objective


class TrainStep(nn.Module):
    """Computes the weighted sum of all objectives on one micro-batch each.

    The encoder and the objectives are one module, so that DDP and FSDP wrap them together.
    """

    def __init__(self, encoder: Encoder, objectives: Sequence[Objective]) -> None:
        super().__init__()
        self.encoder = encoder
        self.objectives = nn.ModuleList(objectives)
        self.names = name_objectives(objectives)
        self.weights = [objective.settings.weight for objective in objectives]

    def forward(
        self, batches: Sequence[Any]
    ) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, ""]]]:
        """Return the total loss and the metrics; an objective whose batch is None is left out."""
        total: Tensor | None = None
        metrics: dict[str, Tensor] = {}
        objectives: Sequence[Any] = list(self.objectives)
        for name, objective, weight, batch in zip(
            self.names, objectives, self.weights, batches, strict=True
        ):
            if batch is None:
                continue
            batch = objective.prepare(self.encoder, batch)
            # Validation is rare: compiling it, too, would take more time than it saves.
            compute = objective if self.training else objective.forward
            terms = compute(self.encoder, batch)
            total = weight * terms.loss if total is None else total + weight * terms.loss
            metrics[name] = terms.loss.detach()
            metrics |= {f"{name}/{key}": value.detach() for key, value in terms.metrics.items()}
        assert total is not None
        return total, metrics

    def compile_objectives(self) -> None:
        """Compile each objective; batches of one shape need one graph."""
        for objective in self.objectives:
            objective.compile(dynamic=False)


def name_objectives(objectives: Iterable[Any]) -> list[str]:
    """Return the kinds of objectives as names, numbered where a kind occurs twice."""
    kinds = [objective.settings.kind for objective in objectives]
    return [
        kind if kinds.count(kind) == 1 else f"{kind}_{kinds[: i + 1].count(kind)}"
        for i, kind in enumerate(kinds)
    ]


class Diverged(InputError):
    """A loss or a gradient is infinite or not a number."""


class NonfiniteGuard:
    """Detects infinite and NaN losses and gradients without waiting for the GPU in every step.

    Results stay on the device until `check` reads them; checkpoints are written after a check.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self._problems: list[str] = []
        self._is_finite: list[Tensor] = []

    def record(self, step: int, values: Mapping[str, Tensor], batches: Mapping[str, int]) -> None:
        """Record whether values are finite, and the number of the batch that each comes from."""
        stacked = torch.stack([value.detach().float() for value in values.values()])
        self._is_finite.append(stacked.isfinite())
        for name in values:
            number = batches.get(name.partition("/")[0])
            batch = "" if number is None else f", batch {number} of its stream"
            self._problems.append(f"{name} is not finite at step {step}{batch}")

    def check(self) -> None:
        """Raise Diverged, on all processes, if a value since the last check is not finite."""
        problems, is_finite = self._problems, self._is_finite
        self._problems, self._is_finite = [], []
        if not is_finite:
            return
        bad = ~torch.cat(is_finite)
        if not self.accelerator.reduce(bad.sum().float(), reduction="sum"):
            return
        first = int(bad.int().argmax()) if bad.any() else len(problems)
        found: list[tuple[int, str]] = gather_object([(first, [*problems, ""][first])])
        raise Diverged(
            min(found)[1], fix="lower optimizer.learning_rate, or check the text of that batch"
        )
