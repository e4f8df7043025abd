"""Checkpoints: crash-safe Hugging Face folders that also contain the state of training.

A run folder contains `step-00000500/`, each with the files of the model (config.json,
model.safetensors, tokenizer), `training_state.safetensors` (all tensors of the optimizer, the
objectives and the averages) and `training_state.json` (step, validation score, stream positions,
recipe hash, … and the checksums of all files). Nothing is pickled.

    write_checkpoint(run, step, save_model, tensors, scalars, keep=3)     # on one process
    tensors, scalars = read_training_state(find_latest(run))              # on every process
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from calque.errors import InputError
from calque.io.checksums import check_files, describe_files, format_record, read_record
from calque.io.locks import remove_folder
from calque.io.outputs import write_folder
from calque.training.distributed import gather_tensor

if TYPE_CHECKING:
    from calque.training.recipe import Recipe


STATE_TENSORS = "training_state.safetensors"
STATE_SCALARS = "training_state.json"
MODEL_TENSORS = "model.safetensors"
FORMAT = 2
# Prefix of the averaged weights in a checkpoint.
AVERAGE = "average."


def write_checkpoint(
    run: Path,
    step: int,
    save_model: Callable[[Path], object],
    tensors: Mapping[str, Tensor],
    scalars: Mapping[str, Any],
    keep: int,
    pinned: Collection[int] = (),
    score: float | None = None,
    *,
    is_extra: bool = False,
) -> Path:
    """Write one checkpoint completely or not at all, then delete all but the newest `keep`.

    `save_model` writes the model into the folder it is given, and `score` is the model's validation
    loss. The best checkpoint and the `pinned` steps (which an average of the last checkpoints
    needs) are never deleted. An extra checkpoint, of an interruption, does not count, and is
    deleted when a newer one is written. Call it on one process only.
    """
    if keep < 1:
        raise InputError(f"keep={keep} would delete every checkpoint", fix="keep at least 1")

    def fill(draft: Path) -> None:
        save_model(draft)
        save_file(_without_shared_memory(tensors), draft / STATE_TENSORS)
        record = {"format": FORMAT, "step": step, "score": score, "is_extra": is_extra}
        content = format_record(
            {**record, "scalars": dict(scalars), "files": describe_files(draft)}
        )
        (draft / STATE_SCALARS).write_text(content, encoding="utf-8")

    folder = folder_of(run, step)
    write_folder(folder, fill, fix="free some space; earlier checkpoints are intact")
    best = read_best(run)
    regular = [each["step"] for each in _read_records(run) if not each["is_extra"]]
    kept = {step, *pinned, *regular[-keep:]} | (set() if best is None else {best[0]})
    for older in list_checkpoints(run):
        if step_of(older) not in kept:
            remove_folder(older)
    return folder


def read_training_state(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and scalars that `write_checkpoint` wrote; the scalars include `step`.

    All files of the checkpoint are verified, also those of the model.
    """
    record = verify_checkpoint(folder)
    with _open_tensors(folder / STATE_TENSORS) as file:
        tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
    return tensors, {**record["scalars"], "step": record["step"]}


def verify_checkpoint(folder: Path, *, only_record: bool = False) -> dict[str, Any]:
    """Verify the checksums of a checkpoint and return its record, the content of its JSON file.

    Raises:
        InputError: A file is damaged; the message says which checkpoint can be used instead.
    """
    try:
        record = _read_record(folder)
        check_files(folder, {} if only_record else record["files"])
    except InputError as error:
        raise InputError(error.problem, file=error.file, fix=_find_fix(folder)) from error
    return record


def folder_of(run: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint, whether or not it exists.

    >>> folder_of(Path("run"), 500).name
    'step-00000500'
    """
    return run / f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """Return the step in the name of a checkpoint's folder, or None for any other folder."""
    match = re.fullmatch(r"step-(\d{8,})", folder.name)
    return int(match[1]) if match else None


def list_checkpoints(run: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first."""
    found = {step_of(path): path for path in run.glob("step-*") if path.is_dir()}
    return [found[step] for step in sorted(step for step in found if step is not None)]


def find_latest(run: Path) -> Path | None:
    """Return the checkpoint with the highest step, or None if there is none."""
    return next(reversed(list_checkpoints(run)), None)


def read_best(run: Path) -> tuple[int, float] | None:
    """Return the step and the score of the checkpoint with the lowest score, or None."""
    scored = [record for record in _read_records(run) if record["score"] is not None]
    best = min(scored, key=lambda record: record["score"], default=None)
    return None if best is None else (best["step"], best["score"])


def average_weights(folders: Sequence[Path]) -> dict[str, Tensor]:
    """Return the mean weights of several checkpoints, read memory-mapped and tensor by tensor.

    Sums are computed in float32 at least and converted to the stored type; integer buffers are
    those of the last folder. Tied weights are stored once: load the result with `strict=False`.
    """
    if not folders:
        raise InputError("there is no checkpoint to average", fix="write at least one")
    files = [folder / MODEL_TENSORS for folder in folders]
    shapes = [_read_shapes(file) for file in files]
    for file, shape in zip(files, shapes, strict=True):
        if shape != shapes[-1]:
            problem = f"the tensors differ from those of {files[-1]}"
            raise InputError(problem, file=file, fix="average checkpoints of one run")
    return {name: _average_tensor(files, name) for name in shapes[-1]}


class WeightAverage:
    """The averaged weights that a recipe's `average` asks for, if any."""

    def __init__(self, recipe: Recipe) -> None:
        self.settings = recipe.average
        self.every, self.n_steps = recipe.checkpoints.every, recipe.schedule.steps
        self.ema: dict[str, Tensor] = {}
        self._update: Any = get_ema_multi_avg_fn(self.settings.decay)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        """Update the exponential moving average after a step; it starts with the first weights."""
        if self.settings.kind != "ema":
            return
        current = dict(module.named_parameters())
        if not self.ema:
            self.ema = {name: value.detach().clone() for name, value in current.items()}
            return
        names = list(self.ema)
        self._update([self.ema[n] for n in names], [current[n] for n in names], 0)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors for a checkpoint; with sharded weights, call it on every process."""
        return {AVERAGE + name: gather_tensor(value) for name, value in self.ema.items()}

    def restore(self, tensors: Mapping[str, Tensor], module: nn.Module) -> None:
        """Restore what `tensors` returned, on the devices and in the shards of the module."""
        if self.settings.kind == "ema":
            self.ema = {
                name: _distribute_like(tensors[AVERAGE + name], value.detach())
                for name, value in module.named_parameters()
            }

    def pinned(self, run: Path) -> set[int]:
        """Return the steps that an average of the last checkpoints needs besides the next one."""
        if self.settings.kind != "last":
            return set()
        return set(self._regular_steps(run)[1 - self.settings.last :])

    def result(self, run: Path) -> dict[str, Tensor]:
        """Return the averaged weights of the encoder, by their names in `Encoder.model`."""
        if self.settings.kind == "ema":
            weights = {name: gather_tensor(value) for name, value in self.ema.items()}
            return {name.removeprefix("model."): value for name, value in weights.items()}
        folders = [folder_of(run, step) for step in self._regular_steps(run)[-self.settings.last :]]
        for folder in folders:
            verify_checkpoint(folder)
        return average_weights(folders)

    def _regular_steps(self, run: Path) -> list[int]:
        """Return the steps of the regular checkpoints, without those of interruptions."""
        steps = [step_of(folder) or 0 for folder in list_checkpoints(run)]
        return [step for step in steps if step % self.every == 0 or step == self.n_steps]


def _distribute_like(tensor: Tensor, value: Tensor) -> Tensor:
    """Copy a tensor to the device of another one, sharded in the same way."""
    if isinstance(value, DTensor):
        return distribute_tensor(tensor.to(value.device), value.device_mesh, value.placements)
    return torch.empty_like(value).copy_(tensor)


def _without_shared_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to the CPU; safetensors does not store tensors that share memory."""
    seen: set[int] = set()
    copies = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        address = tensor.untyped_storage().data_ptr()
        copies[name] = tensor.clone() if address in seen else tensor
        seen.add(address)
    return copies


def _average_tensor(files: Sequence[Path], name: str) -> Tensor:
    total: Tensor | None = None
    for file in files:
        with _open_tensors(file) as opened:
            tensor: Tensor = opened.get_tensor(name)
        if tensor.is_floating_point():
            wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
            total = wide if total is None else total + wide
    return tensor.clone() if total is None else (total / len(files)).to(tensor.dtype)


def _read_shapes(file: Path) -> dict[str, tuple[str, list[int]]]:
    """Return the type and shape of every tensor in a file without reading the tensors."""
    with _open_tensors(file) as opened:
        slices = {name: opened.get_slice(name) for name in sorted(opened.keys())}
        return {name: (part.get_dtype(), part.get_shape()) for name, part in slices.items()}


@contextmanager
def _open_tensors(file: Path) -> Iterator[Any]:
    """Open a safetensors file memory-mapped; an InputError says what is wrong with it."""
    if not file.is_file():
        raise InputError("the file is missing", file=file, fix="pass a checkpoint's folder")
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (OSError, SafetensorError) as error:
        with file.open("rb") as stream:
            start = stream.read(2)
        is_pickle = start[:1] == b"\x80" or start == b"PK"
        problem = "a pickle, which can run code," if is_pickle else "truncated or"
        raise InputError(
            f"the file is {problem} not a safetensors file: {error}",
            file=file,
            fix="resume from another checkpoint",
        ) from error


def _read_records(run: Path) -> list[dict[str, Any]]:
    return [verify_checkpoint(folder, only_record=True) for folder in list_checkpoints(run)]


def _read_record(folder: Path) -> dict[str, Any]:
    record = read_record(folder / STATE_SCALARS)
    if record.get("format") != FORMAT or record.get("step") != step_of(folder):
        problem = "this is not the state of this checkpoint"
        raise InputError(problem, file=folder / STATE_SCALARS)
    return record


def _find_fix(damaged: Path) -> str:
    """Return how a run continues without a damaged checkpoint."""
    for folder in reversed(list_checkpoints(damaged.parent)):
        with suppress(InputError):
            if folder != damaged:
                check_files(folder, _read_record(folder)["files"])
                return f"delete the folder {damaged.name}; --resume then uses {folder.name}"
    return "no other checkpoint is intact, so train again into another folder"
