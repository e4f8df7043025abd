"""A run's state on disk: gathered from all processes, put back, and the finished model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

from calque.text.files import write_atomically
from calque.text.streams import Place
from calque.training import checkpoints
from calque.training.optimizer_state import flatten_optimizer, restore_optimizer
from calque.types import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from calque.training.run import Run

HEADS = "objectives."
ENCODER = "encoder.model."
FIXES = {
    "recipe": "resume with the recipe.yaml in the run's folder, or train into another",
    "text": "give the --prepared text of that run",
    "micro-batches a step": "set engine.accumulation so that, times the processes, it is as before",
}


def begin_run(run: Run) -> None:
    """Make the run's folder on the main process, with its recipe, when all are ready."""
    run.accelerator.wait_for_everyone()
    if run.accelerator.is_main_process:
        run.folder.mkdir(parents=True, exist_ok=True)
        checkpoints.forget_lost_best(run.folder)
        with write_atomically(run.folder / "recipe.yaml") as stream:
            stream.write(run.recipe.to_yaml())


def save_run(run: Run) -> None:
    """Write a checkpoint; all processes take part in gathering it, the main one writes."""
    tensors, scalars = flatten_optimizer(run.wrapped, run.optimizer)
    tensors |= run.average.tensors()
    encoder, heads = gather_weights(run)
    record = run.identity() | gather_progress(run)
    if run.accelerator.is_main_process:
        checkpoints.write_checkpoint(
            run.folder,
            run.step,
            lambda folder: run.encoder.save(folder, state=encoder),
            tensors | heads,
            scalars | record,
            run.recipe.checkpoints.keep,
            run.average.pinned(run.folder),
        )
        if run.best_score is not None:
            checkpoints.mark_best(run.folder, run.step, run.best_score)
    run.best_score = None
    run.accelerator.wait_for_everyone()


def restore_run(run: Run) -> None:
    """Go back to the newest checkpoint: weights, moments, averages, places in the streams."""
    folder = checkpoints.list_checkpoints(run.folder)[-1]
    tensors, scalars = checkpoints.read_training_state(folder)
    for name, value in run.identity().items():
        if scalars.get(name, value) != value:
            raise InputError(f"this run was made with another {name}", file=folder, fix=FIXES[name])
    heads = {name: value for name, value in tensors.items() if name.startswith(HEADS)}
    load_weights(run, checkpoints.average_weights([folder]), heads)
    run.step = scalars["step"]
    run.hold()
    restore_optimizer(run.wrapped, run.optimizer, tensors, scalars)
    run.average.restore(tensors, run.encoder)
    run.places = [Place(**place) for place in scalars["places"]]
    if run.accelerator.is_main_process:
        run.watch.n_tokens = scalars.get("tokens", 0)


def finish_run(run: Run) -> Path:
    """Write the finished model: the last, the best or the averaged weights."""
    run.accelerator.wait_for_everyone()
    settings = run.recipe.checkpoints
    best = checkpoints.read_best(run.folder)
    if settings.final == "best" and best is not None:
        load_weights(run, checkpoints.average_weights([checkpoints.folder_of(run.folder, best[0])]))
    elif run.recipe.average.kind != "none":
        load_weights(run, run.average.result(run.folder))
    state, _ = gather_weights(run)
    out = run.folder / "model"
    if run.accelerator.is_main_process:
        dtype: torch.dtype = getattr(torch, settings.dtype)

        def write(folder: Path) -> None:
            run.encoder.publish(folder, state=state, dtype=dtype)
            for objective in run.objectives:
                objective.save_beside(run.encoder, folder)

        checkpoints.write_folder(out, write)
    run.accelerator.wait_for_everyone()
    return out


def gather_progress(run: Run) -> dict[str, Any]:
    """Say where a resumed run begins: after the last batch that any process has taken."""
    mine = {"places": [place.to_dict() for place in run.places], "tokens": run.watch.n_tokens}
    everyone: list[dict[str, Any]] = gather_object([mine])
    streams = zip(*(one["places"] for one in everyone), strict=True)
    return {
        "places": [max(places, key=lambda place: place["count"]) for places in streams],
        "tokens": sum(one["tokens"] for one in everyone),
    }


def gather_weights(run: Run) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Collect the encoder's weights under Hugging Face's names, and those of the objectives.

    Where weights are sharded, every process must take part, and the main one gets them.
    """
    if run.accelerator.is_fsdp2:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        whole: dict[str, Any] = dict(get_model_state_dict(run.wrapped, options=options))
    else:
        whole = dict(run.module.state_dict())
    tied = set(getattr(run.encoder.model, "all_tied_weights_keys", None) or ())
    named = {
        name.removeprefix(ENCODER): value
        for name, value in whole.items()
        if name.startswith(ENCODER)
    }
    encoder = {name: value for name, value in named.items() if name not in tied}
    return encoder, {name: value for name, value in whole.items() if name.startswith(HEADS)}


def load_weights(
    run: Run, encoder: dict[str, Tensor], heads: dict[str, Tensor] | None = None
) -> None:
    """Put saved weights into the model, sharded or not."""
    named: dict[str, Any] = {ENCODER + name: value for name, value in encoder.items()}
    named |= heads or {}
    options = StateDictOptions(full_state_dict=True, strict=False)
    set_model_state_dict(run.wrapped, named, options=options)
