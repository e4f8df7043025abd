"""Training: from a recipe to a model. `train` sets a run up, `Trainer` takes its steps."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule

from calque.errors import InputError
from calque.io.processes import STOP_SIGNALS
from calque.tokens.prepare import is_prepared, verify_prepared
from calque.tokens.sampling import derive_seed
from calque.training import checkpoints
from calque.training.closed_form import fit_maps, is_closed_form
from calque.training.distributed import (
    average_metrics,
    gather_tensor,
    lock_folder,
    main_process_first,
)
from calque.training.gap_probe import measure_gap, open_probe
from calque.training.optimizer import set_learning_rate
from calque.training.recipe_io import resolve_recipe
from calque.training.run import Run
from calque.training.sources import check_text, prepare_text
from calque.training.step import NonfiniteGuard
from calque.training.telemetry import Telemetry

if TYPE_CHECKING:
    from torch import Tensor

    from calque.training.gap_probe import GapProbe
    from calque.training.recipe import Recipe
    from calque.training.recipe_io import Settings
    from calque.training.run import Loaders
    from calque.types import Progress

    Metrics = Mapping[str, Tensor | float]


@dataclass(frozen=True, slots=True)
class TrainResult:
    """Where a finished run is, and how far it came.

    `best_score` is the lowest validation loss, if the recipe has `checkpoints.final: best`.
    """

    folder: Path
    model: Path
    step: int
    best_score: float | None


class Interrupted(KeyboardInterrupt):
    """The run was stopped by a signal, and its state was saved; the note says where."""

    def __init__(self, note: str) -> None:
        super().__init__(note)
        self.add_note(note)


def train(
    recipe: str | Path | Recipe,
    *,
    output: str | Path | None = None,
    settings: Settings = (),
    prepared: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> TrainResult:
    """Train a model by a recipe, and write it as a plain Hugging Face folder.

    SIGINT, SIGTERM and SIGHUP stop training after the current step: a checkpoint is written,
    `Interrupted` is raised, and the run can be resumed. Linear maps with the solver procrustes or
    least_squares are computed in one pass, which cannot be resumed.

    Args:
        recipe: Name of a bundled recipe, a YAML file or a `Recipe`.
        output: Folder of the run. Default: runs/NAME.
        settings: Changes of the recipe: `{"schedule.steps": 100}` or `["schedule.steps=100"]`.
        prepared: Folder written by `prepare`. Default: the text is prepared in the run's folder.
        resume: Continue from the newest checkpoint of the run.
        progress: Called after every step, and while text is prepared.

    Examples:
        >>> calque.train("xlm-tlm", settings={"schedule.steps": 1000}).model    # doctest: +SKIP
        PosixPath('runs/xlm-tlm/model')
    """
    loaded, base = resolve_recipe(recipe, settings)
    folder = Path("runs") / loaded.name if output is None else Path(output)
    in_one_pass = is_closed_form(loaded)
    if in_one_pass and resume:
        raise InputError(
            "maps are computed in one pass, which cannot be resumed",
            fix="start again without --resume",
        )
    text = folder / "text" if prepared is None else Path(prepared)
    with ExitStack() as stack:
        with main_process_first() as is_main:
            if is_main:
                stack.enter_context(lock_folder(folder))
                _check_folder(folder, resume=resume)
                if loaded.probe is not None:
                    loaded.probe.find_tests()  # reported before text is prepared
                # A resumed run uses the text it started with, even if its sources have changed.
                if prepared is not None or (resume and is_prepared(text)):
                    verify_prepared(text, progress)
                else:
                    check_text(loaded, base)
                    prepare_text(loaded, base, text, progress=progress)
        if in_one_pass:
            n_batches = fit_maps(loaded, text, folder, progress=progress)
            return TrainResult(folder, folder / "model", n_batches, None)
        return _train(loaded, text, folder, resume=resume, progress=progress)


def _train(
    recipe: Recipe, text: Path, folder: Path, *, resume: bool, progress: Progress | None
) -> TrainResult:
    """Train on prepared text, from the start or from the newest checkpoint."""
    run = Run(recipe, text, folder)
    probe = open_probe(run)
    if resume:
        run.restore()
    run.create_folder()
    run.compile_step()
    stop = StopSignal()
    with (
        Telemetry(
            folder if run.accelerator.is_main_process else None,
            recipe.schedule.steps,
            start_step=run.step,
            tensorboard=recipe.telemetry.tensorboard,
            progress=progress,
        ) as telemetry,
        stop.handled(),
    ):
        Trainer(run, telemetry, probe=probe, stop=stop).train()
        model = run.finish()
    best = checkpoints.read_best(folder) if recipe.checkpoints.final == "best" else None
    return TrainResult(folder, model, run.step, best and best[1])


class Trainer:
    """Takes the steps of a run; `Run` has the state that they change."""

    def __init__(
        self,
        run: Run,
        telemetry: Telemetry | None = None,
        *,
        probe: GapProbe | None = None,
        stop: StopSignal | None = None,
    ) -> None:
        self.run, self.probe = run, probe
        self.telemetry = Telemetry() if telemetry is None else telemetry
        self.stop = StopSignal() if stop is None else stop
        self.guard = NonfiniteGuard(run.accelerator)

    def train(self) -> None:
        """Take the remaining steps of the run."""
        run = self.run
        self._describe_run()
        if run.step == 0:
            self.probe_if_due()
        if run.is_compiled and not run.is_finished:
            self.telemetry.info("compiling the step; the first one takes about a minute")
        first_step, started = run.step + 1, time.monotonic()
        loaders = run.open_loaders()
        try:
            while not run.is_finished:
                metrics = self.take_step(loaders)
                if run.step == first_step:
                    self.stop.defer()
                    if run.is_compiled:
                        seconds = time.monotonic() - started
                        self.telemetry.info(f"the first step took {seconds:.1f} s")
                self.after_step(metrics)
        finally:
            loaders.clear()  # stops their workers even while an error refers to this frame

    def take_step(self, loaders: Loaders) -> Metrics:
        """Take one optimizer step over `accumulation` micro-batches of every objective.

        Every micro-batch has the same weight: with token budgets their sizes hardly differ.
        """
        run, n_micro = self.run, self.run.recipe.engine.accumulation
        step = run.step + 1
        run.score = None
        learning_rate = set_learning_rate(run.optimizer, run.recipe, step)
        losses: dict[str, Tensor] = {}
        for micro in range(n_micro):
            positions, batches = zip(*[next(loader) for loader in loaders], strict=True)
            run.positions = list(positions)
            run.n_new_tokens += sum(batch.tokens.n_real for batch in batches)
            found = self.forward_backward(batches, micro)
            numbers = [position.count - 1 for position in positions]
            self.guard.record(step, found, dict(zip(run.names, numbers, strict=True)))
            for name, value in found.items():
                losses[name] = losses[name] + value / n_micro if micro else value / n_micro
        clip, parameters = run.recipe.optimizer.clip, run.wrapped.parameters()
        norm = gather_tensor(run.accelerator.clip_grad_norm_(parameters, clip))
        self.guard.record(step, {"the gradient": norm}, {})
        run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=True)
        for objective in run.objectives:
            objective.after_step()
        run.average.update(run.encoder)
        run.step = step
        if step == run.recipe.freeze_steps:
            run.apply_freeze()
            self.telemetry.info(f"step {step}: from here on all weights are trained")
        metrics = {f"loss/{name}": value for name, value in losses.items()}
        return metrics | {"grad_norm": norm, "lr": learning_rate}

    def forward_backward(self, batches: Sequence[Any], micro: int) -> dict[str, Tensor]:
        """Compute the loss and the gradient of one micro-batch of every objective.

        Dropout is seeded with the number of the micro-batch in the whole run, so that a resumed
        run repeats it, and several processes draw what one process would draw.
        """
        run, engine = self.run, self.run.accelerator
        n_micro = run.recipe.engine.accumulation
        number = (run.step * n_micro + micro) * engine.num_processes + engine.process_index
        torch.manual_seed(derive_seed(run.recipe.seed, len(run.names), number))
        on_device = [batch.to(engine.device) for batch in batches]
        is_last = micro + 1 == n_micro
        with nullcontext() if is_last else engine.no_sync(run.wrapped):
            with engine.autocast():
                loss, metrics = run.wrapped(on_device)
            engine.backward(loss / n_micro)
        return dict(metrics)

    def after_step(self, metrics: Metrics) -> None:
        """Log, validate, probe, save and stop where the recipe or a signal asks for it."""
        run, recipe = self.run, self.run.recipe
        self.telemetry.advance(run.step)
        is_logged = run.is_finished or run.step % recipe.telemetry.every == 0
        if run.on_cpu or is_logged:
            self.guard.check()
        if is_logged:
            self.log_step(metrics)
        is_best = False
        if run.is_finished or run.step % recipe.checkpoints.validate_every == 0:
            with self.telemetry.paused():
                is_best = self.validate()
        self.probe_if_due()
        is_stopping = not run.is_finished and self._is_stop_requested()
        is_due = is_best or run.is_finished or run.step % recipe.checkpoints.every == 0
        if is_due or is_stopping:
            self.guard.check()
            with self.telemetry.paused():
                run.save(is_extra=not is_due)
        if is_stopping:
            raise Interrupted(f"stopped and saved at step {run.step}; continue with --resume")

    def log_step(self, metrics: Metrics) -> None:
        """Log the metrics of a step, and the tokens of all processes since the last time."""
        run = self.run
        mean = average_metrics(run.accelerator, {**metrics, "": float(run.take_new_tokens())})
        n_tokens = round(mean.pop("") * run.accelerator.num_processes)
        self.telemetry.log_step(run.step, mean, n_tokens)

    def validate(self) -> bool:
        """Log the validation losses; return whether a best checkpoint must be saved."""
        run = self.run
        metrics = compute_validation_losses(run)
        if not metrics:
            return False
        self.telemetry.log_validation(run.step, metrics)
        if run.recipe.checkpoints.final != "best":
            return False
        weights = dict(zip(run.names, run.module.weights, strict=True))
        score = sum(weights[name] * metrics.get(f"loss/{name}", 0.0) for name in run.best_by)
        if not math.isfinite(score):
            return False
        run.score = score
        best = checkpoints.read_best(run.folder)
        return best is None or score < best[1]

    def probe_if_due(self) -> None:
        """Measure the transfer gap where the recipe asks for it, outside the training time."""
        settings = self.run.recipe.probe
        if settings and (self.run.is_finished or self.run.step % settings.every == 0):
            with self.telemetry.paused():
                measure_gap(self.run, self.probe, self.telemetry)

    def _describe_run(self) -> None:
        for name, pair in zip(self.run.names, self.run.streams, strict=True):
            self.telemetry.info(f"{name}: {pair.describe()}")
        for warning in self.run.warnings:
            self.telemetry.warn(warning)
        if self.probe is not None:
            self.telemetry.info(f"probe: {self.probe.describe()}")

    def _is_stop_requested(self) -> bool:
        """Return whether any process got a signal: it may reach them at different steps."""
        run = self.run
        if run.accelerator.num_processes == 1:
            return self.stop.requested
        if not run.on_cpu and run.step % run.recipe.telemetry.every:
            return False
        requested = torch.tensor(float(self.stop.requested), device=run.accelerator.device)
        return bool(run.accelerator.reduce(requested, reduction="sum") > 0)


@torch.no_grad()
def compute_validation_losses(run: Run) -> dict[str, float]:
    """Return the losses on the validation batches, or nothing if there is no validation text."""
    totals: dict[str, Tensor | float] = defaultdict(float)
    run.wrapped.eval()
    for batches in run.validation_batches:
        on_device = [batch and batch.to(run.accelerator.device) for batch in batches]
        with run.accelerator.autocast():
            _, metrics = run.wrapped(on_device)
        for name, value in metrics.items():
            totals[f"loss/{name}"] += value / len(run.validation_batches)
    for objective in run.objectives if totals else []:
        objective.after_validation()
    run.wrapped.train()
    if isinstance(run.wrapped, FSDPModule):
        run.wrapped.reshard()  # without a backward pass, the root module stays gathered
    return average_metrics(run.accelerator, totals) if totals else {}


class StopSignal:
    """Stop cleanly after the current step on SIGINT, SIGTERM or SIGHUP.

    Attributes:
        requested: Whether a signal arrived that was deferred.
        is_deferred: Whether signals are deferred until the end of the step.
    """

    def __init__(self) -> None:
        self.requested = self.is_deferred = False
        self._handlers: dict[signal.Signals, Any] = {}

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Restore the handling of signals at the end of the block."""
        try:
            yield
        finally:
            for kind, handler in self._handlers.items():
                signal.signal(kind, handler)

    def defer(self) -> None:
        """Defer signals from now on; only the main thread of a process can.

        Call it after the first step: until then there is nothing to save, and the step may wait
        for compilers that have received the signal, too.
        """
        is_main_thread = threading.current_thread() is threading.main_thread()
        if self.is_deferred or not is_main_thread:
            return
        self.is_deferred = True
        for kind in STOP_SIGNALS:
            if signal.getsignal(kind) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                self._handlers[kind] = signal.signal(kind, self._request)

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        handler = self._handlers[signal.Signals(number)]
        if callable(handler):  # the command line remembers the signal for its exit code
            with suppress(KeyboardInterrupt):
                handler(number, frame)


def _check_folder(folder: Path, *, resume: bool) -> None:
    """Raise InputError if a new run would mix with an older one, or none can be resumed."""
    has_run = checkpoints.find_latest(folder) is not None
    if has_run and not resume:
        raise InputError(
            "the folder contains a run", file=folder, fix="use --resume or another folder"
        )
    if resume and not has_run:
        raise InputError(
            "there is no checkpoint to resume from", file=folder, fix="start without --resume"
        )
