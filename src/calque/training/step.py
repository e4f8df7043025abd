"""One training step as a module: the encoder and all objectives, so that DDP wraps them as one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from calque.types import InputError

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from calque.models.encoder import Encoder
    from calque.objectives.base import Objective
    from calque.training.recipe import OptimizerSection


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
