"""VECO in the training loop: first the cross-attention alone, then all; stopped and resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from calque.errors import InputError
from calque.io.cleaning import CleaningRules
from calque.models.encoder import Encoder
from calque.models.veco import Veco
from calque.tokens.prepare import TextSource, prepare_corpora
from calque.training.loop import Interrupted, Trainer, train
from calque.training.recipe import Recipe
from calque.training.step import TrainStep
from calque.training.telemetry import read_metrics

PLUG = ".crossattention."
OBJECTIVES = (
    "objectives=[{kind: cross_attention_lm, batch_tokens: 512, probability: 0.25},"
    " {kind: translation_lm, batch_tokens: 512, probability: 0.25}]"
)
CHANGES = (
    OBJECTIVES,
    "model.cross_attention=self",
    "freeze=['encoder.*', '!*.crossattention.*']",
    "freeze_steps=4",
    "checkpoints.keep=9",
    "checkpoints.every=2",
)


def weights_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[bool, set[bool]]:
    """Whether weights have changed, those of the cross-attention and the others."""
    found: dict[bool, set[bool]] = {True: set(), False: set()}
    for name, value in after.items():
        found[PLUG in name].add(not torch.equal(value, before[name]))
    return found


@pytest.fixture(scope="module")
def run(
    tiny_recipe: Callable[..., Recipe], tiny_text: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "veco"
    train(tiny_recipe(*CHANGES), tiny_text, folder)
    return folder


def test_the_cross_attention_learns_first_and_then_all(
    run: Path, tiny_recipe: Callable[..., Recipe], tiny_text: Path, tmp_path: Path
) -> None:
    start = Trainer(tiny_recipe(*CHANGES), tiny_text, tmp_path).encoder.model.state_dict()
    steps = [weights_of(run / f"step-0000000{step}") for step in (2, 4, 6, 8)]
    assert moved(start, steps[0]) == {True: {True}, False: {False}}
    assert moved(steps[0], steps[1]) == {True: {True}, False: {False}}
    assert moved(steps[1], steps[2]) == {True: {True}, False: {True}}


def test_a_compiled_step_learns_first_a_part_and_then_all(
    tiny_recipe: Callable[..., Recipe],
    tiny_text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PyTorch 2.11 goes on with the gradients of the first steps if nobody tells it."""

    def compile_quickly(step: TrainStep) -> None:
        for objective in step.objectives:
            objective.compile(dynamic=False, backend="aot_eager")

    monkeypatch.setattr(TrainStep, "compile_objectives", compile_quickly)
    run = tmp_path / "run"
    train(tiny_recipe(*CHANGES, "engine.compile=true"), tiny_text, run)
    steps = [weights_of(run / f"step-0000000{step}") for step in (2, 4, 6)]
    assert moved(steps[0], steps[1]) == {True: {True}, False: {False}}
    assert moved(steps[1], steps[2]) == {True: {True}, False: {True}}


def test_both_folders_are_written(run: Path) -> None:
    last = weights_of(run / "step-00000008")
    plain, full = weights_of(run / "model"), weights_of(run / "model" / "veco")
    assert full.keys() == last.keys()
    assert plain.keys() == {name for name in last if PLUG not in name}
    assert all(torch.equal(value, last[name]) for name, value in (plain | full).items())
    for kind, folder in (
        (AutoModelForMaskedLM, run / "model"),
        (AutoModelForCausalLM, run / "model" / "veco"),
        (AutoModelForCausalLM, run / "step-00000006"),
    ):
        _, info = kind.from_pretrained(folder, output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
    assert type(Encoder.load(run / "model")) is Encoder
    assert Veco.load(run / "model").model.config.is_decoder


def test_the_terms_are_told(run: Path) -> None:
    rows = [row for row in read_metrics(run / "metrics.jsonl") if row["kind"] == "train"]
    assert len(rows) == 8
    for term in ("left", "right", "left_with_right", "right_with_left"):
        assert all(row[f"loss/cross_attention_lm/{term}"] > 0 for row in rows)


@pytest.mark.parametrize("stop_at", [2, 4, 5])
def test_a_resumed_run_ends_in_the_same_bits(
    stop_at: int,
    run: Path,
    tiny_recipe: Callable[..., Recipe],
    tiny_text: Path,
    tmp_path: Path,
) -> None:
    """Stopped while the rest is frozen, when that ends, and after."""
    recipe = tiny_recipe(*CHANGES)
    trainer = Trainer(recipe, tiny_text, tmp_path)
    take_step = trainer._take_step

    def stop_in_time(loaders: Any) -> Any:
        figures = take_step(loaders)
        trainer.stop.made = trainer.step + 1 == stop_at
        return figures

    trainer._take_step = stop_in_time  # type: ignore[method-assign]
    with pytest.raises(Interrupted):
        trainer.run()
    train(recipe, tiny_text, tmp_path, resume=True)
    found, expected = weights_of(tmp_path / "model/veco"), weights_of(run / "model/veco")
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    scalars = json.loads((tmp_path / "step-00000008/training_state.json").read_text())
    assert scalars["step"] == 8


def test_a_run_goes_on_from_a_full_model(
    run: Path, tiny_recipe: Callable[..., Recipe], tiny_text: Path, tmp_path: Path
) -> None:
    start = (f"model.start={run / 'model'}", "model.cross_attention=start", "schedule.steps=1")
    # Nothing is learnt at a rate of 0 to begin with.
    slow = ("schedule.warmup=1", "optimizer.learning_rate=1e-12", "freeze_steps=null")
    recipe = tiny_recipe(*CHANGES, *start, *slow)
    found = weights_of(train(recipe, tiny_text, tmp_path) / "veco")
    for name, value in weights_of(run / "model" / "veco").items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["ema", "last"])
def test_averages_have_the_cross_attention_too(
    kind: str, tiny_recipe: Callable[..., Recipe], tiny_text: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe(*CHANGES, f"average={{kind: {kind}, decay: 0.5, last: 2}}")
    full = weights_of(train(recipe, tiny_text, tmp_path) / "veco")
    last, before = (weights_of(tmp_path / f"step-0000000{step}") for step in (8, 6))
    name = "roberta.encoder.layer.1.crossattention.self.key.weight"
    assert not torch.equal(full[name], last[name])
    if kind == "last":
        torch.testing.assert_close(full[name], (last[name] + before[name]) / 2)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_two_processes_learn_as_one(
    engine: str,
    tiny_recipe: Callable[..., Recipe],
    tiny_text: Path,
    tmp_path: Path,
    train_in_two: Callable[..., Any],
) -> None:
    """Gradients of weights that were frozen for a time are averaged over processes, too."""
    recipe = tiny_recipe(*CHANGES, f"engine.distributed={engine}")
    done = train_in_two(tmp_path / "two", recipe, tiny_text, sharded=engine == "fsdp")
    assert done.returncode == 0, done.stderr
    train(tiny_recipe(*CHANGES, "engine.accumulation=2"), tiny_text, tmp_path / "one")
    found = weights_of(tmp_path / "two" / "run" / "model" / "veco")
    expected = weights_of(tmp_path / "one" / "model" / "veco")
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-4)


def test_lines_of_text_are_paired_with_the_line_before(
    tiny_recipe: Callable[..., Recipe],
    tiny_tokenizer: Any,
    demo_rows: list[tuple[str, str, str]],
    tmp_path: Path,
) -> None:
    from calque.tokens.tokenizer import encode_sentences

    lines = list(dict.fromkeys(text for code, _, text in demo_rows if code == "de"))
    (tmp_path / "de.txt").write_text("".join(f"{line}\n" for line in lines), "utf-8")
    text = tmp_path / "text"
    rules = CleaningRules()
    prepare_corpora(
        [TextSource((tmp_path / "de.txt",), ("de",))], tiny_tokenizer, text, rules=rules
    )
    changes = ("objectives=[{kind: cross_attention_lm, batch_tokens: 512, pairs: neighbors}]",)
    changes += ("model.cross_attention=random", "data.validation_examples=1", "schedule.steps=2")
    trainer = Trainer(tiny_recipe(*changes), text, tmp_path / "run")
    (stream,) = trainer.streams
    assert stream.languages == ("de",)
    follows = {
        (tuple(one.tolist()), tuple(other.tolist()))
        for ids in [encode_sentences(tiny_tokenizer, lines)]
        for one, other in pairwise(ids)
    }
    batch = next(trainer._open_loaders()[0])[1]
    clean, bounds = batch.tokens.ids.clone(), batch.tokens.offsets.tolist()
    clean[batch.masked] = batch.labels
    parts = [tuple(clean[a + 1 : b - 1].tolist()) for a, b in pairwise(bounds)]
    pairs = set(zip(parts[::2], parts[1::2], strict=True))
    assert len(pairs) > 3
    assert pairs <= follows
    trainer.run()


def test_bitext_has_no_neighbors(
    tiny_recipe: Callable[..., Recipe], tiny_text: Path, tmp_path: Path
) -> None:
    changes = "objectives=[{kind: cross_attention_lm, batch_tokens: 512, pairs: neighbors}]"
    recipe = tiny_recipe(changes, "model.cross_attention=self")
    with pytest.raises(InputError, match="no plain text of at most 64 tokens"):
        Trainer(recipe, tiny_text, tmp_path)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("model.cross_attention=null", "model.cross_attention is missing"),
        ("model.cross_attention=start", "there is no model to start from"),
        ("freeze=[]", "freeze_steps=4, but nothing is frozen"),
        ("schedule.steps=4", r"freeze_steps=4 leaves none of schedule.steps=4 .* lower it, or set"),
        ("objectives=[{kind: masked_lm}]", "is trained by no objective"),
    ],
)
def test_a_recipe_that_does_not_fit_is_told(
    change: str, problem: str, tiny_recipe: Callable[..., Recipe]
) -> None:
    with pytest.raises(InputError, match=problem):
        tiny_recipe(*CHANGES, change)


def test_a_first_stage_in_which_nothing_learns_is_told(
    tiny_recipe: Callable[..., Recipe], tiny_text: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"every parameter is frozen \(freeze less\)"):
        Trainer(tiny_recipe(*CHANGES, "freeze=['encoder.*']"), tiny_text, tmp_path)
