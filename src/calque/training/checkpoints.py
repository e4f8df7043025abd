"""Checkpoints that survive a kill: plain Hugging Face folders plus what training needs to go on.

A run folder holds `step-00000500/`, each with the files of `save_model` (config.json,
model.safetensors, tokenizer), `training_state.safetensors` (every tensor of the optimizer and
the averages) and `training_state.json` (step, data position, recipe hash, …). No pickle.

    write_checkpoint(run, step, save_model, tensors, scalars, keep=3)     # on one process
    tensors, scalars = read_training_state(find_latest(run))              # on every process
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from calque.text.files import write_atomically
from calque.types import InputError

STATE_TENSORS = "training_state.safetensors"
STATE_SCALARS = "training_state.json"
MODEL_TENSORS = "model.safetensors"
BEST = "best.json"
FORMAT = 1

# Hidden siblings of a checkpoint: being written, stepped aside for a rewrite, being removed.
PARTIAL, REPLACED, DELETED = ".partial", ".replaced", ".deleted"


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


def write_folder(final: Path, fill: Callable[[Path], object]) -> None:
    """Write a folder whole or not at all; one of that name is replaced in the end."""
    draft = _hidden(final, PARTIAL)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        _clear_leftovers(final.parent)
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        fill(draft)
        for path in (*draft.rglob("*"), draft):
            _sync(path)
        _publish(draft, final)
    except (OSError, SafetensorError) as error:
        fix = "free some space or choose another run folder; older checkpoints are intact"
        raise InputError(f"cannot be written: {error}", file=final, fix=fix) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


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


def _publish(draft: Path, final: Path) -> None:
    """Give a written folder its name; an older one of that name steps aside first."""
    aside = _hidden(final, REPLACED)
    if final.exists():
        final.rename(aside)
    draft.rename(final)
    _sync(final.parent)
    if aside.exists():
        _discard(aside)


def _clear_leftovers(run: Path) -> None:
    """Remove what a killed process left, and put back a folder that it had moved aside."""
    for leftover in run.glob(".step-*.*"):
        final = run / leftover.stem.removeprefix(".")
        if leftover.suffix == REPLACED and not final.exists():
            leftover.rename(final)
        else:
            _discard(leftover)


def _prune(run: Path, keep: int, protected: set[int]) -> None:
    """Drop all but the newest checkpoints, the best one and the protected ones."""
    best = read_best(run)
    protected = protected if best is None else protected | {best[0]}
    for folder in list_checkpoints(run)[:-keep]:
        if step_of(folder) not in protected:
            _discard(folder)


def _discard(folder: Path) -> None:
    """Remove a folder; it is hidden first, so a kill never leaves half of it in view."""
    doomed = folder
    if folder.suffix not in (PARTIAL, DELETED):
        doomed = _hidden(folder, DELETED)
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _hidden(folder: Path, suffix: str) -> Path:
    """Name the hidden sibling of a checkpoint folder."""
    return folder.with_name(f".{folder.stem.removeprefix('.')}{suffix}")


def _sync(path: Path) -> None:
    """Wait until a file or a folder has reached the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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
