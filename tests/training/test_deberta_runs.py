"""Runs that start from DeBERTa: the same bits after an interruption, compiled steps, dropout."""

from __future__ import annotations

import runpy
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForMaskedLM

from calque.errors import InputError
from calque.io.cleaning import CleaningRules
from calque.models.encoder import Encoder
from calque.tokens.prepare import TextSource, prepare_corpora
from calque.training.loop import train
from calque.training.recipe import Recipe
from calque.training.start import build_encoder
from calque.training.step import TrainStep

LOOP = runpy.run_path(str(Path(__file__).with_name("test_loop.py")))
MakeRecipe = Callable[..., Recipe]


@pytest.fixture(scope="module")
def text(
    demo_rows: list[tuple[str, str, str]],
    deberta_encoder: Encoder,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """The demo's German sentences, cut by DeBERTa's tokenizer."""
    file, folder = tmp_path_factory.mktemp("files") / "en-de.tsv", tmp_path_factory.mktemp("text")
    pairs = [f"{english}\t{text}\n" for language, english, text in demo_rows if language == "de"]
    file.write_text("".join(pairs), encoding="utf-8")
    source = TextSource((file,), ("en", "de"))
    prepare_corpora([source], deberta_encoder.tokenizer, folder, rules=CleaningRules())
    return folder


@pytest.fixture(scope="module")
def recipe(tiny_recipe: MakeRecipe, deberta_folder: Path) -> Recipe:
    """Masked and translation language modelling, with dropout, from the folder on."""
    return tiny_recipe(f"model.start={deberta_folder}", "schedule.steps=6")


@pytest.fixture(scope="module")
def straight(recipe: Recipe, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "straight"
    train(recipe, text, folder)
    return folder


def test_an_interrupted_run_goes_on_bit_identically(
    straight: Path, recipe: Recipe, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    LOOP["interrupt_at"](monkeypatch, 4, recipe, text, tmp_path)
    train(recipe, text, tmp_path, resume=True)
    LOOP["assert_same_run"](straight, tmp_path, 6)


def test_what_was_learnt_is_a_plain_model(straight: Path, deberta_folder: Path) -> None:
    model, found = AutoModelForMaskedLM.from_pretrained(
        straight / "model", output_loading_info=True
    )
    assert not any(found.values())
    assert model.cls.predictions.decoder.weight is model.get_input_embeddings().weight
    _, found = AutoModel.from_pretrained(straight / "model", output_loading_info=True)
    assert not found["missing_keys"]
    before = load_file(deberta_folder / "model.safetensors")
    after = load_file(straight / "model" / "model.safetensors")
    assert after.keys() == before.keys()
    assert [name for name in after if torch.equal(after[name], before[name])] == []


def test_a_compiled_step_does_the_same(
    recipe: Recipe,
    tiny_recipe: MakeRecipe,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On one graph an objective, with pairs whose positions count anew."""

    def compile_quickly(step: TrainStep) -> None:
        for objective in step.objectives:
            objective.compile(dynamic=False, fullgraph=True, backend="aot_eager")

    plain = ["model.dropout=0", "model.attention_dropout=0", "schedule.steps=2"]
    plain += [f"model.start={recipe.model.start}", "engine.compile=true", "checkpoints.every=2"]
    with monkeypatch.context() as patch:
        patch.setattr(TrainStep, "compile_objectives", lambda step: None)
        train(tiny_recipe(*plain), text, tmp_path / "plain")
    monkeypatch.setattr(TrainStep, "compile_objectives", compile_quickly)
    train(tiny_recipe(*plain), text, tmp_path / "compiled")
    expected, found = (
        load_file(tmp_path / name / "model" / "model.safetensors") for name in ("plain", "compiled")
    )
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-4, msg=key)


def test_dropout_is_that_of_the_recipe(
    tiny_recipe: MakeRecipe, deberta_folder: Path, deberta_encoder: Encoder
) -> None:
    changes = ("model.dropout=0.3", "model.attention_dropout=0.2", f"model.start={deberta_folder}")
    encoder = build_encoder(tiny_recipe(*changes), deberta_encoder.tokenizer)
    dropouts = {
        name: module.p
        for name, module in encoder.model.named_modules()
        if isinstance(module, torch.nn.Dropout)
    }
    assert {name.rpartition(".")[2] for name in dropouts} == {"dropout", "pos_dropout"}
    for name, share in dropouts.items():
        assert share == (0.2 if name.endswith("attention.self.dropout") else 0.3), name
    assert encoder.config.hidden_dropout_prob == 0.3
    assert encoder.config.attention_probs_dropout_prob == 0.2


def test_text_longer_than_its_window_is_refused(
    tiny_recipe: MakeRecipe, deberta_folder: Path, deberta_encoder: Encoder
) -> None:
    """Distances have no end, but beyond its window the model has not learnt to read."""
    changes = (f"model.start={deberta_folder}", "data.max_length=129")
    with pytest.raises(InputError, match=r"data\.max_length=129 exceeds the model's 128"):
        build_encoder(tiny_recipe(*changes), deberta_encoder.tokenizer)


@pytest.mark.slow
def test_shards_do_as_copies(
    tiny_recipe: MakeRecipe,
    train_in_two: Callable[..., subprocess.CompletedProcess[str]],
    deberta_folder: Path,
    text: Path,
    tmp_path: Path,
) -> None:
    """Distances are embedded outside the layers, in weights that are shards, too."""
    changes = [f"model.start={deberta_folder}", "schedule.steps=3", "model.dropout=0"]
    changes += ["model.attention_dropout=0"]
    for kind in ("ddp", "fsdp"):
        recipe = tiny_recipe(*changes, f"engine.distributed={kind}")
        done = train_in_two(tmp_path / kind, recipe, text, sharded=kind == "fsdp")
        assert done.returncode == 0, done.stderr
    LOOP["assert_close_runs"](tmp_path / "ddp" / "run", tmp_path / "fsdp" / "run")
