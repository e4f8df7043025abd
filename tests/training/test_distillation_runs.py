"""Runs with a teacher: what is kept, what goes on, what several processes and a frozen body do."""

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

from calque.errors import InputError
from calque.models.encoder import Encoder
from calque.models.loading import build_model
from calque.tokens.tokenizer import train_tokenizer
from calque.training.loop import Interrupted, Trainer, train
from calque.training.recipe import Recipe, check_recipe
from calque.training.start import anchor_paths
from calque.training.telemetry import read_metrics

MakeRecipe = Callable[..., Recipe]
TrainInTwo = Callable[..., subprocess.CompletedProcess[str]]
STATE = "training_state.safetensors"
PARTS = ("mlm", "teacher", "share", "unread")


@pytest.fixture(scope="module")
def teacher(
    demo_rows: list[tuple[str, str, str]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A wider English BERT with pieces of its own."""
    from transformers import BertConfig

    tokenizer = train_tokenizer([row[1] for row in demo_rows], 500)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=128,
        pad_token_id=1,
        initializer_range=0.2,
    )
    folder = tmp_path_factory.mktemp("models") / "teacher"
    with torch.random.fork_rng():
        torch.manual_seed(2)
        Encoder(build_model(config), tokenizer).save(folder)
    return folder


@pytest.fixture(scope="module")
def make_recipe(tiny_recipe: MakeRecipe, teacher: Path) -> MakeRecipe:
    """MLM with a teacher, dropout and an EMA."""

    def make(*changes: str, target: str = "tokens") -> Recipe:
        settings = f"kind: distillation, batch_tokens: 1024, teacher: {teacher}, languages: [en]"
        return tiny_recipe(
            f"objectives=[{{{settings}, target: {target}}}]",
            "schedule.steps=6",
            "telemetry.every=2",
            "average.kind=ema",
            "average.decay=0.8",
            *changes,
        )

    return make


@pytest.fixture(scope="module", params=["tokens", "states"])
def target(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def straight(
    make_recipe: MakeRecipe, target: str, tiny_text: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "straight"
    train(make_recipe(target=target), tiny_text, folder)
    return folder


def read_rows(run: Path) -> list[dict[str, Any]]:
    passing = {"seconds", "tokens_per_second"}
    rows = read_metrics(run / "metrics.jsonl")
    return [{k: v for k, v in row.items() if k not in passing} for row in rows]


def test_figures_are_told(straight: Path) -> None:
    rows, name = read_rows(straight), "loss/distillation"
    assert {row["kind"] for row in rows} == {"train", "validation"}
    for row in rows:
        assert {key for key in row if key.startswith("loss/")} == {
            name,
            *(f"{name}/{part}" for part in PARTS),
        }
        assert 0 < row[f"{name}/share"] < 1
        assert row[f"{name}/teacher"] > 0
        assert row[f"{name}/unread"] == 0
        taught = row[f"{name}/share"] * row[f"{name}/teacher"]
        assert row[name] == pytest.approx(row[f"{name}/mlm"] + taught, rel=1e-5)


def test_the_teacher_is_neither_kept_nor_in_the_finished_model(straight: Path, target: str) -> None:
    from transformers import AutoModelForMaskedLM

    state = load_file(straight / "step-00000006" / STATE)
    heads = {name for name in state if name.startswith("objectives.")}
    kept = ("projection.weight", "projection.bias") if target == "states" else ()
    assert heads == {f"objectives.0.{name}" for name in kept}
    for folder in ("model", "step-00000006"):
        found = load_file(straight / folder / "model.safetensors")
        assert not [name for name in found if "teacher" in name or "projection" in name]
        _, told = AutoModelForMaskedLM.from_pretrained(straight / folder, output_loading_info=True)
        assert not told["missing_keys"]
        assert not told["unexpected_keys"]


def test_an_interrupted_run_goes_on_bit_identically(
    straight: Path,
    target: str,
    make_recipe: MakeRecipe,
    tiny_text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    take_step, recipe = Trainer._take_step, make_recipe(target=target)

    def interrupted(self: Trainer, loaders: Any) -> Any:
        if self.step + 1 == 4:
            signal.raise_signal(signal.SIGINT)
        return take_step(self, loaders)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_take_step", interrupted)
        with pytest.raises(Interrupted):
            train(recipe, tiny_text, tmp_path)
    train(recipe, tiny_text, tmp_path, resume=True)
    assert read_rows(straight) == read_rows(tmp_path)
    for file in (f"step-00000006/{STATE}", "model/model.safetensors"):
        one, other = load_file(straight / file), load_file(tmp_path / file)
        assert one.keys() == other.keys()
        assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_workers_build_the_same_batches(
    straight: Path, target: str, make_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path
) -> None:
    train(make_recipe("engine.workers=2", target=target), tiny_text, tmp_path)
    assert read_rows(straight) == read_rows(tmp_path)


def test_a_teacher_of_no_weight_leaves_masked_lm(
    make_recipe: MakeRecipe, tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path
) -> None:
    """The same batches, masks and dropout: XLM and XLM + KD differ in the teacher alone."""
    silent = train(make_recipe("objectives.0.teacher_weight=0.0"), tiny_text, tmp_path / "silent")
    changes = ("schedule.steps=6", "telemetry.every=2", "average.kind=ema", "average.decay=0.8")
    plain = train(
        tiny_recipe("objectives=[{kind: masked_lm, batch_tokens: 1024}]", *changes),
        tiny_text,
        tmp_path / "plain",
    )
    one, other = (load_file(model / "model.safetensors") for model in (silent, plain))
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
    for row, bare in zip(read_rows(silent.parent), read_rows(plain.parent), strict=True):
        assert row["loss/distillation/mlm"] == bare["loss/masked_lm"]


def test_embeddings_learn_beneath_a_frozen_body(
    tiny_recipe: MakeRecipe, tiny_text: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    """As metaxlm-frozen does: layers stay, embeddings and head move."""
    changes = (f"model.start={tiny_folder}", 'freeze=["encoder.model.*.encoder.layer.*"]')
    recipe = tiny_recipe(*changes, "objectives=[{kind: masked_lm, batch_tokens: 512}]")
    after = load_file(train(recipe, tiny_text, tmp_path) / "model.safetensors")
    before = load_file(tiny_folder / "model.safetensors")
    for name, value in after.items():
        assert torch.equal(value, before[name]) == (".encoder.layer." in name), name


def test_a_teacher_is_found_beside_the_recipe(
    make_recipe: MakeRecipe, teacher: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine").symlink_to(teacher)
    recipe = anchor_paths(make_recipe("objectives.0.teacher=mine"), tmp_path)
    assert recipe.objectives[0].teacher == str(teacher.resolve())  # type: ignore[union-attr]
    hub = anchor_paths(make_recipe("objectives.0.teacher=FacebookAI/roberta-base"), tmp_path)
    assert hub.objectives[0].teacher == "FacebookAI/roberta-base"  # type: ignore[union-attr]
    again = check_recipe(hub.model_dump(), "it")
    assert again.fingerprint() == hub.fingerprint() != recipe.fingerprint()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("objectives.0.languages=[xx]", "no text in the teacher's language xx"),
        ("objectives.0.teacher=./nowhere", "./nowhere: no such folder"),
    ],
)
def test_a_run_that_cannot_be_is_refused_before_it_leaves_anything(
    change: str, message: str, make_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        train(make_recipe(change), tiny_text, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_teacher_that_teaches_nothing_is_told(
    make_recipe: MakeRecipe,
    tiny_text: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """English pieces for Japanese text."""
    recipe = make_recipe("objectives.0.languages=[ja]", "schedule.steps=1", "schedule.warmup=0")
    train(recipe, tiny_text, tmp_path)
    told = " ".join(capfd.readouterr().err.split())
    assert "warning: distillation: " in told
    assert "are pieces of the teacher's, too: it teaches little (set target: states" in told


# Several processes


def assert_close_runs(left: Path, right: Path, rel: float = 1e-5) -> None:
    rows, others = read_rows(left), read_rows(right)
    assert len(rows) == len(others)
    for row, other in zip(rows, others, strict=True):
        numbers = {key: value for key, value in row.items() if key != "kind"}
        assert numbers == pytest.approx({key: other[key] for key in numbers}, rel=rel)


# Accelerate shards on GPUs only; torch's fully_shard itself also runs on CPUs, over gloo.


@pytest.mark.slow
def test_two_processes_do_as_one_with_doubled_accumulation(
    target: str,
    make_recipe: MakeRecipe,
    tiny_text: Path,
    tmp_path: Path,
    train_in_two: TrainInTwo,
) -> None:
    """In copies or in shards; the teacher is whole in each of them."""
    recipe = make_recipe(target=target)
    done = train_in_two(tmp_path / "two", recipe, tiny_text)
    assert done.returncode == 0, done.stderr
    two = tmp_path / "two" / "run"
    train(make_recipe("engine.accumulation=2", target=target), tiny_text, tmp_path / "one")
    assert_close_runs(two, tmp_path / "one")
    sharded = make_recipe("engine.distributed=fsdp", target=target)
    done = train_in_two(tmp_path / "shards", sharded, tiny_text, sharded=True)
    assert done.returncode == 0, done.stderr
    assert_close_runs(two, tmp_path / "shards" / "run")
    shutil.rmtree(two / "step-00000006")
    with pytest.raises(InputError, match="another micro-batches a step"):
        train(recipe, tiny_text, two, resume=True)
