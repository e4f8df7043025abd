"""Weights of an objective's own: trained, kept, resumed, frozen, and never part of the model."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from calque.training.loop import Interrupted, Trainer, train
from calque.training.recipe import Recipe
from calque.training.telemetry import read_metrics

MakeRecipe = Callable[..., Recipe]
TrainInTwo = Callable[..., subprocess.CompletedProcess[str]]

POINTER = {"pointer.query.weight", "pointer.query.bias", "pointer.key.weight"}
CHANGES = (
    "objectives.1={kind: denoising_alignment, batch_tokens: 1024, weight: 0.5}",
    "schedule.steps=6",
    "telemetry.every=2",
)


@pytest.fixture(scope="module")
def align_recipe(tiny_recipe: MakeRecipe) -> Recipe:
    """MLM, TLM and the pointer, with dropout and an EMA."""
    return tiny_recipe(*CHANGES, "average.kind=ema", "average.decay=0.8")


@pytest.fixture(scope="module")
def straight(
    align_recipe: Recipe, tiny_text: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "straight"
    train(align_recipe, tiny_text, folder)
    return folder


def read_state(run: Path, step: int = 6) -> dict[str, Tensor]:
    return load_file(run / f"step-{step:08d}" / "training_state.safetensors")


def read_rows(run: Path) -> list[dict[str, Any]]:
    passing = {"seconds", "tokens_per_second"}
    rows = read_metrics(run / "metrics.jsonl")
    return [{k: v for k, v in row.items() if k not in passing} for row in rows]


def pointer_at_start(recipe: Recipe, text: Path, folder: Path) -> dict[str, Tensor]:
    objective = Trainer(recipe, text, folder).module.objectives[1]
    return {f"objectives.1.{name}": value.detach() for name, value in objective.named_parameters()}


def test_the_pointer_is_trained_and_kept_beside_the_model(
    straight: Path, align_recipe: Recipe, tiny_text: Path, tmp_path: Path
) -> None:
    state = read_state(straight)
    before = pointer_at_start(align_recipe, tiny_text, tmp_path)
    assert before.keys() == {f"objectives.1.{name}" for name in POINTER}
    for name, value in before.items():
        assert not torch.equal(state[name], value), name
        for moment in ("exp_avg", "exp_avg_sq"):
            assert state[f"optimizer.{name}.{moment}"].ne(0).any()
    again = pointer_at_start(align_recipe, tiny_text, tmp_path)
    assert all(torch.equal(again[name], value) for name, value in before.items())


def test_the_finished_model_and_the_average_are_the_encoder_alone(straight: Path) -> None:
    from transformers import AutoModelForMaskedLM

    for folder in ("model", "step-00000006"):
        assert not [n for n in load_file(straight / folder / "model.safetensors") if "point" in n]
        _, found = AutoModelForMaskedLM.from_pretrained(straight / folder, output_loading_info=True)
        assert not found["missing_keys"]
        assert not found["unexpected_keys"]
    averaged = [name for name in read_state(straight) if name.startswith("average.")]
    assert averaged
    assert not [name for name in averaged if "point" in name]
    text = {path.suffix for path in (straight / "model").iterdir()}
    assert text <= {".json", ".safetensors", ".model"}


def test_figures_are_told(straight: Path) -> None:
    rows = read_rows(straight)
    names = {"", "/tlm", "/pointer", "/labelled", "/diagonal"}
    for row in rows:
        found = {key for key in row if key.startswith("loss/denoising_alignment")}
        assert found == {f"loss/denoising_alignment{name}" for name in names}
        parts = [row[f"loss/denoising_alignment/{part}"] for part in ("tlm", "pointer")]
        assert row["loss/denoising_alignment"] == pytest.approx(sum(parts), rel=1e-5)
        assert 0 < row["loss/denoising_alignment/labelled"] <= 1
        assert 0 < row["loss/denoising_alignment/diagonal"] < 1
    assert {row["kind"] for row in rows} == {"train", "validation"}


def test_an_interrupted_run_goes_on_bit_identically(
    straight: Path,
    align_recipe: Recipe,
    tiny_text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    take_step = Trainer._take_step

    def interrupted(self: Trainer, loaders: Any) -> Any:
        if self.step + 1 == 4:
            signal.raise_signal(signal.SIGINT)
        return take_step(self, loaders)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_take_step", interrupted)
        with pytest.raises(Interrupted):
            train(align_recipe, tiny_text, tmp_path)
    train(align_recipe, tiny_text, tmp_path, resume=True)
    assert_same_run(straight, tmp_path)


def assert_same_run(left: Path, right: Path) -> None:
    assert read_rows(left) == read_rows(right)
    for name in ("step-00000006", "model"):
        for file in sorted((left / name).glob("*.safetensors")):
            one, other = load_file(file), load_file(right / name / file.name)
            assert one.keys() == other.keys()
            assert [key for key in one if not torch.equal(one[key], other[key])] == []


def test_a_frozen_pointer_stays_as_it_was(
    tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe(*CHANGES, "schedule.steps=2", "freeze=['objectives.*']")
    before = pointer_at_start(recipe, tiny_text, tmp_path / "start")
    train(recipe, tiny_text, tmp_path / "run")
    state = read_state(tmp_path / "run", 2)
    assert all(torch.equal(state[name], value) for name, value in before.items())
    assert not [name for name in state if name.startswith("optimizer.objectives.")]


def test_the_pointer_may_be_trained_alone(
    tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe(*CHANGES, "schedule.steps=2", "freeze=['encoder.*']")
    train(recipe, tiny_text, tmp_path)
    state = read_state(tmp_path, 2)
    trained = {name.removesuffix(".exp_avg") for name in state if name.endswith(".exp_avg")}
    assert trained == {f"optimizer.objectives.1.{name}" for name in POINTER}


def test_random_weights_are_warned_of_once(
    straight: Path,
    align_recipe: Recipe,
    tiny_text: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    train(align_recipe, tiny_text, run)
    warnings = [line for line in capfd.readouterr().err.splitlines() if "warning" in line]
    assert len(warnings) == 1
    assert warnings[0].startswith("warning: denoising_alignment: the self-labels are no better")
    shutil.rmtree(run / "step-00000006")
    train(align_recipe, tiny_text, run, resume=True)
    assert "warning" not in capfd.readouterr().err
    assert_same_run(straight, run)


# Several processes. Accelerate shards on GPUs only; torch's fully_shard itself also runs on CPUs.


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_do_as_one_with_doubled_accumulation(
    kind: str,
    tiny_recipe: MakeRecipe,
    tiny_text: Path,
    tmp_path: Path,
    train_in_two: TrainInTwo,
) -> None:
    recipe = tiny_recipe(*CHANGES, f"engine.distributed={kind}")
    done = train_in_two(tmp_path / "two", recipe, tiny_text, sharded=kind == "fsdp")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("warning: denoising_alignment: the self-labels") == 1, done.stderr
    two = tmp_path / "two" / "run"
    train(tiny_recipe(*CHANGES, "engine.accumulation=2"), tiny_text, tmp_path / "one")
    for row, other in zip(read_rows(two), read_rows(tmp_path / "one"), strict=True):
        assert row.pop("kind") == other.pop("kind")
        # One link more or less, by rounding, is allowed.
        assert row == pytest.approx(other, rel=2e-3)
    state, expected = read_state(two), read_state(tmp_path / "one")
    assert state.keys() == expected.keys()
    for name in POINTER:
        whole = state[f"objectives.1.{name}"]
        assert torch.allclose(whole, expected[f"objectives.1.{name}"], atol=1e-3), name
