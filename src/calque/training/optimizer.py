"""The optimizer: learning rate schedule, frozen parameters, AdamW, and its state on disk."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from calque.errors import InputError

if TYPE_CHECKING:
    from calque.training.recipe import OptimizerSection, Recipe

# Prefix of the optimizer's tensors, and key of its groups, in a checkpoint.
OPTIMIZER = "optimizer."
OPTIMIZER_GROUPS = "optimizer_groups"
# Implementation choices, which a checkpoint does not store.
IMPLEMENTATION_SWITCHES = {"foreach", "fused", "capturable", "differentiable"}


def learning_rate_factor(
    step: int, *, kind: Literal["linear", "cosine", "constant"], warmup: int, steps: int
) -> float:
    """Return the factor of the learning rate: up to 1 in the warm-up, then down to 0 or constant.

    >>> [learning_rate_factor(step, kind="linear", warmup=2, steps=6) for step in (0, 1, 2, 4, 6)]
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


def set_learning_rate(optimizer: Optimizer, recipe: Recipe, step: int) -> float:
    """Set the learning rate of a step, counted from 1, and return it.

    There is a second warm-up after `freeze_steps`, because the optimizer has no moments yet of
    the weights that were frozen.
    """
    schedule, freeze_steps = recipe.schedule, recipe.freeze_steps
    factor = learning_rate_factor(
        step, kind=schedule.kind, warmup=schedule.warmup, steps=schedule.steps
    )
    if freeze_steps is not None and step > freeze_steps:
        factor *= min(1.0, (step - freeze_steps) / max(1, schedule.warmup))
    rate = factor * recipe.optimizer.learning_rate
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


def build_optimizer(module: nn.Module, settings: OptimizerSection) -> torch.optim.AdamW:
    """Return AdamW with weight decay on matrices only; one fused kernel does each step."""
    trained = trainable_parameters(module)
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=(settings.betas[0], settings.betas[1]),
        eps=settings.epsilon,
        fused=trained[0].device.type in ("cpu", "cuda"),
    )


def trainable_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are not frozen; raise an InputError if there are none."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not trained:
        raise InputError("every parameter is frozen", fix="remove patterns from freeze")
    return trained


def freeze(module: nn.Module, patterns: Sequence[str], *, undo: bool = False) -> int:
    """Freeze or unfreeze the parameters whose names match; return the number of frozen weights."""
    names = dict(module.named_parameters(remove_duplicate=False))
    for name in match_parameters(names, patterns):
        names[name].requires_grad_(undo)
    return sum(p.numel() for p in module.parameters() if not p.requires_grad)


def freeze_first_rows(matrix: nn.Parameter, n_rows: int, others: Sequence[int] = ()) -> None:
    """Keep the first rows of a matrix and some others as they are: their gradients become 0.

    Weight decay would still change them, so it must be 0.
    """
    if not matrix.requires_grad:
        raise InputError(
            "freeze_rows is set, but freeze freezes all rows", fix="remove one of them"
        )
    if n_rows >= len(matrix):
        raise InputError(
            f"freeze_rows={n_rows}, but there are {len(matrix)} word embeddings",
            fix="pass the size of the vocabulary before it was extended",
        )
    is_trained = torch.arange(len(matrix), device=matrix.device)[:, None] >= n_rows
    is_trained[list(others)] = False
    matrix.register_hook(lambda gradient: gradient * is_trained)  # type: ignore[no-untyped-call]


def match_parameters(parameters: Mapping[str, object], patterns: Sequence[str]) -> list[str]:
    """Return the names that match; a pattern without effect is an error.

    A pattern `!…` makes exceptions from the patterns before it. Shared weights, such as embeddings
    that are also the output layer, match by any of their names.

    >>> match_parameters({"a.weight": 1, "a.bias": 2, "b.weight": 3}, ["*.weight", "!b.*"])
    ['a.weight']
    """
    names, chosen = list(parameters), set[str]()
    for pattern in patterns:
        found = {
            id(weight)
            for name, weight in parameters.items()
            if fnmatchcase(name, pattern.removeprefix("!"))
        }
        matches = {name for name, weight in parameters.items() if id(weight) in found}
        if not matches:
            raise InputError(
                f"freeze: {pattern!r} matches no parameter",
                fix=f"names look like {names[0]}, and * matches anything",
            )
        is_exception = pattern.startswith("!")
        if is_exception and not chosen & matches:
            raise InputError(
                f"freeze: {pattern!r} is an exception, but nothing is frozen before it",
                fix=f"put a pattern that freezes it first, such as '{names[0].split('.')[0]}.*'",
            )
        chosen = chosen - matches if is_exception else chosen | matches
    return [name for name in names if name in chosen]


def flatten_optimizer(
    model: nn.Module, optimizer: Optimizer
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return an optimizer's state as named CPU tensors and JSON scalars.

    Works for a plain, compiled, DDP or FSDP2 model: keys are parameter names without the
    wrappers' prefixes. Every process must call it, and only the first one gets the state. The
    tensors may share memory with the optimizer, so write them before its next step.
    """
    optimizer = _unwrap(optimizer)
    has_no_state = not optimizer.state
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizer, options=options))
    if has_no_state:  # torch has created a state, which reading must not do
        optimizer.state.clear()
        state["state"] = {}
    tensors = {
        f"{OPTIMIZER}{name}.{moment}": value
        for name, moments in state.get("state", {}).items()
        for moment, value in moments.items()
    }
    groups = [
        {
            key: value.item() if isinstance(value, Tensor) else value
            for key, value in group.items()
            if key not in IMPLEMENTATION_SWITCHES
        }
        for group in state.get("param_groups", [])
    ]
    return tensors, {OPTIMIZER_GROUPS: groups}


def restore_optimizer(
    model: nn.Module,
    optimizer: Optimizer,
    tensors: Mapping[str, Tensor],
    scalars: Mapping[str, Any],
) -> None:
    """Restore the state that `flatten_optimizer` returned, so that the next step is bit-identical.

    The model and the optimizer are built and wrapped as for training; every process calls it with
    the whole state. Keys that are not the optimizer's are ignored.
    """
    optimizer = _unwrap(optimizer)
    optimizer.zero_grad(set_to_none=True)  # torch creates no state where there are gradients
    current: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizer))
    names = [list(group["params"]) for group in current["param_groups"]]
    groups = scalars.get(OPTIMIZER_GROUPS, [])
    if [group["params"] for group in groups] != names:
        problem = "the saved optimizer state belongs to other parameters or parameter groups"
        raise InputError(problem, fix="resume with the model and the recipe of that run")
    saved: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith(OPTIMIZER):
            name, _, moment = key.removeprefix(OPTIMIZER).rpartition(".")
            saved.setdefault(name, {})[moment] = value.clone()
    # torch requires a state of every parameter: zeros for those that have none yet.
    zeros = {
        name: {key: torch.zeros(value.shape) for key, value in optimizer.state[parameter].items()}
        for name, parameter in _named_parameters(optimizer, names)
        if parameter in optimizer.state and name not in saved
    }
    merged = [_merge_group(*pair) for pair in zip(optimizer.param_groups, groups, strict=True)]
    options = StateDictOptions(full_state_dict=True)
    state: dict[str, Any] = {"state": zeros | saved, "param_groups": merged}
    set_optimizer_state_dict(model, optimizer, state, options=options)
    for group, settings in zip(optimizer.param_groups, merged, strict=True):
        group.update({**settings, "params": group["params"]})  # torch has turned tuples into lists
    for name, parameter in _named_parameters(optimizer, names):
        if name not in saved:
            optimizer.state.pop(parameter, None)


def _unwrap(optimizer: Optimizer) -> Optimizer:
    """Return the torch optimizer inside Accelerate's, whose steps depend on accumulation."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return inner if isinstance(inner, Optimizer) else optimizer


def _merge_group(current: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group with saved settings, in the current group's types (JSON has no tuples)."""
    merged = {**current, **saved}
    for key, value in current.items():
        if isinstance(value, tuple):
            merged[key] = tuple(merged[key])
        elif isinstance(value, Tensor):
            merged[key] = torch.full_like(value, merged[key])
    return merged


def _named_parameters(
    optimizer: Optimizer, names: Sequence[Sequence[str]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter of an optimizer with its name."""
    for group, group_names in zip(optimizer.param_groups, names, strict=True):
        yield from zip(group_names, group["params"], strict=True)
