"""Checkpoints that survive a kill: plain Hugging Face folders plus what training needs to go on.

A run folder holds `step-00000500/`, each with the files of `save_model` (config.json,
model.safetensors, tokenizer), `training_state.safetensors` (every tensor of the optimizer and
the averages) and `training_state.json` (step, data position, recipe hash, …). No pickle.

    write_checkpoint(run, step, save_model, tensors, scalars, keep=3)     # on one process
    tensors, scalars = read_training_state(find_latest(run))              # on every process

An optimizer's state as named tensors and plain numbers, and back, bit for bit.

Both ways are called on every process, for a plain, compiled, DDP or FSDP2 model alike.

Weights averaged over time: exponentially (EMA) or over the last checkpoints.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn

from calque.errors import InputError
from calque.io.files import write_atomically
from calque.io.outputs import REPLACED, _discard, write_folder
from calque.training.distributed import gather_tensor

if TYPE_CHECKING:
    from calque.training.recipe import Recipe


STATE_TENSORS = "training_state.safetensors"
STATE_SCALARS = "training_state.json"
MODEL_TENSORS = "model.safetensors"
BEST = "best.json"
FORMAT = 1


def write_checkpoint(
    run: Path,
    step: int,
    save_model: Callable[[Path], object],
    tensors: Mapping[str, Tensor],
    scalars: Mapping[str, Any],
    keep: int,
    pinned: Collection[int] = (),
) -> Path:
    """Write one checkpoint whole or not at all, then drop all but the newest `keep`.

    `save_model` fills the folder it is given. The step marked best and the `pinned` steps
    (those that a last-k average still needs) are never dropped. Call it on one process only.
    """
    if keep < 1:
        raise InputError(f"keep={keep} would drop every checkpoint", fix="keep at least 1")
    final = folder_of(run, step)
    write_folder(final, lambda draft: _fill(draft, step, save_model, tensors, scalars))
    _prune(run, keep, {step, *pinned})
    return final


def folder_of(run: Path, step: int) -> Path:
    """Name the folder of a step's checkpoint, whether or not it exists.

    >>> folder_of(Path("run"), 500).name
    'step-00000500'
    """
    return run / f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """Read the step out of a checkpoint's name; None for any other folder."""
    match = re.fullmatch(rf"\.?step-(\d{{8,}})({re.escape(REPLACED)})?", folder.name)
    return int(match[1]) if match else None


def list_checkpoints(run: Path) -> list[Path]:
    """List the whole checkpoints of a run, oldest first."""
    # A kill in the middle of a rewrite leaves the old folder, whole, under its aside name.
    aside = {step_of(path): path for path in run.glob(f".step-*{REPLACED}")}
    named = {step_of(path): path for path in run.glob("step-*") if path.is_dir()}
    found = {step: path for step, path in (aside | named).items() if step is not None}
    return [found[step] for step in sorted(found)]


def find_latest(run: Path) -> Path | None:
    """Find the checkpoint with the highest step, or nothing to resume from."""
    return next(reversed(list_checkpoints(run)), None)


def read_training_state(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the tensors and scalars given to `write_checkpoint`; the scalars also hold `step`."""
    record = _read_json(folder / STATE_SCALARS)
    with _open_tensors(folder / STATE_TENSORS) as file:
        step = (file.metadata() or {}).get("step")
        tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
    if (record.get("format"), record.get("n_tensors")) != (FORMAT, len(tensors)) or (
        step != str(record.get("step"))
    ):
        problem = f"does not belong to the {STATE_TENSORS} beside it"
        raise InputError(problem, file=folder / STATE_SCALARS, fix="resume from another checkpoint")
    return tensors, {**record["scalars"], "step": record["step"]}


def mark_best(run: Path, step: int, score: float) -> None:
    """Record which checkpoint is the best so far; call it after that checkpoint is written."""
    with write_atomically(run / BEST) as stream:
        stream.write(json.dumps({"step": step, "score": score}) + "\n")


def read_best(run: Path) -> tuple[int, float] | None:
    """Read the step marked best and its score."""
    if not (run / BEST).exists():
        return None
    record = _read_json(run / BEST)
    try:
        return int(record["step"]), float(record["score"])
    except (KeyError, TypeError, ValueError) as error:
        raise InputError("names no step and score", file=run / BEST, fix="delete it") from error


def forget_lost_best(run: Path) -> None:
    """Drop the mark of a best checkpoint that was removed: none to come could be measured by it."""
    best = read_best(run)
    if best is not None and best[0] not in map(step_of, list_checkpoints(run)):
        (run / BEST).unlink()


def average_weights(folders: Sequence[Path]) -> dict[str, Tensor]:
    """Average the weights of several checkpoints, read memory-mapped and tensor by tensor.

    Sums run in float32 at least and come back in the stored type; integer buffers are those
    of the last folder. Tied weights are stored once: load with `strict=False`.
    """
    if not folders:
        raise InputError("no checkpoint to average", fix="write at least one")
    files = [folder / MODEL_TENSORS for folder in folders]
    shapes = [_read_shapes(file) for file in files]
    for file, shape in zip(files, shapes, strict=True):
        if shape != shapes[-1]:
            problem = f"has other tensors or shapes than {files[-1]}"
            raise InputError(problem, file=file, fix="average checkpoints of one run")
    return {name: _average_tensor(files, name) for name in shapes[-1]}


def _fill(
    draft: Path,
    step: int,
    save_model: Callable[[Path], object],
    tensors: Mapping[str, Tensor],
    scalars: Mapping[str, Any],
) -> None:
    """Write a checkpoint's files."""
    save_model(draft)
    save_file(_separate(tensors), draft / STATE_TENSORS, metadata={"step": str(step)})
    record = {"format": FORMAT, "step": step, "n_tensors": len(tensors), "scalars": dict(scalars)}
    (draft / STATE_SCALARS).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _prune(run: Path, keep: int, protected: set[int]) -> None:
    """Drop all but the newest checkpoints, the best one and the protected ones."""
    best = read_best(run)
    protected = protected if best is None else protected | {best[0]}
    for folder in list_checkpoints(run)[:-keep]:
        if step_of(folder) not in protected:
            _discard(folder)


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to the CPU, apart from each other: safetensors stores no shared memory."""
    seen: set[int] = set()
    apart = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        address = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if address in seen else tensor
        seen.add(address)
    return apart


def _read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object, or say what is wrong with the file."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError("is missing", file=file, fix="is this a checkpoint?") from error
    except (OSError, ValueError) as error:
        raise InputError(f"cannot be read as JSON: {error}", file=file) from error
    if not isinstance(record, dict):
        raise InputError("holds no JSON object", file=file)
    return record


@contextmanager
def _open_tensors(file: Path) -> Iterator[Any]:
    """Open a safetensors file memory-mapped, or say what is wrong with it."""
    if not file.is_file():
        raise InputError("is missing", file=file, fix="is this a checkpoint?")
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (OSError, SafetensorError) as error:
        fix = "resume from another checkpoint"
        raise InputError(f"{_diagnose(file)}: {error}", file=file, fix=fix) from error


def _diagnose(file: Path) -> str:
    """Tell a pickle from a damaged file by its first bytes."""
    with file.open("rb") as stream:
        start = stream.read(2)
    if start[:1] == b"\x80" or start == b"PK":
        return "is a pickle, which can run code, not safetensors"
    return "is truncated or not safetensors"


def _read_shapes(file: Path) -> dict[str, tuple[str, list[int]]]:
    """Read the type and shape of every tensor in a file, and no tensor."""
    with _open_tensors(file) as opened:
        slices = {name: opened.get_slice(name) for name in sorted(opened.keys())}
        return {name: (cut.get_dtype(), cut.get_shape()) for name, cut in slices.items()}


def _average_tensor(files: Sequence[Path], name: str) -> Tensor:
    """Average one tensor over several files."""
    total: Tensor | None = None
    for file in files:
        with _open_tensors(file) as opened:
            tensor: Tensor = opened.get_tensor(name)
        if tensor.is_floating_point():
            wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
            total = wide if total is None else total + wide
    return tensor.clone() if total is None else (total / len(files)).to(tensor.dtype)


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


PREFIX = "average."


class WeightAverage:
    """Keeps what a recipe's `average` asks for; without one it does nothing."""

    def __init__(self, recipe: Recipe) -> None:
        self.settings = recipe.average
        self.every, self.n_steps = recipe.checkpoints.every, recipe.schedule.steps
        self.shadow: dict[str, Tensor] = {}
        self._update: Any = get_ema_multi_avg_fn(self.settings.decay)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        """Take the weights after a step into the running average; it begins with the first."""
        if self.settings.kind != "ema":
            return
        current = dict(module.named_parameters())
        if not self.shadow:
            self.shadow = {name: value.detach().clone() for name, value in current.items()}
            return
        names = list(self.shadow)
        self._update([self.shadow[n] for n in names], [current[n] for n in names], 0)

    def tensors(self) -> dict[str, Tensor]:
        """Give what a checkpoint must keep; where weights are sharded, on every process."""
        return {PREFIX + name: gather_tensor(value) for name, value in self.shadow.items()}

    def restore(self, tensors: Mapping[str, Tensor], module: nn.Module) -> None:
        """Take back what `tensors` gave, on the devices and in the shards of the module."""
        if self.settings.kind == "ema":
            self.shadow = {
                name: _lay_out_like(tensors[PREFIX + name], value.detach())
                for name, value in module.named_parameters()
            }

    def pinned(self, run: Path) -> set[int]:
        """Name the steps that a last-k average needs beside the one about to be saved."""
        if self.settings.kind != "last":
            return set()
        return set(self._choose_steps(run)[1 - self.settings.last :])

    def result(self, run: Path) -> dict[str, Tensor]:
        """Give the averaged weights of the encoder, by their names in `Encoder.model`."""
        if self.settings.kind == "ema":
            whole = {name: gather_tensor(value) for name, value in self.shadow.items()}
            return {name.removeprefix("model."): value for name, value in whole.items()}
        steps = self._choose_steps(run)[-self.settings.last :]
        return average_weights([folder_of(run, step) for step in steps])

    def _choose_steps(self, run: Path) -> list[int]:
        """List the regular checkpoints; those that an interruption left do not count."""
        steps = [step_of(folder) or 0 for folder in list_checkpoints(run)]
        return [step for step in steps if step % self.every == 0 or step == self.n_steps]


def _lay_out_like(whole: Tensor, value: Tensor) -> Tensor:
    """Copy a whole tensor to where a live one lies, cut as that one is cut."""
    if isinstance(value, DTensor):
        return distribute_tensor(whole.to(value.device), value.device_mesh, value.placements)
    return torch.empty_like(value).copy_(whole)
