"""Runs of contrastive objectives: what is kept, what is thrown away, and several processes."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from calque.errors import InputError
from calque.training.loop import Interrupted, Trainer, train
from calque.training.recipe import Recipe
from calque.training.start import make_accelerator
from calque.training.telemetry import read_metrics

if TYPE_CHECKING:
    from calque.models.encoder import Encoder

MakeRecipe = Callable[..., Recipe]
TrainInTwo = Callable[..., subprocess.CompletedProcess[str]]

SENTENCES = "kind: sentence_contrastive, batch_tokens: 1024"
CHANGES = (
    f"objectives=[{{{SENTENCES}, features: 16, queue: 50, negatives: strong}}]",
    "schedule.steps=6",
    "telemetry.every=2",
)
STATE = "training_state.safetensors"
WEIGHTS = {"extractor.hidden.weight", "extractor.output.weight"}
PARTS = ("contrast", "accuracy", "parameters")
QUEUE = {f"queue.{name}" for name in ("src", "tgt", "src_keys", "tgt_keys", "real")}


@pytest.fixture(scope="module")
def queue_recipe(tiny_recipe: MakeRecipe) -> Recipe:
    """Sentences with features and a queue, dropout, an EMA and the distance to the start."""
    near = "objectives.0.parameter_weight=0.1"
    return tiny_recipe(*CHANGES, near, "average.kind=ema", "average.decay=0.8")


@pytest.fixture(scope="module")
def straight(
    queue_recipe: Recipe, tiny_text: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "straight"
    train(queue_recipe, tiny_text, folder)
    return folder


def read_rows(run: Path) -> list[dict[str, Any]]:
    passing = {"seconds", "tokens_per_second"}
    rows = read_metrics(run / "metrics.jsonl")
    return [{k: v for k, v in row.items() if k not in passing} for row in rows]


def test_the_extractor_and_the_queue_are_kept_in_checkpoints(straight: Path) -> None:
    state = load_file(straight / "step-00000006" / STATE)
    heads = {name for name in state if name.startswith("objectives.")}
    assert heads == {f"objectives.0.{name}" for name in WEIGHTS | QUEUE}
    assert state["objectives.0.queue.real"].all()
    assert state["objectives.0.queue.src"].norm(dim=1).tolist() == pytest.approx([1.0] * 50)
    assert {f"optimizer.objectives.0.{name}.exp_avg" for name in WEIGHTS} <= state.keys()


def test_nothing_of_them_is_in_the_finished_model(straight: Path) -> None:
    from transformers import AutoModelForMaskedLM

    model = straight / "model"
    assert {path.suffix for path in model.iterdir()} <= {".json", ".safetensors", ".model"}
    assert [path.name for path in model.glob("*.safetensors")] == ["model.safetensors"]
    found = load_file(model / "model.safetensors")
    assert not [name for name in found if "extract" in name or "queue" in name]
    for file in model.glob("*.json"):
        if not file.name.startswith("tokenizer"):
            assert "extractor" not in file.read_text("utf-8")
    _, told = AutoModelForMaskedLM.from_pretrained(model, output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]


def test_a_run_with_a_queue_goes_on_bit_identically(
    straight: Path,
    queue_recipe: Recipe,
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
            train(queue_recipe, tiny_text, tmp_path)
    train(queue_recipe, tiny_text, tmp_path, resume=True)
    assert read_rows(straight) == read_rows(tmp_path)
    for file in (f"step-00000006/{STATE}", "model/model.safetensors"):
        one, other = load_file(straight / file), load_file(tmp_path / file)
        assert one.keys() == other.keys()
        assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_figures_are_told(straight: Path) -> None:
    rows = read_rows(straight)
    name = "loss/sentence_contrastive"
    for row in rows:
        found = {key for key in row if key.startswith("loss/")}
        assert found == {name, *(f"{name}/{part}" for part in PARTS)}
        expected = row[f"{name}/contrast"] + 0.1 * row[f"{name}/parameters"]
        assert row[name] == pytest.approx(expected, rel=1e-5)
    assert {row["kind"] for row in rows} == {"train", "validation"}


def test_an_impossible_layer_is_refused_before_anything_is_left(
    tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe(*CHANGES, "objectives.0.layer=3")
    with pytest.raises(InputError, match="layer 3 does not exist"):
        train(recipe, tiny_text, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_head_is_left_as_it_was_where_nothing_uses_it(
    tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path
) -> None:
    changes = (f"objectives=[{{{SENTENCES}, layer: 1}}]", "schedule.steps=2")
    recipe = tiny_recipe(*changes, "optimizer.weight_decay=0.0")
    before = Trainer(recipe, tiny_text, tmp_path / "x").encoder.model.state_dict()
    model = train(recipe, tiny_text, tmp_path / "run")
    assert json.loads((model / "config.json").read_text())["calque"] == {"retrieval_layer": 1}
    after = load_file(model / "model.safetensors")
    for name, value in after.items():
        unused = "lm_head.dense" in name or "lm_head.layer_norm" in name or ".layer.1." in name
        unused = unused or name == "lm_head.bias"
        assert torch.equal(value, before[name]) == unused, name


def test_a_recipe_without_the_newer_keys_is_written_without_them(tiny_recipe: MakeRecipe) -> None:
    old = tiny_recipe().model_dump()["objectives"]
    assert [set(one) & {"batch_examples", "text"} for one in old] == [set(), set()]
    new = tiny_recipe("objectives.0.batch_examples=9", "objectives.1.text=raw")
    assert "batch_examples: 9" in new.to_yaml()
    assert "text: raw" in new.to_yaml()
    assert new.fingerprint() != tiny_recipe().fingerprint()


# Several processes


@pytest.mark.parametrize(
    ("objectives", "unused"),
    [
        (f"{{{SENTENCES}}}", True),
        ("{kind: word_contrastive, parameter_weight: 0.0}", True),
        ("{kind: word_contrastive}", False),  # the distance from the start is of all weights
        (f"{{{SENTENCES}}}, {{kind: masked_lm}}", False),
        ("{kind: translation_lm}", False),
    ],
)
def test_unused_weights_are_looked_for_where_there_are_some(
    objectives: str, unused: bool, tiny_recipe: MakeRecipe, tiny_encoder: Encoder
) -> None:
    """Looking costs time, and PyTorch complains where there are none."""
    recipe = tiny_recipe(f"objectives=[{objectives}]")
    handler = make_accelerator(recipe, tiny_encoder).ddp_handler
    assert handler.find_unused_parameters == unused


# Accelerate shards on GPUs only; torch's fully_shard itself also runs on CPUs, over gloo.


@pytest.fixture(scope="module")
def two_processes(
    tiny_recipe: MakeRecipe,
    tiny_text: Path,
    tmp_path_factory: pytest.TempPathFactory,
    train_in_two: TrainInTwo,
) -> Path:
    folder = tmp_path_factory.mktemp("two")
    done = train_in_two(folder, tiny_recipe(*CHANGES), tiny_text)
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.mark.slow
def test_two_processes_train_although_the_head_is_unused(two_processes: Path) -> None:
    rows = read_rows(two_processes)
    assert [row["step"] for row in rows if row["kind"] == "train"] == [2, 4, 6]
    state = load_file(two_processes / "step-00000006" / STATE)
    assert state["objectives.0.queue.real"].all()


@pytest.mark.slow
def test_shards_in_half_precision_do_nearly_as_copies_in_single(
    two_processes: Path,
    tiny_recipe: MakeRecipe,
    tiny_text: Path,
    tmp_path: Path,
    train_in_two: TrainInTwo,
) -> None:
    changes = ("engine.distributed=fsdp", "engine.precision=bf16")
    done = train_in_two(tmp_path, tiny_recipe(*CHANGES, *changes), tiny_text, sharded=True)
    assert done.returncode == 0, done.stderr
    for row, other in zip(read_rows(tmp_path / "run"), read_rows(two_processes), strict=True):
        assert row["loss/sentence_contrastive"] == pytest.approx(
            other["loss/sentence_contrastive"], rel=2e-2
        )
