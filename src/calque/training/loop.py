"""Losses on text kept aside: the same batches with the same masks every time.

The only training loop: streams and objectives in, a plain Hugging Face folder out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from torch.distributed.fsdp import FSDPModule

from calque.errors import InputError
from calque.io.files import check_place
from calque.tokens.streams import seed_of
from calque.training import checkpoints
from calque.training.distributed import average_figures, gather_tensor
from calque.training.gap_probe import open_probe, probe_if_due
from calque.training.run import Run, begin_run, finish_run, restore_run, save_run
from calque.training.step import StopRequest, set_rate
from calque.training.telemetry import open_telemetry

if TYPE_CHECKING:
    from torch import Tensor

    from calque.training.recipe import Recipe
    from calque.training.run import Loaders
    from calque.training.telemetry import Telemetry

    Figures = Mapping[str, Tensor | float]


@torch.no_grad()
def validate(run: Run) -> dict[str, float]:
    """Measure every objective's loss; without text kept aside there is nothing to measure."""
    totals: dict[str, Tensor | float] = defaultdict(float)
    run.wrapped.eval()
    for batches in run.validation_batches:
        on_device = [batch and batch.to(run.accelerator.device) for batch in batches]
        with run.accelerator.autocast():
            _, figures = run.wrapped(on_device)
        for name, value in figures.items():
            totals[f"loss/{name}"] += value / len(run.validation_batches)
    for objective in run.objectives if totals else []:
        objective.after_validation()
    run.wrapped.train()
    if isinstance(run.wrapped, FSDPModule):
        run.wrapped.reshard()  # with no backward pass to do it, the outermost part stays whole
    return average_figures(run.accelerator, totals) if totals else {}


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop, and has saved where it is."""


def train(recipe: Recipe, text: Path, folder: Path, *, resume: bool = False) -> Path:
    """Train a recipe on a prepared folder of text; return the finished model's folder."""
    check_folder(folder, resume=resume)
    return Trainer(recipe, text, folder).run(resume=resume)


def check_folder(folder: Path, *, resume: bool) -> None:
    """Stop before a new run would mix with an older one, or go on from nothing."""
    check_place(folder)
    has_run = checkpoints.find_latest(folder) is not None
    if has_run and not resume:
        raise InputError(
            "this folder holds a run", file=folder, fix="give --resume or another folder"
        )
    if resume and not has_run:
        raise InputError("no checkpoint to resume from", file=folder, fix="drop --resume")


class Trainer(Run):
    """Takes a run from where it is to its end."""

    def __init__(self, recipe: Recipe, text: Path, folder: Path) -> None:
        super().__init__(recipe, text, folder)
        self.probe = open_probe(self)
        self.stop = StopRequest()

    def run(self, *, resume: bool = False) -> Path:
        """Train to the end, or go on where an earlier run stopped; return the model's folder."""
        check_folder(self.folder, resume=resume)
        if resume:
            restore_run(self)
        begin_run(self)
        self.compile_step()
        with (
            open_telemetry(
                self.folder,
                self.recipe.schedule.steps,
                start_step=self.step,
                is_main=self.accelerator.is_main_process,
                tensorboard=self.recipe.telemetry.tensorboard,
                console=Console(stderr=True),
            ) as telemetry,
            self.stop.listening(),
        ):
            for name, pair in zip(self.names, self.streams, strict=True):
                telemetry.say(f"{name}: {pair.describe()}")
            for fault in self.faults:
                telemetry.say(f"warning: {fault}")
            if self.probe is not None:
                telemetry.say(f"probe: {self.probe.describe()}")
            self._go(telemetry)
            return finish_run(self)

    def _go(self, telemetry: Telemetry) -> None:
        """Take the remaining steps."""
        if self.step == 0:
            probe_if_due(self, self.probe, telemetry)
        loaders = self._open_loaders()
        try:
            while self.step < self.recipe.schedule.steps:
                figures = self._take_step(loaders)
                self.step += 1
                if self.step == self.recipe.freeze_steps:
                    self.hold()
                    telemetry.say(f"step {self.step}: from here on all weights are trained")
                self._do_what_is_due(figures, telemetry)
        finally:
            loaders.clear()  # ends their workers even while an error holds on to this frame

    def _do_what_is_due(self, figures: Figures, telemetry: Telemetry) -> None:
        """Tell, validate, probe, save and stop between two steps."""
        recipe = self.recipe
        last = self.step == recipe.schedule.steps
        if self.on_cpu:
            self.watch.check()
        if last or self.step % recipe.telemetry.every == 0:
            self.watch.check()
            self._tell(figures, telemetry)
        if last or self.step % recipe.checkpoints.validate_every == 0:
            with telemetry.paused():
                self._validate(telemetry)
        probe_if_due(self, self.probe, telemetry)
        stopping = not last and self._asked_to_stop()
        is_due = last or self.step % recipe.checkpoints.every == 0
        if is_due or stopping or self.best_score is not None:
            self.watch.check()
            with telemetry.paused():
                save_run(self)
        if stopping:
            raise Interrupted(f"stopped and saved at step {self.step}; go on with --resume")

    def _take_step(self, loaders: Loaders) -> Figures:
        """Take one optimizer step over `accumulation` micro-batches of every objective.

        Every micro-batch weighs the same: with token budgets their sizes hardly differ.
        """
        n_micro = self.recipe.engine.accumulation
        rate = set_rate(self.optimizer, self.recipe, self.step + 1)
        losses: dict[str, Tensor] = {}
        for micro in range(n_micro):
            places, batches = zip(*[next(loader) for loader in loaders], strict=True)
            self.places = list(places)
            self.watch.n_tokens += sum(batch.tokens.n_real for batch in batches)
            found = self._follow(batches, micro)
            numbers = [place.count - 1 for place in places]
            self.watch.note(self.step + 1, found, dict(zip(self.names, numbers, strict=True)))
            for name, value in found.items():
                losses[name] = losses[name] + value / n_micro if micro else value / n_micro
        clip, parameters = self.recipe.optimizer.clip, self.wrapped.parameters()
        norm = gather_tensor(self.accelerator.clip_grad_norm_(parameters, clip))
        self.watch.note(self.step + 1, {"the gradient": norm}, {})
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for objective in self.objectives:
            objective.after_step()
        self.average.update(self.encoder)
        figures = {f"loss/{name}": value for name, value in losses.items()}
        return figures | {"grad_norm": norm, "lr": rate}

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

    def _tell(self, figures: Figures, telemetry: Telemetry) -> None:
        """Report a step's figures and the tokens of all processes since the last report."""
        mean = average_figures(self.accelerator, {**figures, "": float(self.watch.take_tokens())})
        n_tokens = round(mean.pop("") * self.accelerator.num_processes)
        telemetry.log_step(self.step, mean, n_tokens)

    def _validate(self, telemetry: Telemetry) -> None:
        """Measure, tell, and remember the score if it is the best so far and that is asked for."""
        figures = validate(self)
        if not figures:
            return
        telemetry.log_validation(self.step, figures)
        if self.recipe.checkpoints.final != "best":
            return
        weights = dict(zip(self.names, self.module.weights, strict=True))
        score = sum(weights[name] * figures.get(f"loss/{name}", 0.0) for name in self.judges)
        best = checkpoints.read_best(self.folder)
        if math.isfinite(score) and (best is None or score < best[1]):
            self.best_score = score

    def _asked_to_stop(self) -> bool:
        """Agree on stopping: a signal may reach the processes at different steps."""
        if self.accelerator.num_processes == 1:
            return self.stop.made
        if not self.on_cpu and self.step % self.recipe.telemetry.every:
            return False
        wish = torch.tensor(float(self.stop.made), device=self.accelerator.device)
        return bool(self.accelerator.reduce(wish, reduction="sum") > 0)
