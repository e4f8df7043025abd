"""A run's state on disk: gathering it from all processes, putting it back, and the finished model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from calque.text.streams import Place
from calque.training import checkpoints
from calque.types import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from calque.training.loop import Trainer

HEADS = "objectives."
ENCODER = "encoder.model."


def save_run(trainer: Trainer) -> None:
    """Write a checkpoint; all processes take part in gathering it, the main one writes."""
    tensors, scalars = checkpoints.flatten_optimizer(trainer.wrapped, trainer.optimizer)
    trainer.places = furthest_places(trainer)
    state = gather_weights(trainer)
    if trainer.accelerator.is_main_process:
        heads = {
            HEADS + name: value for name, value in trainer.module.objectives.state_dict().items()
        }
        record = {
            "recipe": trainer.recipe.fingerprint(),
            "places": [place.to_dict() for place in trainer.places],
        }
        checkpoints.write_checkpoint(
            trainer.folder,
            trainer.step,
            lambda folder: trainer.encoder.save(folder, state=state),
            tensors | trainer.average.tensors() | heads,
            scalars | record,
            trainer.recipe.checkpoints.keep,
            trainer.average.pinned(trainer.folder, trainer.step),
        )
        if trainer.best_score is not None:
            checkpoints.mark_best(trainer.folder, trainer.step, trainer.best_score)
    trainer.best_score = None
    trainer.accelerator.wait_for_everyone()


def restore_run(trainer: Trainer) -> None:
    """Go back to the newest checkpoint: weights, moments, averages, places in the streams."""
    folder = checkpoints.find_latest(trainer.folder)
    if folder is None:
        raise InputError("no checkpoint to resume from", file=trainer.folder, fix="drop --resume")
    tensors, scalars = checkpoints.read_training_state(folder)
    if scalars["recipe"] != trainer.recipe.fingerprint():
        raise InputError(
            "this run was made with another recipe",
            file=folder,
            fix="resume with the recipe.yaml in the run's folder, or train into another",
        )
    load_weights(trainer, checkpoints.average_weights([folder]))
    checkpoints.restore_optimizer(trainer.wrapped, trainer.optimizer, tensors, scalars)
    trainer.average.restore(tensors)
    heads = {k.removeprefix(HEADS): v for k, v in tensors.items() if k.startswith(HEADS)}
    trainer.module.objectives.load_state_dict(heads)
    trainer.step = scalars["step"]
    trainer.places = [Place(**place) for place in scalars["places"]]


def finish_run(trainer: Trainer) -> Path:
    """Write the finished model: the last, the best or the averaged weights."""
    trainer.accelerator.wait_for_everyone()
    settings = trainer.recipe.checkpoints
    best = checkpoints.read_best(trainer.folder)
    if settings.final == "best" and best is not None:
        folder = checkpoints.folder_of(trainer.folder, best[0])
        load_weights(trainer, checkpoints.average_weights([folder]))
    elif trainer.recipe.average.kind != "none":
        trainer.average.apply(trainer.encoder, trainer.folder, prefix="model.")
    state, out = gather_weights(trainer), trainer.folder / "model"
    if trainer.accelerator.is_main_process:
        dtype: torch.dtype = getattr(torch, settings.dtype)
        trainer.encoder.save(out, state=state, dtype=dtype)
    trainer.accelerator.wait_for_everyone()
    return out


def furthest_places(trainer: Trainer) -> list[Place]:
    """Give the places after the last batch any process has taken: where a resumed run begins."""
    everyone: list[list[dict[str, int]]] = gather_object(
        [[place.to_dict() for place in trainer.places]]
    )
    return [
        Place(**max(places, key=lambda place: place["count"]))
        for places in zip(*everyone, strict=True)
    ]


def gather_weights(trainer: Trainer) -> dict[str, Tensor] | None:
    """Collect sharded weights under Hugging Face's names; None where nothing is sharded."""
    if trainer.recipe.engine.distributed != "fsdp":
        return None
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole: dict[str, Any] = dict(get_model_state_dict(trainer.wrapped, options=options))
    tied = set(getattr(trainer.encoder.model, "all_tied_weights_keys", None) or ())
    return {
        name.removeprefix(ENCODER): value
        for name, value in whole.items()
        if name.startswith(ENCODER) and name.removeprefix(ENCODER) not in tied
    }


def load_weights(trainer: Trainer, state: dict[str, Tensor]) -> None:
    """Put saved weights into the model, sharded or not."""
    from torch.distributed.checkpoint.state_dict import set_model_state_dict

    options = StateDictOptions(full_state_dict=True, strict=False)
    named = {ENCODER + name: value for name, value in state.items()}
    set_model_state_dict(trainer.wrapped, named, options=options)
