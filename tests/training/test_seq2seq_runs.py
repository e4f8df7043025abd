"""Runs of encoder–decoders: bit-identical resumption, averages, and folders that go on."""

from __future__ import annotations

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
from calque.models.seq2seq import Seq2Seq
from calque.training.loop import Interrupted, Trainer, train
from calque.training.recipe import Recipe
from calque.training.start import prepare_text
from calque.training.telemetry import read_metrics

MakeRecipe = Callable[..., Recipe]

TRANSLATION = "{kind: translation, batch_tokens: 512, direction: both}"
DENOISING = "{kind: denoising_seq2seq, batch_tokens: 384, permute: true}"


@pytest.fixture(scope="module")
def languages(demo_rows: list[tuple[str, str, str]]) -> str:
    return f"[{', '.join(dict.fromkeys(['en', *(row[0] for row in demo_rows)]))}]"


@pytest.fixture(scope="module")
def writing(tiny_recipe: MakeRecipe, languages: str) -> MakeRecipe:
    def make(*changes: str) -> Recipe:
        return tiny_recipe(
            "model.decoder={tie: all, layers: 1}",
            f"model.decoder.languages={languages}",
            f"objectives=[{TRANSLATION}, {DENOISING}]",
            *changes,
        )

    return make


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {
        f"{file.relative_to(folder)}: {name}": value
        for file in sorted(folder.rglob("*.safetensors"))
        for name, value in load_file(file).items()
    }


def assert_same(left: Path, right: Path) -> None:
    one, other = read_tensors(left), read_tensors(right)
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def interrupt_at(monkeypatch: pytest.MonkeyPatch, step: int, *arguments: Any) -> None:
    take_step = Trainer._take_step

    def watched(self: Trainer, loaders: Any) -> Any:
        if self.step + 1 == step:
            signal.raise_signal(signal.SIGINT)
        return take_step(self, loaders)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_take_step", watched)
        with pytest.raises(Interrupted):
            train(*arguments)


@pytest.mark.parametrize("average", ["ema", "last"])
def test_a_run_goes_on_bit_identically(
    average: str,
    writing: MakeRecipe,
    tiny_text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With dropout, tied weights, two objectives that draw noise and coins, and averages."""
    recipe = writing(f"average.kind={average}", "average.last=2", "checkpoints.every=2")
    train(recipe, tiny_text, tmp_path / "straight")
    interrupt_at(monkeypatch, 5, recipe, tiny_text, tmp_path / "resumed")
    train(recipe, tiny_text, tmp_path / "resumed", resume=True)
    for name in ("step-00000008", "model"):
        assert_same(tmp_path / "straight" / name, tmp_path / "resumed" / name)
    rows = read_metrics(tmp_path / "resumed" / "metrics.jsonl")
    assert {"loss/translation/nll", "loss/denoising_seq2seq"} <= rows[-1].keys()


def test_the_last_checkpoints_are_averaged_and_tied_weights_stay_one(
    writing: MakeRecipe, tiny_text: Path, tmp_path: Path
) -> None:
    recipe = writing("average={kind: last, last: 2}", "checkpoints.every=4")
    model = train(recipe, tiny_text, tmp_path)
    halves = [load_file(tmp_path / f"step-0000000{n}" / "model.safetensors") for n in (4, 8)]
    result = load_file(model / "model.safetensors")
    assert result.keys() == halves[0].keys()
    for name, value in result.items():
        torch.testing.assert_close(value, (halves[0][name] + halves[1][name]) / 2)
    tied = [name for name in result if name.startswith("encoder.encoder.layer.1.")]
    for name in tied:
        twin = name.replace("encoder.encoder.layer.1.", "decoder.roberta.encoder.layer.0.")
        assert torch.equal(result[name], result[twin]), name
    assert len(tied) == 16
    alone, whole = Encoder.load(model / "encoder"), Seq2Seq.load(model)
    for name, value in whole.model.encoder.state_dict().items():
        if "pooler" not in name:
            assert torch.equal(value, alone.model.state_dict()[f"roberta.{name}"])


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_two_processes_train_as_one(
    sharded: bool,
    writing: MakeRecipe,
    tiny_text: Path,
    tmp_path: Path,
    train_in_two: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """The same micro-batches a step, so that only rounding differs."""
    tie = f"model.decoder.tie={'embeddings' if sharded else 'all'}"
    still = ("model.dropout=0.0", "model.attention_dropout=0.0", "schedule.steps=3", tie)
    train(writing(*still, "engine.accumulation=2"), tiny_text, tmp_path / "one")
    more = ("engine.distributed=fsdp",) if sharded else ()
    done = train_in_two(tmp_path / "two", writing(*still, *more), tiny_text, sharded=sharded)
    assert done.returncode == 0, done.stderr
    one, two = (read_tensors(tmp_path / place / "model") for place in ("one", "two/run"))
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=2e-4, rtol=1e-3, msg=name)


def test_a_model_that_writes_is_taught_more(
    writing: MakeRecipe,
    tiny_recipe: MakeRecipe,
    languages: str,
    tiny_text: Path,
    tmp_path: Path,
) -> None:
    """Its tokens of languages are there already, and the text knows nothing of them."""
    model = train(writing("schedule.steps=2"), tiny_text, tmp_path / "first")
    recipe = tiny_recipe(
        f"model.start={model}",
        "model.decoder={tie: all, languages: [de]}",
        f"data.leave_out_languages={languages.replace('en, ', '').replace('de, ', '')}",
        "objectives=[{kind: translation, batch_tokens: 512}]",
        "schedule={steps: 2, warmup: 0}",
    )
    again = Seq2Seq.load(train(recipe, tiny_text, tmp_path / "second"))
    before = Seq2Seq.load(model)
    assert again.targets == {"de": before.targets["de"]}
    assert len(again.tokenizer) == len(before.tokenizer)
    assert again.directions == [("en", "de")]
    assert again.model.config.decoder.num_hidden_layers == 1
    assert again.model.config.calque["decoder_layers"] == [1]


def test_an_encoder_s_objectives_work_on_the_encoder_half(
    writing: MakeRecipe, tiny_text: Path, tmp_path: Path
) -> None:
    recipe = writing(f"objectives=[{TRANSLATION}, {{kind: masked_lm, batch_tokens: 256}}]")
    Seq2Seq.load(train(recipe, tiny_text, tmp_path))


def test_recipes_without_a_decoder_keep_their_fingerprint(tiny_recipe: MakeRecipe) -> None:
    recipe = tiny_recipe()
    assert "decoder" not in recipe.model_dump()["model"]
    other = tiny_recipe("model.decoder={}")
    assert recipe.fingerprint() != other.fingerprint()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            ["objectives=[{kind: translation, batch_tokens: 512}]"],
            r"the model has no decoder \(add model.decoder",
        ),
        (
            ["objectives=[{kind: translation, batch_tokens: 512}]", "model.decoder={}"],
            r"cannot tell which language to write \(set model.decoder.languages=",
        ),
        (
            ["model.decoder={layers: 5}", "objectives=[{kind: translation, batch_tokens: 512}]"],
            r"decoder.layers=5, but there are 2",
        ),
    ],
)
def test_mistakes_are_said(
    changes: list[str], message: str, tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        train(tiny_recipe(*changes), tiny_text, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_keys_that_exclude_each_other(tiny_recipe: MakeRecipe) -> None:
    with pytest.raises(InputError, match="exclude each other"):
        tiny_recipe("model.decoder={}", "model.cross_attention=self")
    with pytest.raises(
        InputError, match="distributed=fsdp cannot share layers between encoder and decoder"
    ):
        tiny_recipe("model.decoder={tie: all}", "engine.distributed=fsdp")
    with pytest.raises(InputError, match=r"model.decoder.layer: unknown key"):
        tiny_recipe("model.decoder={layer: 2}")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["model.decoder={layers: 5}"], "decoder.layers=5, but there are 2"),
        (["model.decoder={}", "model.architecture=modernbert"], "modernbert model has no cross-"),
        (["model.decoder={layers: 5}", "model.start={start}"], "decoder.layers=5, but there are 4"),
        (["model.decoder={}", "model.start={start}", "data.max_length=129"], "the model's 128"),
        (
            ["model.decoder={layers: 3}", "model.start={writer}"],
            "decoder.layers=3, but there are 2",
        ),
        (["model.decoder={}", "model.start={writer}", "data.max_length=65"], "the model's 64"),
        (
            [
                "objectives=[{kind: cross_attention_lm, batch_tokens: 512}]",
                "model.cross_attention=random",
                "model.architecture=modernbert",
            ],
            "'modernbert' have no cross-attention",
        ),
    ],
)
def test_mistakes_are_said_before_text_is_prepared(
    changes: list[str],
    message: str,
    tiny_recipe: MakeRecipe,
    tiny_folder: Path,
    translator_folder: Path,
    tmp_path: Path,
) -> None:
    """Preparing much text takes hours, after which a recipe must not turn out to be wrong."""
    (tmp_path / "en-de.tsv").write_text("One.\tEins.\n", encoding="utf-8")
    places = {"{start}": str(tiny_folder), "{writer}": str(translator_folder)}
    for name, place in places.items():
        changes = [change.replace(name, place) for change in changes]
    recipe = tiny_recipe(*changes, "data.sources=[{path: en-de.tsv, kind: bitext}]")
    with pytest.raises(InputError, match=message):
        prepare_text(recipe, tmp_path, tmp_path / "text", say=lambda line: None, n_workers=1)
    assert not (tmp_path / "text").exists()
