"""The state of a training run: everything that changes from step to step, saved and restored.

There is no saved random state: every batch, mask and dropout is drawn from the recipe's seed and
the number of the micro-batch, so a resumed run repeats exactly what an uninterrupted one draws.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
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
from calque.models.attention import MAX_ROW_LENGTH
from calque.objectives import build_objective
from calque.tokens.sampling import derive_seed
from calque.tokens.streams import BatchStream, StreamPosition, load_batches
from calque.tokens.tokenizer import SpecialTokens
from calque.training import checkpoints
from calque.training.checkpoints import WeightAverage
from calque.training.data import open_stream
from calque.training.optimizer import (
    build_optimizer,
    flatten_optimizer,
    freeze,
    freeze_first_rows,
    restore_optimizer,
    trainable_parameters,
)
from calque.training.sources import open_text
from calque.training.start import build_accelerator, build_encoder
from calque.training.step import TrainStep

if TYPE_CHECKING:
    from torch import Tensor

    from calque.objectives import Objective
    from calque.tokens.ragged import Ragged
    from calque.training.recipe import Recipe

    Loaders = list[Iterator[tuple[StreamPosition, Any]]]

# Prefixes of the weights of `TrainStep`.
ENCODER = "encoder.model."
OBJECTIVES = "objectives."
# What a resumed run must share with the original run, and what to do if it does not.
IDENTITY_FIXES = {
    "recipe": "resume with the recipe.yaml in the run's folder, or train into another folder",
    "text": "pass the text of that run with --prepared",
    "micro-batches a step": "set engine.accumulation so that, times the number of processes, it "
    "is the same as before",
}


class Run:
    """One run of one recipe, from the first step to the finished model.

    Attributes:
        module: The encoder and the objectives, which compute a step together.
        wrapped: The same module, distributed over the processes.
        optimizer: AdamW with its moments; the learning rate is a function of `step`.
        average: The exponential moving average of the weights, if the recipe asks for one.
        step: Number of finished optimizer steps.
        positions: Position in the training stream of every objective.
        n_new_tokens: Tokens that this process has trained on since metrics were last logged.
        score: Validation loss of the current weights, if it was computed and decides what is best.
    """

    def __init__(self, recipe: Recipe, text: Path, folder: Path) -> None:
        prepared, tokenizer = open_text(text)
        special_tokens = SpecialTokens.of(tokenizer)
        self.recipe, self.folder = recipe, folder
        self.encoder = build_encoder(recipe, tokenizer)
        self.accelerator = build_accelerator(recipe, self.encoder)
        objectives = self._build_objectives()
        self.module = TrainStep(self.encoder, objectives).train()
        self.names = self.module.names
        if recipe.freeze_steps is None:
            freeze(self.module, recipe.freeze)
        self.module.to(self.accelerator.device)
        if recipe.freeze_rows is not None:
            rows: Any = self.encoder.model.get_input_embeddings().weight
            freeze_first_rows(rows, recipe.freeze_rows, special_tokens.all_ids)
        self.streams = [
            open_stream(
                objective,
                prepared,
                text,
                recipe.data,
                special_tokens,
                seed=derive_seed(recipe.seed, number),
                fixed_shape=self._shares_rows(objective),
            )
            for number, objective in enumerate(objectives)
        ]
        for objective, pair in zip(objectives, self.streams, strict=True):
            objective.start(self.encoder, pair.languages)
            objective.fit(self.encoder, special_tokens, _read_examples(pair.training))
        self.best_by = self._check_best_by()
        self.text = [[*corpus.languages, *corpus.n_tokens] for corpus in prepared]
        self.average = WeightAverage(recipe)
        self.warnings = self._find_warnings()
        self.wrapped, self.optimizer = self.accelerator.prepare(
            self.module, build_optimizer(self.module, recipe.optimizer)
        )
        self.step, self.positions = 0, [StreamPosition() for _ in objectives]
        self.n_new_tokens = 0
        self.score: float | None = None
        self.apply_freeze()

    @property
    def objectives(self) -> list[Objective]:
        """The objectives in the recipe's order."""
        return [cast("Objective", objective) for objective in self.module.objectives]

    @property
    def is_finished(self) -> bool:
        """Whether all steps of the recipe are finished."""
        return self.step == self.recipe.schedule.steps

    @property
    def on_cpu(self) -> bool:
        """Whether training runs on the CPU."""
        return bool(self.accelerator.device.type == "cpu")

    @property
    def is_compiled(self) -> bool:
        """Whether steps are compiled: by default on a GPU."""
        setting = self.recipe.engine.compile
        return not self.on_cpu if setting == "auto" else setting

    def _shares_rows(self, objective: Objective) -> bool:
        """Whether sentences share rows of one length: needed to compile, and faster if short."""
        _, max_length = self.recipe.data.find_max_length(objective.settings)
        return self.is_compiled or max_length <= MAX_ROW_LENGTH

    @property
    def n_micro_batches(self) -> int:
        """Number of micro-batches per step, over all processes."""
        return self.recipe.engine.accumulation * int(self.accelerator.num_processes)

    @cached_property
    def validation_batches(self) -> list[list[Any]]:
        """Validation batches of all objectives (None where one has no text), the same every time.

        The list is empty if no objective has validation text.
        """
        streams = [pair.validation for pair in self.streams]
        start = StreamPosition()
        iterators = [stream and stream.iterate(start, lambda number: True) for stream in streams]
        n_batches = self.recipe.checkpoints.validation_batches if any(iterators) else 0
        return [[each and next(each)[1] for each in iterators] for _ in range(n_batches)]

    def compile_step(self) -> None:
        """Compile the objectives if `is_compiled`; the first steps then take about a minute."""
        if self.is_compiled:
            # PyTorch suggests less precision than the recipe's.
            warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")
            # FSDP gathers the weights of a layer when that layer is called, so layers stay whole.
            self.encoder.use_fused_layers = not self.accelerator.is_fsdp2 and self.encoder.can_fuse
            self.module.compile_objectives()

    def apply_freeze(self) -> None:
        """Freeze or unfreeze the weights that are frozen for the first `freeze_steps` steps.

        They belong to the optimizer, and to what processes share, from the beginning.
        """
        if self.recipe.freeze_steps is None:
            return
        freeze(self.module, self.recipe.freeze, undo=self.step >= self.recipe.freeze_steps)
        trainable_parameters(self.module)
        if self.is_compiled and self.step == self.recipe.freeze_steps:
            # PyTorch 2.11 would continue without gradients of the weights that were frozen.
            torch.compiler.reset()

    def open_loaders(self) -> Loaders:
        """Open every training stream at its position; this process gets its share of batches."""
        workers = self.recipe.engine.workers
        return [
            load_batches(
                pair.training,
                position=position,
                rank=self.accelerator.process_index,
                n_ranks=self.accelerator.num_processes,
                n_workers=(0 if self.on_cpu else 2) if workers == "auto" else workers,
                pin_memory=not self.on_cpu,
            )
            for pair, position in zip(self.streams, self.positions, strict=True)
        ]

    def take_new_tokens(self) -> int:
        """Return the number of tokens since the last call."""
        taken, self.n_new_tokens = self.n_new_tokens, 0
        return taken

    def create_folder(self) -> None:
        """Create the run's folder with its recipe, on the main process, when all are ready."""
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            self.folder.mkdir(parents=True, exist_ok=True)
            with write_atomically(self.folder / "recipe.yaml") as stream:
                stream.write(self.recipe.to_yaml())

    def save(self, *, is_extra: bool = False) -> None:
        """Write a checkpoint; all processes gather the state, and the main one writes it.

        An extra one is that of an interruption.
        """
        tensors, scalars = flatten_optimizer(self.wrapped, self.optimizer)
        tensors |= self.average.tensors()
        encoder, objectives = self.gather_weights()
        record = self._identity() | self._gather_progress()
        if self.accelerator.is_main_process:
            checkpoints.write_checkpoint(
                self.folder,
                self.step,
                lambda folder: self.encoder.save(folder, state=encoder),
                tensors | objectives,
                scalars | record,
                self.recipe.checkpoints.keep,
                self.average.pinned(self.folder),
                self.score,
                is_extra=is_extra,
            )
        self.accelerator.wait_for_everyone()

    def restore(self) -> None:
        """Restore the newest checkpoint: weights, optimizer, averages and stream positions."""
        folder = checkpoints.list_checkpoints(self.folder)[-1]
        tensors, scalars = checkpoints.read_training_state(folder)
        for name, value in self._identity().items():
            if scalars.get(name, value) != value:
                problem = f"the checkpoint was written with another value of: {name}"
                raise InputError(problem, file=folder, fix=IDENTITY_FIXES[name])
        objectives = {name: value for name, value in tensors.items() if name.startswith(OBJECTIVES)}
        self.load_weights(checkpoints.average_weights([folder]), objectives)
        self.step = scalars["step"]
        self.apply_freeze()
        restore_optimizer(self.wrapped, self.optimizer, tensors, scalars)
        self.average.restore(tensors, self.encoder)
        self.positions = [StreamPosition(**place) for place in scalars["places"]]
        if self.accelerator.is_main_process:
            self.n_new_tokens = scalars.get("tokens", 0)

    def finish(self) -> Path:
        """Write the finished model with the last, the best or the averaged weights."""
        self.accelerator.wait_for_everyone()
        settings = self.recipe.checkpoints
        best = checkpoints.read_best(self.folder) if settings.final == "best" else None
        if best is not None:
            folder = checkpoints.folder_of(self.folder, best[0])
            checkpoints.verify_checkpoint(folder)
            self.load_weights(checkpoints.average_weights([folder]))
        elif self.recipe.average.kind != "none":
            self.load_weights(self.average.result(self.folder))
        state, _ = self.gather_weights()

        def write(folder: Path) -> None:
            dtype: torch.dtype = getattr(torch, settings.dtype)
            self.encoder.publish(folder, state=state, dtype=dtype)
            for objective in self.objectives:
                objective.save_files(self.encoder, folder)

        model = self.folder / "model"
        if self.accelerator.is_main_process:
            write_folder(model, write)
        self.accelerator.wait_for_everyone()
        return model

    def gather_weights(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the encoder's weights by their Hugging Face names, and those of the objectives.

        Where weights are sharded, every process must take part, and the main one gets them.
        """
        if self.accelerator.is_fsdp2:
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            weights: dict[str, Any] = dict(get_model_state_dict(self.wrapped, options=options))
        else:
            weights = dict(self.module.state_dict())
        tied = set(getattr(self.encoder.model, "all_tied_weights_keys", None) or ())
        encoder = {
            name.removeprefix(ENCODER): value
            for name, value in weights.items()
            if name.startswith(ENCODER) and name.removeprefix(ENCODER) not in tied
        }
        return encoder, {name: v for name, v in weights.items() if name.startswith(OBJECTIVES)}

    def load_weights(
        self, encoder: dict[str, Tensor], objectives: dict[str, Tensor] | None = None
    ) -> None:
        """Load weights into the model, sharded or not."""
        named: dict[str, Any] = {ENCODER + name: value for name, value in encoder.items()}
        named |= objectives or {}
        options = StateDictOptions(full_state_dict=True, strict=False)
        set_model_state_dict(self.wrapped, named, options=options)

    def _identity(self) -> dict[str, Any]:
        """Return what a resumed run must share with the original run."""
        return {
            "recipe": self.recipe.fingerprint(),
            "text": self.text,
            "micro-batches a step": self.n_micro_batches,
        }

    def _gather_progress(self) -> dict[str, Any]:
        """Return the stream positions after the last batch of any process, and all new tokens."""
        places = [position.to_dict() for position in self.positions]
        everyone: list[dict[str, Any]] = gather_object(
            [{"places": places, "tokens": self.n_new_tokens}]
        )
        streams = zip(*(each["places"] for each in everyone), strict=True)
        return {
            "places": [max(places, key=lambda place: place["count"]) for places in streams],
            "tokens": sum(each["tokens"] for each in everyone),
        }

    def _build_objectives(self) -> list[Objective]:
        """Build the objectives, with their own weights drawn from the recipe's seed."""
        objectives = [build_objective(settings) for settings in self.recipe.objectives]
        for number, objective in enumerate(objectives):
            generator = torch.Generator().manual_seed(derive_seed(self.recipe.seed, number, 0))
            objective.add_weights(self.encoder.hidden_size, generator)
        return objectives

    def _check_best_by(self) -> list[str]:
        """Return the names of the objectives whose validation losses decide what is best."""
        settings = self.recipe.checkpoints
        chosen = settings.best_by or self.names
        unknown = sorted(set(chosen) - set(self.names))
        if unknown:
            raise InputError(
                f"checkpoints.best_by: there is no objective {unknown[0]}",
                fix=f"choose from {', '.join(self.names)}",
            )
        with_text = [n for n, pair in zip(self.names, self.streams, strict=True) if pair.validation]
        if settings.final == "best" and not set(chosen) & set(with_text):
            raise InputError(
                "checkpoints.final=best needs validation text, and there is none",
                fix="raise data.validation_examples, add text, or set checkpoints.final=last",
            )
        return chosen

    def _find_warnings(self) -> list[str]:
        """Return what objectives find wrong with their first examples, before the first step."""
        if checkpoints.find_latest(self.folder) is not None:
            return []
        special_tokens = SpecialTokens.of(self.encoder.tokenizer)
        found = [
            objective.find_problem(self.encoder, special_tokens, _read_examples(pair.training))
            for objective, pair in zip(self.objectives, self.streams, strict=True)
        ]
        return [f"{name}: {text}" for name, text in zip(self.names, found, strict=True) if text]


def _read_examples(stream: BatchStream[Any]) -> Iterator[tuple[Ragged, ...]]:
    """Yield the examples of a stream's batches as they are before collation."""
    uncollated = BatchStream(
        stream.corpora, stream.limits, lambda sides, generator: sides, stream.seed
    )
    uncollated.numbers = stream.numbers  # for objectives that need the languages' numbers
    for _, sides in uncollated.iterate(StreamPosition(), lambda number: True):
        assert sides is not None  # every batch is wanted
        yield sides
