"""The only training loop: streams and objectives in, a plain Hugging Face folder out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from calque.objectives import build_objective
from calque.objectives.base import Marks
from calque.text.files import write_atomically
from calque.text.streams import Place, load_batches, seed_of
from calque.training import checkpoints
from calque.training.averaging import WeightAverage
from calque.training.data import open_stream
from calque.training.saving import finish_run, restore_run, save_run
from calque.training.schedule import rate_factor
from calque.training.setup import build_encoder, make_accelerator, open_text
from calque.training.step import TrainStep, build_optimizer, freeze, name_objectives
from calque.training.telemetry import open_telemetry
from calque.training.validation import validate
from calque.training.watch import StopRequest, Watch
from calque.types import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from calque.training.recipe import Recipe
    from calque.training.telemetry import Telemetry

    Loaders = Sequence[Iterator[tuple[Place, Any]]]


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop, and has saved where it is."""


def train(recipe: Recipe, text: Path, folder: Path, *, resume: bool = False) -> Path:
    """Train a recipe on a prepared folder of text; return the finished model's folder."""
    return Trainer(recipe, text, folder).run(resume=resume)


class Trainer:
    """One run of one recipe."""

    def __init__(self, recipe: Recipe, text: Path, folder: Path) -> None:
        prepared, tokenizer = open_text(text)
        self.recipe, self.folder = recipe, folder
        self.accelerator = make_accelerator(recipe)
        self.encoder = build_encoder(recipe, tokenizer)
        objectives = [build_objective(settings) for settings in recipe.objectives]
        self.names = name_objectives(objectives)
        self.module = TrainStep(self.encoder, objectives).train()
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
        self.average = WeightAverage(recipe.average, self.encoder)
        self.wrapped, self.optimizer = self.accelerator.prepare(
            self.module, build_optimizer(self.module, recipe.optimizer)
        )
        self.step, self.places = 0, [Place() for _ in objectives]
        self.best_score: float | None = None
        self.stop, self.watch = StopRequest(), Watch()

    @property
    def compiles(self) -> bool:
        """Whether steps are compiled: on a GPU unless the recipe says otherwise."""
        wish = self.recipe.engine.compile
        return wish == "on" or (wish == "auto" and self.accelerator.device.type == "cuda")

    def run(self, *, resume: bool = False) -> Path:
        """Train to the end, or go on where an earlier run stopped; return the model's folder."""
        if resume:
            restore_run(self)
        elif checkpoints.find_latest(self.folder):
            raise InputError(
                "this folder holds a run", file=self.folder, fix="give --resume or another folder"
            )
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            self.folder.mkdir(parents=True, exist_ok=True)
            with write_atomically(self.folder / "recipe.yaml") as stream:
                stream.write(self.recipe.to_yaml())
        if self.compiles:
            self.module.compile_objectives()
        with (
            open_telemetry(
                self.folder,
                self.recipe.schedule.steps,
                start_step=self.step,
                is_main=self.accelerator.is_main_process,
                tensorboard=self.recipe.telemetry.tensorboard,
            ) as telemetry,
            self.stop.listening(),
        ):
            self._say_what_is_used(telemetry)
            self._go(telemetry)
            return finish_run(self)

    def _go(self, telemetry: Telemetry) -> None:
        """Take the remaining steps, with telemetry, validation and checkpoints between."""
        recipe, loaders = self.recipe, self._open_loaders()
        on_cpu = self.accelerator.device.type == "cpu"
        while self.step < recipe.schedule.steps:
            figures = self._take_step(loaders)
            self.step += 1
            last = self.step == recipe.schedule.steps
            if on_cpu:
                self.watch.check()
            if last or self.step % recipe.telemetry.every == 0:
                self.watch.check()
                telemetry.log_step(self.step, self._mean(figures), self.watch.take_tokens())
            if self._asked_to_stop():
                self.watch.check()
                save_run(self)
                raise Interrupted(f"stopped and saved at step {self.step}; go on with --resume")
            if last or self.step % recipe.checkpoints.validate_every == 0:
                with telemetry.paused():
                    self._validate(telemetry)
            if last or self.step % recipe.checkpoints.every == 0:
                self.watch.check()
                with telemetry.paused():
                    save_run(self)

    def _take_step(self, loaders: Loaders) -> dict[str, Tensor]:
        """Take one optimizer step over `accumulation` micro-batches of every objective.

        Every micro-batch weighs the same: with token budgets their sizes hardly differ.
        """
        n_micro = self.recipe.engine.accumulation
        rate = self._set_rate()
        losses: dict[str, Tensor] = {}
        n_tokens = 0
        for micro in range(n_micro):
            places, batches = zip(*[next(loader) for loader in loaders], strict=True)
            self.places = list(places)
            n_tokens += sum(batch.tokens.n_real for batch in batches)
            for name, value in self._follow(batches, micro).items():
                losses[name] = losses[name] + value / n_micro if micro else value / n_micro
        norm = self.accelerator.clip_grad_norm_(
            self.wrapped.parameters(), self.recipe.optimizer.clip
        )
        n_tokens *= self.accelerator.num_processes
        self.watch.note(losses, torch.as_tensor(norm), self.step, self.places, n_tokens)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.average.update(self.encoder)
        figures = {f"loss/{name}": value for name, value in losses.items()}
        return figures | {"grad_norm": torch.as_tensor(norm), "lr": torch.tensor(rate)}

    def _follow(self, batches: Sequence[Any], micro: int) -> dict[str, Tensor]:
        """Go forward and backward through one micro-batch of every objective.

        Dropout is seeded by the micro-batch's number in the whole run, so that a resumed run
        repeats it, and so do two processes that share the work of one.
        """
        n_micro, engine = self.recipe.engine.accumulation, self.accelerator
        number = (self.step * n_micro + micro) * engine.num_processes + engine.process_index
        torch.manual_seed(seed_of(self.recipe.seed, len(self.names), number))
        on_device = [batch.to(engine.device) for batch in batches]
        is_last = micro + 1 == n_micro
        with nullcontext() if is_last else engine.no_sync(self.wrapped):
            with engine.autocast():
                loss, figures = self.wrapped(on_device)
            engine.backward(loss / n_micro)
        return dict(figures)

    def _set_rate(self) -> float:
        schedule = self.recipe.schedule
        factor = rate_factor(
            self.step + 1, kind=schedule.kind, warmup=schedule.warmup, steps=schedule.steps
        )
        rate = factor * self.recipe.optimizer.learning_rate
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _validate(self, telemetry: Telemetry) -> None:
        figures = validate(self)
        if not figures:
            return
        telemetry.log_validation(self.step, figures)
        best, score = checkpoints.read_best(self.folder), sum(figures.values())
        if best is None or score < best[1]:
            self.best_score = score

    def _open_loaders(self) -> Loaders:
        on_gpu = self.accelerator.device.type == "cuda"
        workers = self.recipe.engine.workers
        return [
            load_batches(
                pair.training,
                place=place,
                rank=self.accelerator.process_index,
                n_ranks=self.accelerator.num_processes,
                n_workers=(2 if on_gpu else 0) if workers == "auto" else workers,
                pin_memory=on_gpu,
            )
            for pair, place in zip(self.streams, self.places, strict=True)
        ]

    def _mean(self, figures: dict[str, Tensor]) -> dict[str, float]:
        """Average a step's figures over the processes."""
        values = torch.stack([v.detach().float().to(self.accelerator.device) for v in figures.values()])
        mean = self.accelerator.reduce(values, reduction="mean")
        return dict(zip(figures, mean.tolist(), strict=True))

    def _asked_to_stop(self) -> bool:
        """Agree on stopping: a signal may reach the processes at different steps."""
        if self.accelerator.num_processes == 1:
            return self.stop.made
        if self.step % self.recipe.telemetry.every:
            return False
        wish = torch.tensor(float(self.stop.made), device=self.accelerator.device)
        return bool(self.accelerator.reduce(wish, reduction="sum") > 0)

    def _say_what_is_used(self, telemetry: Telemetry) -> None:
        for name, pair in zip(self.names, self.streams, strict=True):
            longer = f"; {pair.n_too_long} longer than {self.recipe.data.max_length} tokens left out"
            telemetry.say(f"{name}: {pair.n_examples} examples{longer if pair.n_too_long else ''}")
