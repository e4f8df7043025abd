"""An optimizer's state as named tensors and plain numbers, and back, bit for bit.

Both ways are called on every process, for a plain, compiled, DDP or FSDP2 model alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from calque.types import InputError

OPTIMIZER = "optimizer."
OPTIMIZER_GROUPS = "optimizer_groups"
# How the machine runs the optimizer, not what it has learnt: these stay as built.
MACHINE_SWITCHES = {"foreach", "fused", "capturable", "differentiable"}


def flatten_optimizer(
    model: nn.Module, optimizer: Optimizer
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Turn an optimizer's state into named CPU tensors and JSON scalars.

    Works for a plain, compiled, DDP or FSDP2 model: keys are parameter names without the
    wrappers' prefixes. Every process must call it; only the first gets anything. The tensors
    may share memory with the optimizer, so write them before its next step.
    """
    optimizer = _unwrap(optimizer)
    untouched = not optimizer.state
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizer, options=options))
    if untouched:  # torch has taken a dry step to create the state: a reader must not change it
        optimizer.state.clear()
        whole["state"] = {}
    tensors = {
        f"{OPTIMIZER}{name}.{moment}": value
        for name, moments in whole.get("state", {}).items()
        for moment, value in moments.items()
    }
    return tensors, {OPTIMIZER_GROUPS: [_plain(group) for group in whole.get("param_groups", [])]}


def restore_optimizer(
    model: nn.Module,
    optimizer: Optimizer,
    tensors: Mapping[str, Tensor],
    scalars: Mapping[str, Any],
) -> None:
    """Put back what `flatten_optimizer` took, so that the next step is bit-identical.

    The model and optimizer are built and wrapped as for training; every process calls it with
    the whole state. Keys that are not the optimizer's are ignored.
    """
    optimizer = _unwrap(optimizer)
    optimizer.zero_grad(set_to_none=True)  # torch creates no state where gradients lie
    names = _parameter_names(model, optimizer)
    groups = scalars.get(OPTIMIZER_GROUPS, [])
    if [group["params"] for group in groups] != names:
        problem = "the saved optimizer state belongs to other parameters or parameter groups"
        raise InputError(problem, fix="resume with the model and the recipe of that run")
    saved = _moments_by_name(tensors)
    merged = [_merge(*pair) for pair in zip(optimizer.param_groups, groups, strict=True)]
    whole: dict[str, Any] = {
        "state": _stand_ins(optimizer, names, saved) | saved,
        "param_groups": merged,
    }
    options = StateDictOptions(full_state_dict=True)
    set_optimizer_state_dict(model, optimizer, whole, options=options)
    for group, settings in zip(optimizer.param_groups, merged, strict=True):
        group.update({**settings, "params": group["params"]})  # torch has turned tuples into lists
    _forget_missing(optimizer, names, saved)


def _unwrap(optimizer: Optimizer) -> Optimizer:
    """Take the torch optimizer out of Accelerate's, whose steps depend on accumulation."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return inner if isinstance(inner, Optimizer) else optimizer


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """Keep a parameter group's settings as JSON values."""
    settings = {key: value for key, value in group.items() if key not in MACHINE_SWITCHES}
    return {k: v.item() if isinstance(v, Tensor) else v for k, v in settings.items()}


def _merge(current: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Lay saved settings over a live group's, in the live group's types (JSON has no tuple)."""
    merged = {**current, **saved}
    for key, value in current.items():
        if isinstance(value, tuple):
            merged[key] = tuple(merged[key])
        elif isinstance(value, Tensor):
            merged[key] = torch.full_like(value, merged[key])
    return merged


def _moments_by_name(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Group flat optimizer tensors by parameter name."""
    state: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith(OPTIMIZER):
            name, _, moment = key.removeprefix(OPTIMIZER).rpartition(".")
            state.setdefault(name, {})[moment] = value.clone()
    return state


def _parameter_names(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Name the parameters of each group, in the optimizer's order."""
    whole: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizer))
    return [list(group["params"]) for group in whole["param_groups"]]


def _name_parameters(
    optimizer: Optimizer, names: Sequence[Sequence[str]]
) -> Iterator[tuple[str, Tensor]]:
    """Pair every parameter of an optimizer with its name."""
    for group, group_names in zip(optimizer.param_groups, names, strict=True):
        yield from zip(group_names, group["params"], strict=True)


def _stand_ins(
    optimizer: Optimizer, names: Sequence[Sequence[str]], saved: Mapping[str, object]
) -> dict[str, dict[str, Tensor]]:
    """Make zeros for parameters saved without a state, since torch wants one for each."""
    return {
        name: {key: torch.zeros(value.shape) for key, value in optimizer.state[parameter].items()}
        for name, parameter in _name_parameters(optimizer, names)
        if parameter in optimizer.state and name not in saved
    }


def _forget_missing(
    optimizer: Optimizer, names: Sequence[Sequence[str]], saved: Mapping[str, object]
) -> None:
    """Leave parameters that had no gradient yet without a state, as they were saved."""
    for name, parameter in _name_parameters(optimizer, names):
        if name not in saved:
            optimizer.state.pop(parameter, None)
