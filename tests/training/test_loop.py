"""The training loop: bit-identical resumption, processes that agree, divergence, results."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from tests.training.run_helpers import (
    assert_same_run,
    assert_same_tensors,
    do_at_step,
    interrupt_at,
    read_rows,
    read_tensors,
    read_weights,
)
from torch import Tensor

import calque
from calque.cli import run as run_cli
from calque.errors import InputError
from calque.io.cleaning import CleaningRules
from calque.models.encoder import Encoder
from calque.objectives.masked_lm import MaskedLM
from calque.tokens.prepare import TextSource, prepare_corpora
from calque.training import loop
from calque.training import run as run_module
from calque.training.checkpoints import read_best
from calque.training.loop import StopSignal, TrainResult, train
from calque.training.recipe import Recipe
from calque.training.run import Run
from calque.training.sources import open_text
from calque.training.start import build_encoder
from calque.training.step import TrainStep
from calque.types import LossTerms

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MakeRecipe = Callable[..., Recipe]
TrainInTwo = Callable[..., subprocess.CompletedProcess[str]]

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
TAGGED = Path(__file__).parent.parent / "data" / "tagged"
PROBE = (
    f"probe.train={TAGGED}/en_ewt-train.conllu",
    f"probe.test={TAGGED}/{{language}}_*-dev.conllu*",
    "probe.every=3",
    "probe.layer=1",
)


@pytest.fixture(scope="module")
def ema_recipe(tiny_recipe: MakeRecipe) -> Recipe:
    """Dropout, two objectives, EMA, and rows and checkpoints at different steps."""
    return tiny_recipe("average.kind=ema", "average.decay=0.8", "telemetry.every=2")


@pytest.fixture(scope="module")
def straight(ema_recipe: Recipe, tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight steps without interruption."""
    folder = tmp_path_factory.mktemp("runs") / "straight"
    train(ema_recipe, output=folder, prepared=tiny_text)
    return folder


# Resuming


@pytest.mark.parametrize("step", [5, 4])
def test_interrupted_run_resumes_bit_identically(
    step: int,
    straight: Path,
    ema_recipe: Recipe,
    tiny_text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interrupt_at(monkeypatch, step, ema_recipe, tiny_text, tmp_path)
    assert not (tmp_path / "model").exists()
    assert (
        train(ema_recipe, output=tmp_path, prepared=tiny_text, resume=True).model
        == tmp_path / "model"
    )
    assert_same_run(straight, tmp_path, 8)
    names = [sorted(path.name for path in run.iterdir()) for run in (straight, tmp_path)]
    assert names[0] == names[1]


def test_run_on_joined_sentences_resumes_bit_identically(
    tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny_recipe("data.join_sentences=true", "schedule.steps=4")
    train(recipe, output=tmp_path / "straight", prepared=tiny_text)
    interrupt_at(monkeypatch, 2, recipe, tiny_text, tmp_path / "resumed")
    single = tiny_recipe("schedule.steps=4")
    with pytest.raises(InputError, match="recipe"):
        train(single, output=tmp_path / "resumed", prepared=tiny_text, resume=True)
    train(recipe, output=tmp_path / "resumed", prepared=tiny_text, resume=True)
    assert_same_run(tmp_path / "straight", tmp_path / "resumed", 4)


KILLED = """
import os, signal, sys
from pathlib import Path
from calque.training.loop import Trainer, train
from calque.training.recipe_io import load_recipe
take_step = Trainer.take_step
def watched(self, loaders):
    if self.run.step == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return take_step(self, loaders)
Trainer.take_step = watched
train(load_recipe(sys.argv[1]), prepared=sys.argv[2], output=sys.argv[3])
"""


@pytest.mark.slow
def test_killed_run_resumes_bit_identically(
    straight: Path, ema_recipe: Recipe, tiny_text: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    arguments = map(str, (straight / "recipe.yaml", tiny_text, run))
    command = [sys.executable, "-c", KILLED, *arguments]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL
    assert [path.name for path in run.glob("step-*")] == ["step-00000003"]
    assert read_rows(run)[-1]["step"] == 4
    train(ema_recipe, output=run, prepared=tiny_text, resume=True)
    assert_same_run(straight, run, 8)


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_ctrl_c_saves_and_exits_130_and_the_run_is_resumed(
    tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The signal is sent to the whole group, as by a terminal, including the loading workers."""
    recipe = tmp_path / "r.yaml"
    changes = ("schedule.steps=40", "checkpoints.every=1000", "checkpoints.validate_every=1000")
    recipe.write_text(tiny_recipe(*changes, "engine.workers=1").to_yaml())
    arguments = ["train", str(recipe), "--prepared", str(tiny_text), "-o"]
    with subprocess.Popen(
        [sys.executable, "-m", "calque", *arguments, tmp_path / "run"],
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        wait_for(lambda: len(read_rows(tmp_path / "run")) > 2, process)
        os.killpg(process.pid, signal.SIGINT)
        error = process.communicate()[1]
    assert process.returncode == 130
    (saved,) = (tmp_path / "run").glob("step-*")
    step = int(saved.name.removeprefix("step-"))
    assert 2 < step < 40
    assert f"stopped and saved at step {step}; continue with --resume" in error
    assert "Traceback" not in error
    assert run_cli([*arguments, str(tmp_path / "run"), "--resume"]) == 0
    assert f"{tmp_path / 'run' / 'model'}: model after 40 steps" in capfd.readouterr().err
    assert run_cli([*arguments, str(tmp_path / "whole")]) == 0
    assert_same_run(tmp_path / "whole", tmp_path / "run", 40)


def test_signal_in_the_last_step_does_not_interrupt(
    tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    do_at_step(monkeypatch, 3, lambda: signal.raise_signal(signal.SIGTERM))
    model = train(tiny_recipe("schedule.steps=3"), output=tmp_path, prepared=tiny_text).model
    assert (model / "model.safetensors").exists()


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_request_a_stop_and_reach_the_handlers_before(kind: signal.Signals) -> None:
    """The command line remembers the signal for its exit code."""
    seen, stop = list[int](), StopSignal()

    def interrupt(number: int, frame: object) -> None:
        seen.append(number)
        raise KeyboardInterrupt

    default = signal.signal(kind, interrupt)
    try:
        with stop.handled():
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(kind)  # nothing is done yet that could be saved
            stop.defer()
            requested = [stop.requested]
            for _ in range(2):
                signal.raise_signal(kind)
                requested.append(stop.requested)
        assert requested == [False, True, True]
        assert seen == 3 * [kind]
        assert signal.getsignal(kind) is interrupt
    finally:
        signal.signal(kind, default)


def test_ignored_signal_stays_ignored() -> None:
    """As with nohup."""
    default, stop = signal.signal(signal.SIGHUP, signal.SIG_IGN), StopSignal()
    try:
        with stop.handled():
            stop.defer()
            signal.raise_signal(signal.SIGHUP)
        assert not stop.requested
    finally:
        signal.signal(signal.SIGHUP, default)


def test_signal_in_the_first_step_interrupts_it(
    tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is saved: the step may wait for a compiler that has received the signal, too."""
    do_at_step(monkeypatch, 1, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt) as caught:
        train(tiny_recipe(), output=tmp_path, prepared=tiny_text)
    assert type(caught.value) is KeyboardInterrupt
    assert not list(tmp_path.glob("step-*"))


def test_training_works_in_a_thread(
    tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path
) -> None:
    """Only the main thread can handle signals."""
    recipe, found = tiny_recipe("schedule.steps=2"), list[TrainResult]()
    thread = threading.Thread(
        target=lambda: found.append(calque.train(recipe, output=tmp_path, prepared=tiny_text))
    )
    thread.start()
    thread.join()
    assert found == [TrainResult(tmp_path, tmp_path / "model", 2, None)]


def test_finished_run_writes_its_model_again(
    straight: Path, ema_recipe: Recipe, tiny_text: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(straight, run)
    shutil.rmtree(run / "model")
    train(ema_recipe, output=run, prepared=tiny_text, resume=True)
    assert_same_run(straight, run, 8)


def test_validation_does_not_affect_training(
    straight: Path, ema_recipe: Recipe, tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path
) -> None:
    changes = ("average.kind=ema", "average.decay=0.8", "telemetry.every=2")
    often = tiny_recipe(*changes, "checkpoints.validate_every=1")
    assert often.fingerprint() == ema_recipe.fingerprint()
    train(often, output=tmp_path, prepared=tiny_text)
    assert_same_tensors(straight / "model", tmp_path / "model")
    rows = [row for row in read_rows(tmp_path) if row["kind"] == "validation"]
    assert len(rows) == 8
    assert [row for row in rows if row["step"] in (4, 8)] == [
        row for row in read_rows(straight) if row["kind"] == "validation"
    ]


def test_losses_fall(straight: Path) -> None:
    rows = [row for row in read_rows(straight) if row["kind"] == "train"]
    assert [row["step"] for row in rows] == [2, 4, 6, 8]
    for name in ("loss/masked_lm", "loss/translation_lm"):
        assert rows[-1][name] < rows[0][name] - 0.05
    assert rows[-1]["lr"] == 0.0
    assert all(row["tokens"] > 0 and row["grad_norm"] > 0 for row in rows)


def test_time_of_compiling_is_announced_without_advice_to_round(
    tiny_recipe: MakeRecipe,
    tiny_text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """PyTorch gives this advice when it compiles for a GPU."""

    def compile_objectives(step: TrainStep) -> None:
        warnings.warn("TensorFloat32 tensor cores for float32 matrix multiplication", stacklevel=1)

    monkeypatch.setattr(TrainStep, "compile_objectives", compile_objectives)
    with caplog.at_level("INFO", "calque"), warnings.catch_warnings():
        warnings.simplefilter("error")
        recipe = tiny_recipe("schedule.steps=2", "engine.compile=true")
        train(recipe, output=tmp_path, prepared=tiny_text)
    found = [message for message in caplog.messages if "step" in message and "·" not in message]
    assert found[0] == "compiling the step; the first one takes about a minute"
    assert re.fullmatch(r"the first step took \d+\.\d s", found[1])
    assert len(found) == 2


# Several processes. torchrun itself is tested in tests/end_to_end/test_recipes.py.


@pytest.fixture(scope="module")
def two_processes(
    tiny_recipe: MakeRecipe,
    tiny_text: Path,
    tmp_path_factory: pytest.TempPathFactory,
    train_in_two: TrainInTwo,
) -> Path:
    """Eight steps by two processes, one of which measures the transfer gap."""
    folder = tmp_path_factory.mktemp("two")
    done = train_in_two(folder, tiny_recipe(*PROBE), tiny_text)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("probe: 60 sentences of en") == 1, done.stderr
    return folder / "run"


@pytest.fixture(scope="module")
def one_process(
    tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The same micro-batches by one process."""
    folder = tmp_path_factory.mktemp("one")
    train(tiny_recipe(*PROBE, "engine.accumulation=2"), output=folder, prepared=tiny_text)
    return folder


def assert_close_probes(left: Path, right: Path) -> None:
    """Compare runs: by rounding, one of some hundred words may get another tag."""
    rows, others = read_rows(left), read_rows(right)
    assert [row["step"] for row in rows if row["kind"] == "probe"] == [0, 3, 6, 8]
    for row, other in zip(rows, others, strict=True):
        kind = row.pop("kind")
        assert (kind, row.get("tokens")) == (other.pop("kind"), other.get("tokens"))
        is_exact = kind != "probe" or row["step"] == 0
        assert row == pytest.approx(other, rel=1e-5, abs=0 if is_exact else 0.015)


@pytest.mark.slow
def test_two_processes_train_like_one_with_doubled_accumulation(
    two_processes: Path, one_process: Path
) -> None:
    assert_close_probes(two_processes, one_process)


@pytest.mark.slow
def test_one_process_resumes_a_run_of_two(
    two_processes: Path, tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(two_processes, run)
    shutil.rmtree(run / "step-00000008")
    with pytest.raises(InputError, match="another value of: micro-batches a step"):
        train(tiny_recipe(*PROBE), output=run, prepared=tiny_text, resume=True)
    recipe = tiny_recipe(*PROBE, "engine.accumulation=2")
    train(recipe, output=run, prepared=tiny_text, resume=True)
    assert_close_probes(two_processes, run)


@pytest.mark.slow
def test_fsdp_trains_like_ddp_and_resumes_bit_identically(
    one_process: Path,
    tiny_recipe: MakeRecipe,
    tiny_text: Path,
    tmp_path: Path,
    train_in_two: TrainInTwo,
) -> None:
    from transformers import AutoModelForMaskedLM

    recipe, run = tiny_recipe(*PROBE, "engine.distributed=fsdp"), tmp_path / "run"
    done = train_in_two(tmp_path, recipe, tiny_text, sharded=True)
    assert done.returncode == 0, done.stderr
    assert_close_probes(run, one_process)
    model, found = AutoModelForMaskedLM.from_pretrained(run / "model", output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    expected = AutoModelForMaskedLM.from_pretrained(one_process / "model").state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-5)

    again = tmp_path / "again" / "run"
    shutil.copytree(run, again)
    shutil.rmtree(again / "step-00000008")
    shutil.rmtree(again / "model")
    done = train_in_two(again.parent, recipe, tiny_text, sharded=True, resume=True)
    assert done.returncode == 0, done.stderr
    assert_same_run(run, again, 8)


def test_fsdp_has_no_effect_on_one_process(
    tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path
) -> None:
    for kind in ("ddp", "fsdp"):
        recipe = tiny_recipe(f"engine.distributed={kind}", "schedule.steps=2")
        train(recipe, output=tmp_path / kind, prepared=tiny_text)
    assert_same_run(tmp_path / "ddp", tmp_path / "fsdp", 2)


# Divergence


def all_finite(run: Path) -> bool:
    folders = [path for path in run.iterdir() if path.is_dir()]
    return all(bool(t.isfinite().all()) for path in folders for t in read_tensors(path).values())


def test_nan_loss_stops_and_names_objective_step_and_batch(
    tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, calls = MaskedLM.forward, iter(range(100))

    def poisoned(self: MaskedLM, encoder: Encoder, batch: Any) -> LossTerms:
        terms = forward(self, encoder, batch)
        # Two objectives, two micro-batches a step: call 11 is TLM on micro-batch 6 of step 3.
        return LossTerms(terms.loss * torch.nan, {}) if next(calls) == 11 else terms

    monkeypatch.setattr(MaskedLM, "forward", poisoned)
    recipe = tiny_recipe(
        "engine.accumulation=2", "checkpoints.every=1", "checkpoints.validate_every=1000"
    )
    with pytest.raises(
        InputError, match=r"^translation_lm is not finite at step 3, batch 5 of its stream \(lower"
    ):
        train(recipe, output=tmp_path, prepared=tiny_text)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [
        "step-00000001",
        "step-00000002",
    ]
    assert all_finite(tmp_path)
    assert not (tmp_path / "model").exists()


def test_diverged_run_saves_no_nan(
    tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path
) -> None:
    changes = ("optimizer.learning_rate=1e37", "schedule.warmup=0", "checkpoints.every=1")
    recipe = tiny_recipe(*changes, "checkpoints.validate_every=1", "checkpoints.final=best")
    with pytest.raises(InputError, match=r"is not finite at step \d"):
        train(recipe, output=tmp_path, prepared=tiny_text)
    assert all_finite(tmp_path)
    best = read_best(tmp_path)
    assert best is None or best[1] < float("inf")


# What a run leaves


def initial_weights(recipe: Recipe, text: Path) -> dict[str, Tensor]:
    return dict(build_encoder(recipe, open_text(text)[1]).model.state_dict())


def test_finished_model_is_plain_hugging_face(straight: Path, ema_recipe: Recipe) -> None:
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(straight / "model")
    model, found = AutoModelForMaskedLM.from_pretrained(
        straight / "model", output_loading_info=True
    )
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    assert type(model).__name__ == "XLMRobertaForMaskedLM"
    assert model.config.num_hidden_layers == ema_recipe.model.layers
    encoded = tokenizer("Guten Morgen!", return_tensors="pt")
    assert model(**encoded).logits.shape == (*encoded["input_ids"].shape, len(tokenizer))


def test_finished_model_has_the_averaged_weights(straight: Path) -> None:
    averaged = load_file(straight / "step-00000008" / "training_state.safetensors")
    model = read_weights(straight / "model")
    last = read_weights(straight / "step-00000008")
    tied = averaged["average.model.lm_head.decoder.weight"]  # a shared weight is kept once
    for name, value in model.items():
        assert torch.equal(value, averaged.get(f"average.model.{name}", tied)), name
    assert not all(torch.equal(model[name], last[name]) for name in model)


def test_finished_model_has_the_last_weights_in_the_requested_type(
    tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe("schedule.steps=3", "checkpoints.dtype=float16")
    model = load_file(
        train(recipe, output=tmp_path, prepared=tiny_text).model / "model.safetensors"
    )
    last = read_weights(tmp_path / "step-00000003")
    assert model.keys() == last.keys()
    assert all(torch.equal(model[name], last[name].half()) for name in model)
    assert json.loads((tmp_path / "model/config.json").read_text())["dtype"] == "float16"


def test_frozen_weights_are_unchanged(
    tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path
) -> None:
    changes = ('freeze=["*.embeddings.*", "*.layer.0.*"]', "schedule.steps=3")
    recipe = tiny_recipe(*changes, "average.kind=ema")
    before = initial_weights(recipe, tiny_text)
    after = load_file(
        train(recipe, output=tmp_path, prepared=tiny_text).model / "model.safetensors"
    )
    for name, value in after.items():
        is_frozen = ".embeddings." in name or ".layer.0." in name
        assert torch.equal(value, before[name]) == is_frozen, name


def test_finished_model_has_the_best_weights(
    tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = {1: float("nan"), 2: 5.0, 3: 5.5, 4: 4.0, 5: 4.1, 6: 4.3, 7: 4.2, 8: 4.5}

    def fake(run: Run) -> dict[str, float]:
        return {"loss/masked_lm": losses[run.step], "loss/translation_lm": 1.0}

    monkeypatch.setattr(loop, "compute_validation_losses", fake)
    changes = ("checkpoints.final=best", "checkpoints.validate_every=1", "checkpoints.keep=1")
    recipe = tiny_recipe(*changes, "checkpoints.every=3")
    interrupt_at(monkeypatch, 5, recipe, tiny_text, tmp_path)
    train(recipe, output=tmp_path, prepared=tiny_text, resume=True)
    assert read_best(tmp_path) == (4, 4.5)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [
        "step-00000004",
        "step-00000008",
    ]
    model = read_weights(tmp_path / "model")
    best = read_weights(tmp_path / "step-00000004")
    assert all(torch.equal(model[name], best[name]) for name in model)


@pytest.mark.slow
def test_a_kill_at_any_moment_of_saving_does_not_change_the_finished_model(
    tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best checkpoint replaces another; what is on the disk in between is resumed from."""
    losses = {2: 5.0, 4: 4.0, 6: 4.5, 8: 4.2}

    def fake(run: Run) -> dict[str, float]:
        return {"loss/masked_lm": losses[run.step], "loss/translation_lm": 1.0}

    monkeypatch.setattr(loop, "compute_validation_losses", fake)
    changes = ("checkpoints.final=best", "checkpoints.every=2", "checkpoints.validate_every=2")
    recipe = tiny_recipe(*changes, "checkpoints.keep=1")
    straight, moments, is_saving = tmp_path / "straight", list[Path](), False

    def copy_before(function: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **options: Any) -> Any:
            if is_saving:
                moments.append(tmp_path / f"killed-{len(moments)}")
                copytree(straight, moments[-1])
            return function(*args, **options)

        return watched

    def save(run: Run, *, is_extra: bool) -> None:
        nonlocal is_saving
        is_saving = run.step == 4
        try:
            save_run(run, is_extra=is_extra)
        finally:
            is_saving = False

    save_run, copytree = Run.save, shutil.copytree
    with monkeypatch.context() as patch:
        patch.setattr(Run, "save", save)
        for module, name in ((Path, "rename"), (shutil, "rmtree"), (os, "fsync"), (os, "unlink")):
            patch.setattr(module, name, copy_before(getattr(module, name)))
        train(recipe, output=straight, prepared=tiny_text)
    steps = {tuple(path.name for path in sorted(run.glob("step-*"))) for run in moments}
    assert steps == {
        ("step-00000002",),
        ("step-00000002", "step-00000004"),
        ("step-00000004",),
    }
    seen = set[tuple[str, ...]]()
    for run in moments:
        files = tuple(sorted(str(path.relative_to(run)) for path in run.rglob("*")))
        if files not in seen:
            seen.add(files)
            train(recipe, output=run, prepared=tiny_text, resume=True)
            assert read_best(run) == (4, 4.5)
            assert_same_run(straight, run, 8)
            assert not list(run.glob(".*"))


def test_damaged_checkpoint_is_an_error_until_it_is_deleted(
    tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe("checkpoints.final=best", "checkpoints.every=2", "checkpoints.keep=9")
    train(recipe, output=tmp_path / "whole", prepared=tiny_text)
    run = tmp_path / "run"
    shutil.copytree(tmp_path / "whole", run)
    file = run / "step-00000008" / "config.json"
    file.write_text(file.read_text().replace("0.1", "0.2"))
    with pytest.raises(InputError, match=r"config\.json: .*delete the folder step-00000008; --res"):
        train(recipe, output=run, prepared=tiny_text, resume=True)
    shutil.rmtree(file.parent)
    train(recipe, output=run, prepared=tiny_text, resume=True)
    assert_same_run(tmp_path / "whole", run, 8)


def test_one_objective_may_decide_which_is_best(
    tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masked language modeling is best after three steps, the sum after the last."""

    def fake(run: Run) -> dict[str, float]:
        return {"loss/masked_lm": abs(run.step - 3.0), "loss/translation_lm": -10.0 * run.step}

    monkeypatch.setattr(loop, "compute_validation_losses", fake)
    for name, change, best in (("one", "[masked_lm]", 3), ("all", "null", 4)):
        recipe = tiny_recipe(
            "schedule.steps=4",
            "checkpoints.final=best",
            "checkpoints.validate_every=1",
            f"checkpoints.best_by={change}",
        )
        train(recipe, output=tmp_path / name, prepared=tiny_text)
        assert (read_best(tmp_path / name) or ())[0] == best


def test_best_by_one_objective_has_its_lowest_loss(
    tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path
) -> None:
    """With real losses and a learning rate so high that they go up and down."""
    recipe = tiny_recipe(
        "optimizer.learning_rate=0.1",
        "checkpoints.final=best",
        "checkpoints.validate_every=1",
        "checkpoints.keep=1",
        "checkpoints.best_by=[translation_lm]",
    )
    model = train(recipe, output=tmp_path, prepared=tiny_text).model
    rows = [row for row in read_rows(tmp_path) if row["kind"] == "validation"]
    losses = {row["step"]: row["loss/translation_lm"] for row in rows}
    assert list(losses) == list(range(1, 9))
    lowest = min(losses, key=lambda step: losses[step])
    assert read_best(tmp_path) == (lowest, pytest.approx(0.5 * losses[lowest], rel=1e-4))
    weights = read_weights(model)
    kept = read_weights(tmp_path / f"step-{lowest:08d}")
    assert all(torch.equal(weights[name], kept[name]) for name in weights)


def test_best_by_an_objective_without_validation_text_is_an_error(
    tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_stream(objective: Any, *args: Any, **more: Any) -> Any:
        found = run_open(objective, *args, **more)
        return replace(found, validation=None) if objective.settings.kind == "masked_lm" else found

    run_open = run_module.open_stream
    monkeypatch.setattr(run_module, "open_stream", open_stream)
    changes = ["checkpoints.final=best", "schedule.steps=2"]
    with pytest.raises(InputError, match="final=best needs validation text"):
        train(
            tiny_recipe(*changes, "checkpoints.best_by=[masked_lm]"),
            output=tmp_path / "run",
            prepared=tiny_text,
        )
    assert not (tmp_path / "run").exists()
    train(tiny_recipe(*changes), output=tmp_path / "run", prepared=tiny_text)
    assert (read_best(tmp_path / "run") or ())[0] == 2


def test_finished_model_has_the_mean_of_the_last_checkpoints(
    tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = ("average.kind=last", "average.last=3", "checkpoints.every=2", "checkpoints.keep=1")
    recipe = tiny_recipe(*changes)
    train(recipe, output=tmp_path / "straight", prepared=tiny_text)
    folders = sorted((tmp_path / "straight").glob("step-*"))
    assert [int(path.name[-1]) for path in folders] == [4, 6, 8]
    model = read_weights(tmp_path / "straight" / "model")
    parts = [read_weights(folder) for folder in folders]
    for name, value in model.items():
        mean = torch.stack([part[name] for part in parts]).mean(dim=0)
        torch.testing.assert_close(value, mean)
    interrupt_at(monkeypatch, 5, recipe, tiny_text, tmp_path / "resumed")
    train(recipe, output=tmp_path / "resumed", prepared=tiny_text, resume=True)
    assert_same_tensors(tmp_path / "straight" / "model", tmp_path / "resumed" / "model")


def test_training_starts_from_a_checkpoint(
    tiny_recipe: MakeRecipe, tiny_text: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe(
        f"model.start={tiny_folder}", "schedule.steps=2", "optimizer.learning_rate=1e-9"
    )
    model = load_file(
        train(recipe, output=tmp_path, prepared=tiny_text).model / "model.safetensors"
    )
    start = read_weights(tiny_folder)
    assert model.keys() == start.keys()
    assert all(torch.allclose(model[name], start[name], atol=1e-6) for name in start)
    assert json.loads((tmp_path / "model/config.json").read_text())["num_hidden_layers"] == 4


# Errors


@pytest.fixture(scope="module")
def short_run(
    tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "short"
    train(tiny_recipe("schedule.steps=2"), output=folder, prepared=tiny_text)
    return folder


@pytest.fixture(scope="module")
def plain_text(
    tiny_tokenizer: PreTrainedTokenizerFast,
    demo_rows: list[tuple[str, str, str]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Text of one language, and no bitext."""
    folder = tmp_path_factory.mktemp("plain")
    (folder / "en.txt").write_text("".join(f"{row[1]}\n" for row in demo_rows))
    source = TextSource((folder / "en.txt",), ("en",))
    prepare_corpora([source], tiny_tokenizer, folder, rules=CleaningRules())
    return folder


def test_folder_with_a_run_is_an_error(
    short_run: Path, tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path
) -> None:
    before = sorted(short_run.rglob("*"))
    with pytest.raises(InputError, match=r"short: the folder contains a run \(use --resume or"):
        train(tiny_recipe("schedule.steps=2"), output=short_run, prepared=tiny_text)
    assert sorted(short_run.rglob("*")) == before
    with pytest.raises(InputError, match=r"no checkpoint to resume from \(start without"):
        train(tiny_recipe(), output=tmp_path, prepared=tiny_text, resume=True)


def test_file_instead_of_a_folder_is_an_error(
    tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("here")
    for place in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(InputError, match=r"file: this is not a folder"):
            train(tiny_recipe(), output=place, prepared=tiny_text)


@pytest.mark.parametrize("change", ["seed=2", "objectives.0.probability=0.3", "freeze=['*bias']"])
def test_resuming_with_another_recipe_is_an_error(
    change: str, short_run: Path, tiny_recipe: MakeRecipe, tiny_text: Path
) -> None:
    with pytest.raises(InputError, match=r"step-00000002: .* another value of: recipe"):
        train(
            tiny_recipe("schedule.steps=2", change),
            output=short_run,
            prepared=tiny_text,
            resume=True,
        )


def test_resuming_with_other_text_is_an_error(
    short_run: Path, tiny_recipe: MakeRecipe, plain_text: Path
) -> None:
    changes = ("schedule.steps=2", "objectives.1.kind=masked_lm")
    with pytest.raises(InputError, match="translation_lm: there is no bitext"):
        train(tiny_recipe("schedule.steps=2"), output=short_run, prepared=plain_text, resume=True)
    with pytest.raises(InputError, match="another value of: recipe"):
        train(tiny_recipe(*changes), output=short_run, prepared=plain_text, resume=True)


def test_resuming_with_changed_text_is_an_error(
    tiny_recipe: MakeRecipe, tiny_text: Path, plain_text: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe("schedule.steps=2", "objectives=[{kind: masked_lm, batch_tokens: 512}]")
    train(recipe, output=tmp_path, prepared=plain_text)
    with pytest.raises(InputError, match="another value of: text"):
        train(recipe, output=tmp_path, prepared=tiny_text, resume=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["data.leave_out_languages=[en]"], "masked_lm: there is no text with"),
        (["data.max_length=65"], "data.max_length=65 exceeds the model's 64"),
        (["objectives.1.max_length=65"], "translation_lm.max_length=65 exceeds the model's 64"),
        (["objectives.0.batch_tokens=32"], "a batch of 32 tokens cannot hold"),
        (
            ["checkpoints.final=best", "data.validation_examples=0"],
            "final=best needs validation text",
        ),
        (
            ["checkpoints.best_by=[masked_lm, mlm]"],
            "best_by: there is no objective mlm .choose from masked_lm, translation_lm",
        ),
        (["freeze=['*.nope.*']"], "matches no parameter"),
        (["freeze=['*']"], "every parameter is frozen"),
    ],
)
def test_impossible_recipe_is_an_error_before_the_run_starts(
    changes: list[str], message: str, tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        train(tiny_recipe(*changes), output=tmp_path / "run", prepared=tiny_text)
    assert not (tmp_path / "run").exists()


def test_missing_text_is_an_error(
    tiny_recipe: MakeRecipe, plain_text: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"translation_lm: there is no bitext .*\(add a source"):
        train(tiny_recipe(), output=tmp_path, prepared=plain_text)
    with pytest.raises(InputError, match="not a folder of prepared text"):
        train(tiny_recipe(), output=tmp_path / "run", prepared=tmp_path)


def test_text_of_another_vocabulary_is_an_error(
    tiny_recipe: MakeRecipe, tiny_text: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    start = tmp_path / "start"
    shutil.copytree(tiny_folder, start)
    file = start / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    pieces = content["model"]["vocab"]
    pieces[10], pieces[11] = pieces[11], pieces[10]
    file.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(InputError, match="another vocabulary"):
        train(tiny_recipe(f"model.start={start}"), output=tmp_path / "run", prepared=tiny_text)
