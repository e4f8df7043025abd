"""The parts of one run: recipe, text, encoder, objectives, engine, and how far it has come.

A run's state on disk: gathered from all processes, put back, and the finished model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate.utils import gather_object
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

from calque.errors import InputError
from calque.io.files import write_atomically
from calque.io.outputs import write_folder
from calque.objectives import build_objective
from calque.objectives.base import Marks
from calque.tokens.streams import BatchStream, Place, load_batches, seed_of
from calque.training import checkpoints
from calque.training.checkpoints import WeightAverage, flatten_optimizer, restore_optimizer
from calque.training.data import open_stream
from calque.training.start import build_encoder, make_accelerator, open_text
from calque.training.step import (
    TrainStep,
    Watch,
    build_optimizer,
    find_trained,
    freeze,
    name_objectives,
)

if TYPE_CHECKING:
    from torch import Tensor

    from calque.objectives import Objective
    from calque.tokens.ragged import Ragged
    from calque.training.recipe import Recipe

    Loaders = list[Iterator[tuple[Place, Any]]]


class Run:
    """One run of one recipe.

    `module` computes a step, and `wrapped` is the same spread over the processes.
    """

    def __init__(self, recipe: Recipe, text: Path, folder: Path) -> None:
        prepared, tokenizer = open_text(text)
        self.recipe, self.folder = recipe, folder
        self.encoder = build_encoder(recipe, tokenizer)
        self.accelerator = make_accelerator(recipe, self.encoder)
        objectives = self._build_objectives()
        self.names = name_objectives(objectives)
        self.module = TrainStep(self.encoder, objectives).train()
        if recipe.freeze_steps is None:
            freeze(self.module, recipe.freeze)
        self.module.to(self.accelerator.device)
        self.streams = [
            open_stream(
                objective,
                prepared,
                text,
                recipe.data,
                Marks.of(tokenizer),
                seed=seed_of(recipe.seed, number),
                fixed_shape=self.compiles,
            )
            for number, objective in enumerate(objectives)
        ]
        for objective, pair in zip(objectives, self.streams, strict=True):
            objective.start(self.encoder, pair.languages)
            objective.fit(self.encoder, Marks.of(tokenizer), _read_examples(pair.training))
        self.judges = self._choose_judges()
        self.text = [[*corpus.languages, *corpus.n_tokens] for corpus in prepared]
        self.average = WeightAverage(recipe)
        self.faults = self._find_faults(objectives)
        self.wrapped, self.optimizer = self.accelerator.prepare(
            self.module, build_optimizer(self.module, recipe.optimizer)
        )
        self.step, self.places = 0, [Place() for _ in objectives]
        self.hold()
        self.watch = Watch(self.accelerator)
        self.best_score: float | None = None

    @property
    def objectives(self) -> list[Objective]:
        """Give the objectives in the recipe's order."""
        return [cast("Objective", objective) for objective in self.module.objectives]

    def hold(self) -> None:
        """Freeze what is frozen for a time, or let it go when that is over.

        It is part of the optimizer and of what processes share from the beginning.
        """
        if self.recipe.freeze_steps is None:
            return
        freeze(self.module, self.recipe.freeze, free=self.step >= self.recipe.freeze_steps)
        find_trained(self.module)
        if self.compiles and self.step == self.recipe.freeze_steps:
            torch.compiler.reset()  # PyTorch 2.11 would go on without gradients of what was frozen

    @property
    def on_cpu(self) -> bool:
        """Whether there is no GPU to wait for."""
        return bool(self.accelerator.device.type == "cpu")

    @property
    def compiles(self) -> bool:
        """Whether steps are compiled: on a GPU unless the recipe says otherwise."""
        wish = self.recipe.engine.compile
        return not self.on_cpu if wish == "auto" else wish

    def compile_step(self) -> None:
        """Make steps fast where `compiles` says so; the first ones then take a minute."""
        if self.compiles:
            # FSDP gathers a layer's weights when that layer is called, so its layers stay whole.
            self.encoder.fuses = not self.accelerator.is_fsdp2 and self.encoder.can_fuse
            self.module.compile_objectives()

    @property
    def n_micro(self) -> int:
        """Count the micro-batches of a step, those of all processes together."""
        return self.recipe.engine.accumulation * int(self.accelerator.num_processes)

    @cached_property
    def validation_batches(self) -> list[list[Any]]:
        """Batches of all objectives, None for one without text; none at all if none has any."""
        streams = [pair.validation for pair in self.streams]
        walks = [stream and stream.walk(Place(), lambda number: True) for stream in streams]
        n_batches = self.recipe.checkpoints.validation_batches if any(walks) else 0
        return [[walk and next(walk)[1] for walk in walks] for _ in range(n_batches)]

    def identity(self) -> dict[str, Any]:
        """Give what a resumed run must share with the run it resumes, each with its name."""
        return {
            "recipe": self.recipe.fingerprint(),
            "text": self.text,
            "micro-batches a step": self.n_micro,
        }

    def _build_objectives(self) -> list[Objective]:
        """Make the objectives, with weights drawn from the recipe's seed where they have some."""
        objectives = [build_objective(settings) for settings in self.recipe.objectives]
        for number, objective in enumerate(objectives):
            generator = torch.Generator().manual_seed(seed_of(self.recipe.seed, number, 0))
            objective.add_weights(self.encoder.hidden_size, generator)
        return objectives

    def _choose_judges(self) -> list[str]:
        """Name the objectives whose validation losses decide which weights are best."""
        judges = self.recipe.checkpoints.best_by or self.names
        unknown = sorted(set(judges) - set(self.names))
        if unknown:
            raise InputError(
                f"checkpoints.best_by: no objective is called {unknown[0]}",
                fix=f"choose from {', '.join(self.names)}",
            )
        with_text = [n for n, pair in zip(self.names, self.streams, strict=True) if pair.validation]
        if self.recipe.checkpoints.final == "best" and not set(judges) & set(with_text):
            raise InputError(
                "checkpoints.final=best, but no text is kept for validation",
                fix="raise data.validation_examples, give more text, or take the last",
            )
        return judges

    def _find_faults(self, objectives: Sequence[Objective]) -> list[str]:
        """Let each objective look at its first examples; a run that goes on has been told."""
        if checkpoints.find_latest(self.folder) is not None:
            return []
        marks = Marks.of(self.encoder.tokenizer)
        found = [
            objective.find_fault(self.encoder, marks, _read_examples(pair.training))
            for objective, pair in zip(objectives, self.streams, strict=True)
        ]
        return [f"{name}: {fault}" for name, fault in zip(self.names, found, strict=True) if fault]

    def _open_loaders(self) -> Loaders:
        """Open every stream at its place; this process gets its share of the batches."""
        workers = self.recipe.engine.workers
        return [
            load_batches(
                pair.training,
                place=place,
                rank=self.accelerator.process_index,
                n_ranks=self.accelerator.num_processes,
                n_workers=(0 if self.on_cpu else 2) if workers == "auto" else workers,
                pin_memory=not self.on_cpu,
            )
            for pair, place in zip(self.streams, self.places, strict=True)
        ]


def _read_examples(stream: BatchStream[Any]) -> Iterator[tuple[Ragged, ...]]:
    """Give the examples of a stream's batches as they are before collation."""
    bare = BatchStream(stream.corpora, stream.plan, lambda sides, generator: sides, stream.seed)
    bare.numbers = stream.numbers  # those who need languages get their numbers here, too
    for _, sides in bare.walk(Place(), lambda number: True):
        assert sides is not None  # all are wanted
        yield sides


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

        write_folder(out, write)
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
