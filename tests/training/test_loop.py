"""The loop: bit-identical resumption, processes that agree, divergence, and what a run leaves."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from calque.cli import run as run_cli
from calque.errors import InputError
from calque.io.cleaning import CleaningRules
from calque.models.encoder import Encoder
from calque.objectives.masked_lm import MaskedLM
from calque.tokens.prepare import TextSource, prepare_corpora
from calque.training import loop
from calque.training.loop import Interrupted, Trainer, train
from calque.training.recipe import Recipe
from calque.training.start import build_encoder, open_text
from calque.training.telemetry import read_metrics
from calque.types import LossTerms

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MakeRecipe = Callable[..., Recipe]

CHANGING = {"seconds", "tokens_per_second"}
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def read_rows(run: Path) -> list[dict[str, Any]]:
    """What a run told, without the time it took."""
    rows = read_metrics(run / "metrics.jsonl")
    return [{k: v for k, v in row.items() if k not in CHANGING} for row in rows]


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Weights, optimizer moments and averages of a checkpoint or a model."""
    return {
        f"{file.name}: {name}": value
        for file in sorted(folder.glob("*.safetensors"))
        for name, value in load_file(file).items()
    }


def assert_same_tensors(left: Path, right: Path) -> None:
    one, other = read_tensors(left), read_tensors(right)
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def assert_same_run(left: Path, right: Path, step: int) -> None:
    """Losses, weights, moments, averages and the finished model, bit for bit."""
    assert read_rows(left) == read_rows(right)
    for name in (f"step-{step:08d}", "model"):
        assert_same_tensors(left / name, right / name)


def do_at_step(monkeypatch: pytest.MonkeyPatch, step: int, act: Callable[[], object]) -> None:
    """Act while the trainer takes a step."""
    take_step = Trainer._take_step

    def watched(self: Trainer, loaders: Any) -> Any:
        if self.step + 1 == step:
            act()
        return take_step(self, loaders)

    monkeypatch.setattr(Trainer, "_take_step", watched)


def interrupt_at(monkeypatch: pytest.MonkeyPatch, step: int, *arguments: Any) -> None:
    with monkeypatch.context() as patch:
        do_at_step(patch, step, lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(Interrupted, match=f"stopped and saved at step {step}; .*--resume"):
            train(*arguments)


@pytest.fixture(scope="module")
def ema_recipe(tiny_recipe: MakeRecipe) -> Recipe:
    """Dropout, two objectives, EMA, and rows and checkpoints out of step with each other."""
    return tiny_recipe("average.kind=ema", "average.decay=0.8", "telemetry.every=2")


@pytest.fixture(scope="module")
def straight(ema_recipe: Recipe, tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight steps in one go."""
    folder = tmp_path_factory.mktemp("runs") / "straight"
    train(ema_recipe, tiny_text, folder)
    return folder


# Resuming


@pytest.mark.parametrize("step", [5, 4])
def test_an_interrupted_run_goes_on_bit_identically(
    step: int,
    straight: Path,
    ema_recipe: Recipe,
    tiny_text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interrupt_at(monkeypatch, step, ema_recipe, tiny_text, tmp_path)
    assert not (tmp_path / "model").exists()
    assert train(ema_recipe, tiny_text, tmp_path, resume=True) == tmp_path / "model"
    assert_same_run(straight, tmp_path, 8)


KILLED = """
import os, signal, sys
from pathlib import Path
from calque.training.loop import Trainer, train
from calque.training.recipe import load_recipe
take_step = Trainer._take_step
def watched(self, loaders):
    if self.step == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return take_step(self, loaders)
Trainer._take_step = watched
train(load_recipe(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
"""


@pytest.mark.slow
def test_a_killed_run_goes_on_bit_identically(
    straight: Path, ema_recipe: Recipe, tiny_text: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    arguments = map(str, (straight / "recipe.yaml", tiny_text, run))
    command = [sys.executable, "-c", KILLED, *arguments]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL
    assert [path.name for path in run.glob("step-*")] == ["step-00000003"]
    assert read_rows(run)[-1]["step"] == 4
    train(ema_recipe, tiny_text, run, resume=True)
    assert_same_run(straight, run, 8)


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_ctrl_c_saves_and_exits_130_and_the_run_goes_on(
    tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The signal reaches the whole group, as from a terminal: the loading workers too."""
    recipe = tmp_path / "r.yaml"
    changes = ("schedule.steps=60", "checkpoints.every=1000", "checkpoints.validate_every=1000")
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
    assert 2 < step < 60
    assert f"stopped and saved at step {step}; go on with --resume" in error
    assert "Traceback" not in error
    assert run_cli([*arguments, str(tmp_path / "run"), "--resume"]) == 0
    assert f"{tmp_path / 'run' / 'model'}: the finished model" in capfd.readouterr().err
    assert run_cli([*arguments, str(tmp_path / "whole")]) == 0
    assert_same_run(tmp_path / "whole", tmp_path / "run", 60)


def test_an_interruption_at_the_last_step_still_finishes(
    tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    do_at_step(monkeypatch, 3, lambda: signal.raise_signal(signal.SIGTERM))
    model = train(tiny_recipe("schedule.steps=3"), tiny_text, tmp_path)
    assert (model / "model.safetensors").exists()


def test_a_finished_run_is_finished_again(
    straight: Path, ema_recipe: Recipe, tiny_text: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(straight, run)
    shutil.rmtree(run / "model")
    train(ema_recipe, tiny_text, run, resume=True)
    assert_same_run(straight, run, 8)


def test_validation_leaves_training_alone(
    straight: Path, ema_recipe: Recipe, tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path
) -> None:
    changes = ("average.kind=ema", "average.decay=0.8", "telemetry.every=2")
    often = tiny_recipe(*changes, "checkpoints.validate_every=1")
    assert often.fingerprint() == ema_recipe.fingerprint()
    train(often, tiny_text, tmp_path)
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


# Several processes


def launch(script: list[str], *arguments: object) -> None:
    """Run two processes under torchrun."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    command = [*launcher, "--master_port", str(_free_port()), *script, *map(str, arguments)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def assert_close_runs(left: Path, right: Path) -> None:
    """Compare all figures to 1e-5 relative, and counts of tokens exactly."""
    rows, others = read_rows(left), read_rows(right)
    assert len(rows) == len(others)
    for row, other in zip(rows, others, strict=True):
        assert row.keys() == other.keys()
        assert row.get("tokens") == other.get("tokens")
        numbers = {key: value for key, value in row.items() if key != "kind"}
        assert numbers == pytest.approx({key: other[key] for key in numbers}, rel=1e-5)


@pytest.fixture(scope="module")
def two_processes(
    tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("two")
    (folder / "r.yaml").write_text(tiny_recipe().to_yaml())
    options = ("-o", folder / "run", "--prepared", tiny_text)
    launch(["-m", "calque", "train"], folder / "r.yaml", *options)
    return folder / "run"


@pytest.mark.slow
def test_two_processes_do_as_one_with_doubled_accumulation(
    two_processes: Path, tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path
) -> None:
    train(tiny_recipe("engine.accumulation=2"), tiny_text, tmp_path)
    assert_close_runs(two_processes, tmp_path)


@pytest.mark.slow
def test_one_process_goes_on_for_two(
    two_processes: Path, tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(two_processes, run)
    shutil.rmtree(run / "step-00000008")
    with pytest.raises(InputError, match="another micro-batches a step"):
        train(tiny_recipe(), tiny_text, run, resume=True)
    train(tiny_recipe("engine.accumulation=2"), tiny_text, run, resume=True)
    assert_close_runs(two_processes, run)


# Accelerate shards on GPUs only; torch's fully_shard itself also runs on CPUs, over gloo.
SHARDED = """
from accelerate import PartialState
from accelerate.utils import DistributedType
PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
from calque.cli import main
main()
"""


@pytest.mark.slow
def test_fsdp_does_as_ddp_and_goes_on_bit_identically(
    two_processes: Path, tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path
) -> None:
    from transformers import AutoModel, AutoModelForMaskedLM

    (tmp_path / "main.py").write_text(SHARDED)
    recipe, run = tmp_path / "r.yaml", tmp_path / "run"
    recipe.write_text(tiny_recipe("engine.distributed=fsdp").to_yaml())
    script = [str(tmp_path / "main.py"), "train"]
    options = (recipe, "-o", run, "--prepared", tiny_text)
    launch(script, *options)
    assert_close_runs(two_processes, run)
    model, found = AutoModelForMaskedLM.from_pretrained(run / "model", output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    AutoModel.from_pretrained(run / "model")
    expected = AutoModelForMaskedLM.from_pretrained(two_processes / "model").state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-5)

    again = tmp_path / "again"
    shutil.copytree(run, again)
    shutil.rmtree(again / "step-00000008")
    shutil.rmtree(again / "model")
    launch(script, recipe, "-o", again, "--prepared", tiny_text, "--resume")
    assert_same_run(run, again, 8)


def test_fsdp_on_one_process_is_plain(
    tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path
) -> None:
    for kind in ("ddp", "fsdp"):
        recipe = tiny_recipe(f"engine.distributed={kind}", "schedule.steps=2")
        train(recipe, tiny_text, tmp_path / kind)
    assert_same_run(tmp_path / "ddp", tmp_path / "fsdp", 2)


# Divergence


def all_finite(run: Path) -> bool:
    folders = [path for path in run.iterdir() if path.is_dir()]
    return all(bool(t.isfinite().all()) for path in folders for t in read_tensors(path).values())


def test_a_nan_loss_stops_and_names_objective_step_and_batch(
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
        train(recipe, tiny_text, tmp_path)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [
        "step-00000001",
        "step-00000002",
    ]
    assert all_finite(tmp_path)
    assert not (tmp_path / "model").exists()


def test_a_run_that_diverges_leaves_no_nan(
    tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path
) -> None:
    changes = ("optimizer.learning_rate=1e37", "schedule.warmup=0", "checkpoints.every=1")
    recipe = tiny_recipe(*changes, "checkpoints.validate_every=1", "checkpoints.final=best")
    with pytest.raises(InputError, match=r"is not finite at step \d"):
        train(recipe, tiny_text, tmp_path)
    assert all_finite(tmp_path)
    best = tmp_path / "best.json"
    assert not best.exists() or json.loads(best.read_text())["score"] < float("inf")


# What a run leaves


def initial_weights(recipe: Recipe, text: Path) -> dict[str, Tensor]:
    return dict(build_encoder(recipe, open_text(text)[1]).model.state_dict())


def test_a_finished_model_is_plain_hugging_face(straight: Path, ema_recipe: Recipe) -> None:
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


def test_the_averaged_weights_are_the_finished_model(straight: Path) -> None:
    averaged = load_file(straight / "step-00000008" / "training_state.safetensors")
    model = load_file(straight / "model" / "model.safetensors")
    last = load_file(straight / "step-00000008" / "model.safetensors")
    tied = averaged["average.model.lm_head.decoder.weight"]  # a shared weight is kept once
    for name, value in model.items():
        assert torch.equal(value, averaged.get(f"average.model.{name}", tied)), name
    assert not all(torch.equal(model[name], last[name]) for name in model)


def test_the_last_weights_are_the_finished_model_in_the_type_asked_for(
    tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe("schedule.steps=3", "checkpoints.dtype=float16")
    model = load_file(train(recipe, tiny_text, tmp_path) / "model.safetensors")
    last = load_file(tmp_path / "step-00000003" / "model.safetensors")
    assert model.keys() == last.keys()
    assert all(torch.equal(model[name], last[name].half()) for name in model)
    assert json.loads((tmp_path / "model/config.json").read_text())["dtype"] == "float16"


def test_frozen_weights_stay(tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path) -> None:
    changes = ('freeze=["*.embeddings.*", "*.layer.0.*"]', "schedule.steps=3")
    recipe = tiny_recipe(*changes, "average.kind=ema")
    before = initial_weights(recipe, tiny_text)
    after = load_file(train(recipe, tiny_text, tmp_path) / "model.safetensors")
    for name, value in after.items():
        is_frozen = ".embeddings." in name or ".layer.0." in name
        assert torch.equal(value, before[name]) == is_frozen, name


def test_the_best_validation_is_the_finished_model(
    tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = {1: float("nan"), 2: 5.0, 3: 5.5, 4: 4.0, 5: 4.1, 6: 4.3, 7: 4.2, 8: 4.5}

    def fake(run: Trainer) -> dict[str, float]:
        return {"loss/masked_lm": losses[run.step], "loss/translation_lm": 1.0}

    monkeypatch.setattr(loop, "validate", fake)
    changes = ("checkpoints.final=best", "checkpoints.validate_every=1", "checkpoints.keep=1")
    recipe = tiny_recipe(*changes, "checkpoints.every=3")
    interrupt_at(monkeypatch, 5, recipe, tiny_text, tmp_path)
    train(recipe, tiny_text, tmp_path, resume=True)
    assert json.loads((tmp_path / "best.json").read_text()) == {"step": 4, "score": 4.5}
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [
        "step-00000004",
        "step-00000008",
    ]
    model = load_file(tmp_path / "model" / "model.safetensors")
    best = load_file(tmp_path / "step-00000004" / "model.safetensors")
    assert all(torch.equal(model[name], best[name]) for name in model)


def test_a_best_that_was_removed_is_forgotten(
    tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path
) -> None:
    """Who removes the checkpoints to begin anew leaves the mark of the best, which none beats."""
    (tmp_path / "best.json").write_text('{"step": 1, "score": 0.1}')
    recipe = tiny_recipe("checkpoints.final=best", "checkpoints.validate_every=2")
    model = train(recipe, tiny_text, tmp_path)
    best = json.loads((tmp_path / "best.json").read_text())
    assert best["score"] > 0.1
    chosen = load_file(tmp_path / f"step-{best['step']:08d}" / "model.safetensors")
    assert all(torch.equal(v, chosen[k]) for k, v in load_file(model / "model.safetensors").items())


def test_one_objective_may_decide_which_is_best(
    tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masked language modelling is best after three steps, all together after the last."""

    def fake(run: Trainer) -> dict[str, float]:
        return {"loss/masked_lm": abs(run.step - 3.0), "loss/translation_lm": -10.0 * run.step}

    monkeypatch.setattr(loop, "validate", fake)
    for name, change, best in (("one", "[masked_lm]", 3), ("all", "null", 4)):
        recipe = tiny_recipe(
            "schedule.steps=4",
            "checkpoints.final=best",
            "checkpoints.validate_every=1",
            f"checkpoints.best_by={change}",
        )
        train(recipe, tiny_text, tmp_path / name)
        assert json.loads((tmp_path / name / "best.json").read_text())["step"] == best


def test_the_best_by_one_objective_is_where_its_own_loss_was_lowest(
    tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path
) -> None:
    """With real losses, at a rate so high that they go up and down; the score has its weight."""
    recipe = tiny_recipe(
        "optimizer.learning_rate=0.1",
        "checkpoints.final=best",
        "checkpoints.validate_every=1",
        "checkpoints.keep=1",
        "checkpoints.best_by=[translation_lm]",
    )
    model = train(recipe, tiny_text, tmp_path)
    rows = [row for row in read_rows(tmp_path) if row["kind"] == "validation"]
    losses = {row["step"]: row["loss/translation_lm"] for row in rows}
    assert list(losses) == list(range(1, 9))
    lowest = min(losses, key=lambda step: losses[step])
    best = json.loads((tmp_path / "best.json").read_text())
    assert best == {"step": lowest, "score": pytest.approx(0.5 * losses[lowest], rel=1e-4)}
    weights = load_file(model / "model.safetensors")
    kept = load_file(tmp_path / f"step-{lowest:08d}" / "model.safetensors")
    assert all(torch.equal(weights[name], kept[name]) for name in weights)


def test_the_best_cannot_be_told_by_an_objective_without_validation(
    tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from calque.training import run

    def open_stream(objective: Any, *args: Any, **more: Any) -> Any:
        found = run_open(objective, *args, **more)
        return replace(found, validation=None) if objective.settings.kind == "masked_lm" else found

    run_open = run.open_stream
    monkeypatch.setattr(run, "open_stream", open_stream)
    changes = ["checkpoints.final=best", "schedule.steps=2"]
    with pytest.raises(InputError, match="no text is kept for validation"):
        train(tiny_recipe(*changes, "checkpoints.best_by=[masked_lm]"), tiny_text, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    train(tiny_recipe(*changes), tiny_text, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "best.json").read_text())["step"] == 2


def test_the_mean_of_the_last_checkpoints_is_the_finished_model(
    tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = ("average.kind=last", "average.last=3", "checkpoints.every=2", "checkpoints.keep=1")
    recipe = tiny_recipe(*changes)
    train(recipe, tiny_text, tmp_path / "straight")
    folders = sorted((tmp_path / "straight").glob("step-*"))
    assert [int(path.name[-1]) for path in folders] == [4, 6, 8]
    model = load_file(tmp_path / "straight" / "model" / "model.safetensors")
    parts = [load_file(folder / "model.safetensors") for folder in folders]
    for name, value in model.items():
        mean = torch.stack([part[name] for part in parts]).mean(dim=0)
        torch.testing.assert_close(value, mean)
    interrupt_at(monkeypatch, 5, recipe, tiny_text, tmp_path / "resumed")
    train(recipe, tiny_text, tmp_path / "resumed", resume=True)
    assert_same_tensors(tmp_path / "straight" / "model", tmp_path / "resumed" / "model")


def test_training_starts_from_a_checkpoint(
    tiny_recipe: MakeRecipe, tiny_text: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe(
        f"model.start={tiny_folder}", "schedule.steps=2", "optimizer.learning_rate=1e-9"
    )
    model = load_file(train(recipe, tiny_text, tmp_path) / "model.safetensors")
    start = load_file(tiny_folder / "model.safetensors")
    assert model.keys() == start.keys()
    assert all(torch.allclose(model[name], start[name], atol=1e-6) for name in start)
    assert json.loads((tmp_path / "model/config.json").read_text())["num_hidden_layers"] == 4


# What is refused


@pytest.fixture(scope="module")
def short_run(
    tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "short"
    train(tiny_recipe("schedule.steps=2"), tiny_text, folder)
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


def test_a_used_folder_is_refused(
    short_run: Path, tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path
) -> None:
    before = sorted(short_run.rglob("*"))
    with pytest.raises(InputError, match=r"short: this folder holds a run \(give --resume or"):
        train(tiny_recipe("schedule.steps=2"), tiny_text, short_run)
    assert sorted(short_run.rglob("*")) == before
    with pytest.raises(InputError, match=r"no checkpoint to resume from \(drop --resume\)"):
        train(tiny_recipe(), tiny_text, tmp_path, resume=True)


def test_a_folder_that_cannot_be_is_refused(
    tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("here")
    for place in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(InputError, match=r"file: is not a folder \(give another name\)"):
            train(tiny_recipe(), tiny_text, place)


@pytest.mark.parametrize("change", ["seed=2", "objectives.0.probability=0.3", "freeze=['*bias']"])
def test_another_recipe_is_refused(
    change: str, short_run: Path, tiny_recipe: MakeRecipe, tiny_text: Path
) -> None:
    with pytest.raises(InputError, match=r"step-00000002: this run was made with another recipe"):
        train(tiny_recipe("schedule.steps=2", change), tiny_text, short_run, resume=True)


def test_other_text_is_refused(short_run: Path, tiny_recipe: MakeRecipe, plain_text: Path) -> None:
    changes = ("schedule.steps=2", "objectives.1.kind=masked_lm")
    with pytest.raises(InputError, match="translation_lm: no bitext"):
        train(tiny_recipe("schedule.steps=2"), plain_text, short_run, resume=True)
    with pytest.raises(InputError, match="made with another recipe"):
        train(tiny_recipe(*changes), plain_text, short_run, resume=True)


def test_text_that_changed_is_refused(
    tiny_recipe: MakeRecipe, tiny_text: Path, plain_text: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe("schedule.steps=2", "objectives=[{kind: masked_lm, batch_tokens: 512}]")
    train(recipe, plain_text, tmp_path)
    with pytest.raises(InputError, match="made with another text"):
        train(recipe, tiny_text, tmp_path, resume=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["data.leave_out_languages=[en]"], "masked_lm: no text of at most 64 tokens"),
        (["data.max_length=65"], "data.max_length=65 exceeds the model's 64"),
        (["objectives.0.batch_tokens=32"], "a batch of 32 tokens cannot hold"),
        (
            ["checkpoints.final=best", "data.validation_examples=0"],
            "no text is kept for validation",
        ),
        (
            ["checkpoints.best_by=[masked_lm, mlm]"],
            "best_by: no objective is called mlm .choose from masked_lm, translation_lm",
        ),
        (["freeze=['*.nope.*']"], "matches no parameter"),
        (["freeze=['*']"], "every parameter is frozen"),
    ],
)
def test_a_run_that_cannot_be_is_refused_before_it_leaves_anything(
    changes: list[str], message: str, tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        train(tiny_recipe(*changes), tiny_text, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_stream_with_no_text_is_refused(
    tiny_recipe: MakeRecipe, plain_text: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"translation_lm: no bitext .*\(add a source of bitext"):
        train(tiny_recipe(), plain_text, tmp_path)
    with pytest.raises(InputError, match="not a folder of prepared text"):
        train(tiny_recipe(), tmp_path, tmp_path / "run")


def test_another_vocabulary_is_refused(
    tiny_recipe: MakeRecipe, tiny_text: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text"
    shutil.copytree(tiny_text, text)
    file = text / "tokenizer" / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    pieces = content["model"]["vocab"]
    pieces[10], pieces[11] = pieces[11], pieces[10]
    file.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(InputError, match="another vocabulary"):
        train(tiny_recipe(f"model.start={tiny_folder}"), text, tmp_path / "run")


@pytest.fixture(autouse=True)
def _no_leftover_signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is before
