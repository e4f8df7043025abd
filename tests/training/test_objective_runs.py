"""Training runs of every kind of objective: what is saved, resumed, and shared by processes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.training.run_helpers import (
    assert_close_runs,
    assert_same_run,
    interrupt_at,
    read_rows,
    read_tensors,
    read_weights,
)
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, BertConfig

from calque.errors import InputError
from calque.io.cleaning import CleaningRules
from calque.models.encoder import Encoder
from calque.models.loading import build_model
from calque.models.seq2seq import Seq2Seq
from calque.models.veco import Veco
from calque.tokens.prepare import TextSource, prepare_corpora
from calque.tokens.tokenizer import encode_sentences, train_tokenizer
from calque.training.loop import StopSignal, Trainer, train
from calque.training.recipe import Recipe
from calque.training.run import Run
from calque.training.step import TrainStep

MakeRecipe = Callable[..., Recipe]
TrainInTwo = Callable[..., subprocess.CompletedProcess[str]]

STATE = "training_state.safetensors"
EMA = ("average.kind=ema", "average.decay=0.8")
SHORT = ("schedule.steps=6", "telemetry.every=2")
SENTENCES = "kind: sentence_contrastive, batch_tokens: 1024"
TRANSLATION = "{kind: translation, batch_tokens: 512, direction: both}"
DENOISING = "{kind: denoising_seq2seq, batch_tokens: 384, permute: true}"
CROSS_ATTENTION = (
    "model.cross_attention=self",
    "freeze=['encoder.*', '!*.crossattention.*']",
    "freeze_steps=4",
    "checkpoints.keep=9",
    "checkpoints.every=2",
)
RECIPES: dict[str, tuple[str, ...]] = {
    # MLM, TLM and the pointer network of denoising word alignment.
    "pointer": (
        "objectives.1={kind: denoising_alignment, batch_tokens: 1024, weight: 0.5}",
        *SHORT,
        *EMA,
    ),
    # Sentences with a feature extractor, a queue and the distance from the start.
    "queue": (
        f"objectives=[{{{SENTENCES}, features: 16, queue: 50, negatives: strong}}]",
        "objectives.0.parameter_weight=0.1",
        *SHORT,
        *EMA,
    ),
    "distill tokens": (
        "objectives=[{kind: distillation, batch_tokens: 1024, teacher: TEACHER, languages: [en]}]",
        *SHORT,
        *EMA,
    ),
    "veco": (
        "objectives=[{kind: cross_attention_lm, batch_tokens: 512, probability: 0.25},"
        " {kind: translation_lm, batch_tokens: 512, probability: 0.25}]",
        *CROSS_ATTENTION,
    ),
    # Tied weights, and two objectives that draw noise.
    "seq2seq": (
        f"objectives=[{TRANSLATION}, {DENOISING}]",
        "model.decoder={tie: all, layers: 1, languages: LANGUAGES}",
        "average.last=2",
        "checkpoints.every=2",
    ),
    "deberta": ("model.start=DEBERTA", "schedule.steps=6"),
}
RECIPES["distill states"] = (*RECIPES["distill tokens"], "objectives.0.target=states")
RECIPES["seq2seq ema"] = (*RECIPES["seq2seq"], "average.kind=ema")
RECIPES["seq2seq last"] = (*RECIPES["seq2seq"], "average.kind=last")


class Runs:
    """Recipes by name, and one uninterrupted run of each, trained when it is first needed."""

    def __init__(self, make: MakeRecipe, values: dict[str, str], texts: dict[str, Path]) -> None:
        self.make, self.values, self.texts = make, values, texts
        self.folder, self.trained = texts["runs"], dict[str, Path]()

    def recipe(self, name: str, *changes: str) -> Recipe:
        settings = [*RECIPES[name], *changes]
        for key, value in self.values.items():
            settings = [setting.replace(key, value) for setting in settings]
        return self.make(*settings)

    def text(self, name: str) -> Path:
        return self.texts["deberta" if name == "deberta" else "tiny"]

    def straight(self, name: str) -> Path:
        if name not in self.trained:
            self.trained[name] = self.folder / name.replace(" ", "-")
            train(self.recipe(name), output=self.trained[name], prepared=self.text(name))
        return self.trained[name]

    def train(self, name: str, output: Path, *changes: str) -> Path:
        """Train a changed recipe, and return the model's folder."""
        return train(self.recipe(name, *changes), output=output, prepared=self.text(name)).model


@pytest.fixture(scope="module")
def teacher(
    demo_rows: list[tuple[str, str, str]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A wider English BERT with a vocabulary of its own."""
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
def deberta_text(
    demo_rows: list[tuple[str, str, str]],
    deberta_encoder: Encoder,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """The demo's German sentences, tokenized by DeBERTa's tokenizer."""
    file, folder = tmp_path_factory.mktemp("files") / "en-de.tsv", tmp_path_factory.mktemp("text")
    pairs = [f"{english}\t{text}\n" for language, english, text in demo_rows if language == "de"]
    file.write_text("".join(pairs), encoding="utf-8")
    source = TextSource((file,), ("en", "de"))
    prepare_corpora([source], deberta_encoder.tokenizer, folder, rules=CleaningRules())
    return folder


@pytest.fixture(scope="module")
def languages(demo_rows: list[tuple[str, str, str]]) -> str:
    return f"[{', '.join(dict.fromkeys(['en', *(row[0] for row in demo_rows)]))}]"


@pytest.fixture(scope="module")
def runs(
    tiny_recipe: MakeRecipe,
    tiny_text: Path,
    teacher: Path,
    deberta_folder: Path,
    deberta_text: Path,
    languages: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Runs:
    values = {"TEACHER": str(teacher), "DEBERTA": str(deberta_folder), "LANGUAGES": languages}
    texts = {"tiny": tiny_text, "deberta": deberta_text, "runs": tmp_path_factory.mktemp("runs")}
    return Runs(tiny_recipe, values, texts)


# Resuming


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("pointer", 4),
        ("queue", 4),
        ("distill tokens", 4),
        ("distill states", 4),
        ("veco", 2),  # while the rest is frozen, when that ends, and after
        ("veco", 4),
        ("veco", 5),
        ("seq2seq ema", 5),
        ("seq2seq last", 5),
        ("deberta", 4),
    ],
)
def test_interrupted_run_resumes_bit_identically(
    name: str, step: int, runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, text = runs.recipe(name), runs.text(name)
    interrupt_at(monkeypatch, step, recipe, text, tmp_path)
    train(recipe, output=tmp_path, prepared=text, resume=True)
    assert_same_run(runs.straight(name), tmp_path, recipe.schedule.steps)


@pytest.mark.parametrize(
    ("name", "metrics"),
    [
        (
            "pointer",
            {
                "denoising_alignment",
                *(f"denoising_alignment/{k}" for k in ("tlm", "pointer", "labelled", "diagonal")),
            },
        ),
        (
            "queue",
            {
                "sentence_contrastive",
                *(f"sentence_contrastive/{k}" for k in ("contrast", "accuracy", "parameters")),
            },
        ),
        (
            "distill tokens",
            {"distillation", *(f"distillation/{k}" for k in ("mlm", "teacher", "share", "unread"))},
        ),
        (
            "veco",
            {
                f"cross_attention_lm/{k}"
                for k in ("left", "right", "left_with_right", "right_with_left")
            },
        ),
        ("seq2seq ema", {"translation/nll", "denoising_seq2seq"}),
    ],
)
def test_metrics_of_objectives_are_recorded(name: str, metrics: set[str], runs: Runs) -> None:
    rows = read_rows(runs.straight(name))
    assert {row["kind"] for row in rows} == {"train", "validation"}
    for row in rows:
        assert {f"loss/{metric}" for metric in metrics} <= row.keys()
        value = {key.removeprefix("loss/"): row[key] for key in row if key.startswith("loss/")}
        if name == "pointer":
            parts = value["denoising_alignment/tlm"] + value["denoising_alignment/pointer"]
            assert value["denoising_alignment"] == pytest.approx(parts, rel=1e-5)
            assert 0 < value["denoising_alignment/labelled"] <= 1
            assert 0 < value["denoising_alignment/diagonal"] < 1
        if name == "queue":
            distance = 0.1 * value["sentence_contrastive/parameters"]
            total = value["sentence_contrastive/contrast"] + distance
            assert value["sentence_contrastive"] == pytest.approx(total, rel=1e-5)
        if name == "distill tokens":
            taught = value["distillation/share"] * value["distillation/teacher"]
            assert 0 < value["distillation/share"] < 1
            assert value["distillation/unread"] == 0
            assert value["distillation"] == pytest.approx(
                value["distillation/mlm"] + taught, rel=1e-5
            )


@pytest.mark.parametrize(
    ("name", "saved"),
    [
        ("pointer", {"1.pointer.query.weight", "1.pointer.query.bias", "1.pointer.key.weight"}),
        (
            "queue",
            {"0.extractor.hidden.weight", "0.extractor.output.weight"}
            | {f"0.queue.{key}" for key in ("src", "tgt", "src_keys", "tgt_keys", "real")},
        ),
        ("distill tokens", set()),  # the teacher itself is not saved
        ("distill states", {"0.projection.weight", "0.projection.bias"}),
    ],
)
def test_weights_of_objectives_are_saved_in_checkpoints_only(
    name: str, saved: set[str], runs: Runs
) -> None:
    run = runs.straight(name)
    state = load_file(run / "step-00000006" / STATE)
    assert {key for key in state if key.startswith("objectives.")} == {
        f"objectives.{key}" for key in saved
    }
    trained = {key for key in saved if "queue" not in key}
    assert {f"optimizer.objectives.{key}.exp_avg" for key in trained} <= state.keys()
    averaged = [key for key in state if key.startswith("average.")]
    assert averaged
    foreign = ("point", "extract", "queue", "teacher", "projection")
    for folder in (run / "model", run / "step-00000006"):
        names = [*read_weights(folder), *averaged]
        assert not [key for key in names if any(part in key for part in foreign)]
        _, found = AutoModelForMaskedLM.from_pretrained(folder, output_loading_info=True)
        assert not found["missing_keys"]
        assert not found["unexpected_keys"]
    assert [path.name for path in (run / "model").glob("*.safetensors")] == ["model.safetensors"]
    assert {path.suffix for path in (run / "model").iterdir()} <= {".json", ".safetensors"}


# Several processes. Accelerate shards on GPUs only; torch's fully_shard itself also runs on CPUs.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "engine", "tolerance"),
    [
        ("pointer", "ddp", 2e-3),  # rounding may change a link
        ("pointer", "fsdp", 2e-3),
        ("distill tokens", "fsdp", 1e-5),  # the teacher is not sharded
        ("distill states", "ddp", 1e-5),
        ("veco", "ddp", 1e-4),  # gradients of weights that were frozen are averaged, too
        ("veco", "fsdp", 1e-4),
        ("deberta", "fsdp", 1e-5),  # embeddings of distances are outside the layers
    ],
)
def test_two_processes_train_like_one_with_doubled_accumulation(
    name: str, engine: str, tolerance: float, runs: Runs, tmp_path: Path, train_in_two: TrainInTwo
) -> None:
    recipe = runs.recipe(name, f"engine.distributed={engine}")
    done = train_in_two(tmp_path / "two", recipe, runs.text(name), sharded=engine == "fsdp")
    assert done.returncode == 0, done.stderr
    n_warnings = done.stderr.count("warning: denoising_alignment: the self-labels")
    assert n_warnings == (name == "pointer"), done.stderr
    runs.train(name, tmp_path / "one", "engine.accumulation=2")
    two, one = tmp_path / "two" / "run", tmp_path / "one"
    assert_close_runs(two, one, rel=tolerance)
    found, expected = (read_tensors(run / "model") for run in (two, one))
    assert found.keys() == expected.keys()
    for key, value in found.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-3, atol=1e-3, msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_two_processes_train_an_encoder_decoder_like_one(
    sharded: bool, runs: Runs, tmp_path: Path, train_in_two: TrainInTwo
) -> None:
    tie = f"model.decoder.tie={'embeddings' if sharded else 'all'}"
    still = ("model.dropout=0.0", "model.attention_dropout=0.0", "schedule.steps=3", tie)
    runs.train("seq2seq", tmp_path / "one", *still, "engine.accumulation=2")
    more = ("engine.distributed=fsdp",) if sharded else ()
    recipe = runs.recipe("seq2seq", *still, *more)
    done = train_in_two(tmp_path / "two", recipe, runs.text("seq2seq"), sharded=sharded)
    assert done.returncode == 0, done.stderr
    one, two = (read_tensors(tmp_path / place / "model") for place in ("one", "two/run"))
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=2e-4, rtol=1e-3, msg=name)


@pytest.mark.slow
def test_two_processes_train_contrastively_in_single_and_half_precision(
    runs: Runs, tmp_path: Path, train_in_two: TrainInTwo
) -> None:
    """The language-modeling head gets no gradient, which DDP must expect."""
    changes = ("objectives.0.parameter_weight=0.0", "average.kind=none")
    half = ("engine.distributed=fsdp", "engine.precision=bf16")
    for name, more in (("single", ()), ("half", half)):
        recipe = runs.recipe("queue", *changes, *more)
        done = train_in_two(tmp_path / name, recipe, runs.text("queue"), sharded=bool(more))
        assert done.returncode == 0, done.stderr
    single, half_precision = (read_rows(tmp_path / name / "run") for name in ("single", "half"))
    assert [row["step"] for row in single if row["kind"] == "train"] == [2, 4, 6]
    state = load_file(tmp_path / "single" / "run" / "step-00000006" / STATE)
    assert state["objectives.0.queue.real"].all()
    for row, other in zip(half_precision, single, strict=True):
        assert row["loss/sentence_contrastive"] == pytest.approx(
            other["loss/sentence_contrastive"], rel=2e-2
        )


# The pointer of denoising word alignment


def read_pointer(run: Run) -> dict[str, torch.Tensor]:
    parameters = run.module.objectives[1].named_parameters()
    return {f"objectives.1.{name}": value.detach().clone() for name, value in parameters}


def test_pointer_starts_from_the_seed_and_is_trained(runs: Runs, tmp_path: Path) -> None:
    before, again = (
        read_pointer(Run(runs.recipe("pointer"), runs.text("pointer"), tmp_path)) for _ in range(2)
    )
    state = load_file(runs.straight("pointer") / "step-00000006" / STATE)
    for name, value in before.items():
        assert torch.equal(value, again[name])
        assert not torch.equal(state[name], value), name
        assert state[f"optimizer.{name}.exp_avg_sq"].ne(0).any()


def test_pointer_may_be_frozen_or_trained_alone(runs: Runs, tmp_path: Path) -> None:
    frozen = ("schedule.steps=2", "average.kind=none", "freeze=['objectives.*']")
    run = Run(runs.recipe("pointer", *frozen), runs.text("pointer"), tmp_path / "start")
    before = read_pointer(run)
    runs.train("pointer", tmp_path / "frozen", *frozen)
    state = load_file(tmp_path / "frozen" / "step-00000002" / STATE)
    assert all(torch.equal(state[name], value) for name, value in before.items())
    assert not [name for name in state if name.startswith("optimizer.objectives.")]
    runs.train("pointer", tmp_path / "alone", *frozen, "freeze=['encoder.*']")
    state = load_file(tmp_path / "alone" / "step-00000002" / STATE)
    trained = {name.removesuffix(".exp_avg") for name in state if name.endswith(".exp_avg")}
    assert trained == {f"optimizer.{name}" for name in before}


def test_useless_self_labels_are_warned_of_once(
    runs: Runs, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With random weights; a resumed run does not repeat the warning."""
    recipe, text = runs.recipe("pointer"), runs.text("pointer")
    interrupt_at(monkeypatch, 2, recipe, text, tmp_path)
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert warning.getMessage().startswith("denoising_alignment: the self-labels are no better")
    caplog.clear()
    train(recipe, output=tmp_path, prepared=text, resume=True)
    assert not caplog.records


# Contrastive learning


def test_queue_is_filled_with_unit_vectors(runs: Runs) -> None:
    state = load_file(runs.straight("queue") / "step-00000006" / STATE)
    assert state["objectives.0.queue.real"].all()
    assert state["objectives.0.queue.src"].norm(dim=1).tolist() == pytest.approx([1.0] * 50)


def test_impossible_layer_is_an_error_before_the_run_starts(runs: Runs, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="layer 3 does not exist"):
        runs.train("queue", tmp_path / "run", "objectives.0.layer=3")
    assert not (tmp_path / "run").exists()


def test_unused_weights_stay_as_they_were(
    tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path
) -> None:
    changes = (f"objectives=[{{{SENTENCES}, layer: 1}}]", "schedule.steps=2")
    recipe = tiny_recipe(*changes, "optimizer.weight_decay=0.0")
    before = Run(recipe, tiny_text, tmp_path / "x").encoder.model.state_dict()
    model = train(recipe, output=tmp_path / "run", prepared=tiny_text).model
    assert json.loads((model / "config.json").read_text())["calque"] == {"retrieval_layer": 1}
    for name, value in read_weights(model).items():
        unused = "lm_head.dense" in name or "lm_head.layer_norm" in name or ".layer.1." in name
        unused = unused or name == "lm_head.bias"
        assert torch.equal(value, before[name]) == unused, name


# Distillation


def test_loading_workers_build_the_same_batches(runs: Runs, tmp_path: Path) -> None:
    """The teacher's tokenizer works in the worker processes, too."""
    runs.train("distill tokens", tmp_path, "engine.workers=2")
    assert read_rows(runs.straight("distill tokens")) == read_rows(tmp_path)


def test_teacher_with_weight_0_leaves_masked_lm(
    runs: Runs, tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path
) -> None:
    """The same batches, masks and dropout: XLM and XLM + KD differ in the teacher only."""
    silent = runs.train("distill tokens", tmp_path / "kd", "objectives.0.teacher_weight=0.0")
    changes = ("objectives=[{kind: masked_lm, batch_tokens: 1024}]", *SHORT, *EMA)
    plain = train(tiny_recipe(*changes), output=tmp_path / "mlm", prepared=tiny_text).model
    one, other = read_weights(silent), read_weights(plain)
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
    for row, bare in zip(read_rows(silent.parent), read_rows(plain.parent), strict=True):
        assert row["loss/distillation/mlm"] == bare["loss/masked_lm"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("objectives.0.languages=[xx]", "no text in the teacher's language xx"),
        ("objectives.0.teacher=./nowhere", "./nowhere: there is no such folder"),
    ],
)
def test_impossible_teacher_is_an_error_before_the_run_starts(
    change: str, message: str, runs: Runs, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        runs.train("distill tokens", tmp_path / "run", change)
    assert not (tmp_path / "run").exists()


def test_teacher_that_teaches_little_is_warned_of(
    runs: Runs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An English vocabulary for Japanese text."""
    changes = ("objectives.0.languages=[ja]", "schedule.steps=1", "schedule.warmup=0")
    runs.train("distill tokens", tmp_path, *changes)
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert warning.getMessage().startswith("distillation: ")
    assert "set target: states" in warning.getMessage()


# VECO


def is_changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> Any:
    """Return whether weights have changed: those of the cross-attention, and the others."""
    found: dict[str, set[bool]] = {"cross-attention": set(), "others": set()}
    for name, value in after.items():
        part = "cross-attention" if ".crossattention." in name else "others"
        found[part].add(not torch.equal(value, before[name]))
    return found


def test_cross_attention_is_trained_alone_and_then_with_the_rest(
    runs: Runs, tmp_path: Path
) -> None:
    run = Run(runs.recipe("veco"), runs.text("veco"), tmp_path)
    start = run.encoder.model.state_dict()
    steps = [read_weights(runs.straight("veco") / f"step-0000000{k}") for k in (2, 4, 6)]
    assert is_changed(start, steps[0]) == {"cross-attention": {True}, "others": {False}}
    assert is_changed(steps[0], steps[1]) == {"cross-attention": {True}, "others": {False}}
    assert is_changed(steps[1], steps[2]) == {"cross-attention": {True}, "others": {True}}


def test_compiled_step_trains_weights_that_were_frozen(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch 2.11 continues with the gradients of the first steps unless it is reset."""

    def compile_quickly(step: TrainStep) -> None:
        for objective in step.objectives:
            objective.compile(dynamic=False, backend="aot_eager")

    monkeypatch.setattr(TrainStep, "compile_objectives", compile_quickly)
    one = "objectives=[{kind: cross_attention_lm, batch_tokens: 512, probability: 0.25}]"
    short = ("model.layers=1", "freeze_steps=2", "schedule.steps=4", "checkpoints.every=1")
    runs.train("veco", tmp_path, one, *short, "engine.compile=true")
    steps = [read_weights(tmp_path / f"step-0000000{k}") for k in (1, 2, 3)]
    assert is_changed(steps[0], steps[1]) == {"cross-attention": {True}, "others": {False}}
    assert is_changed(steps[1], steps[2]) == {"cross-attention": {True}, "others": {True}}


def test_veco_writes_the_encoder_and_the_whole_model(runs: Runs) -> None:
    run = runs.straight("veco")
    last = read_weights(run / "step-00000008")
    plain, whole = read_weights(run / "model"), read_weights(run / "model" / "veco")
    assert whole.keys() == last.keys()
    assert plain.keys() == {name for name in last if ".crossattention." not in name}
    assert all(torch.equal(value, last[name]) for name, value in (plain | whole).items())
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


def test_training_starts_from_a_veco_model(runs: Runs, tmp_path: Path) -> None:
    model = runs.straight("veco") / "model"
    start = (f"model.start={model}", "model.cross_attention=start", "schedule.steps=1")
    slow = ("schedule.warmup=1", "optimizer.learning_rate=1e-12", "freeze_steps=null")
    found = read_weights(runs.train("veco", tmp_path, *start, *slow) / "veco")
    for name, value in read_weights(model / "veco").items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["ema", "last"])
def test_averages_include_the_cross_attention(kind: str, runs: Runs, tmp_path: Path) -> None:
    model = runs.train("veco", tmp_path, f"average={{kind: {kind}, decay: 0.5, last: 2}}")
    last, before = (read_weights(tmp_path / f"step-0000000{step}") for step in (8, 6))
    name = "roberta.encoder.layer.1.crossattention.self.key.weight"
    averaged = read_weights(model / "veco")[name]
    assert not torch.equal(averaged, last[name])
    if kind == "last":
        torch.testing.assert_close(averaged, (last[name] + before[name]) / 2)


def test_lines_of_plain_text_are_paired_with_the_line_before(
    tiny_recipe: MakeRecipe,
    tiny_tokenizer: Any,
    demo_rows: list[tuple[str, str, str]],
    tiny_text: Path,
    tmp_path: Path,
) -> None:
    lines = list(dict.fromkeys(text for code, _, text in demo_rows if code == "de"))
    (tmp_path / "de.txt").write_text("".join(f"{line}\n" for line in lines), "utf-8")
    text, source = tmp_path / "text", TextSource((tmp_path / "de.txt",), ("de",))
    prepare_corpora([source], tiny_tokenizer, text, rules=CleaningRules())
    changes = ["objectives=[{kind: cross_attention_lm, batch_tokens: 512, pairs: neighbors}]"]
    changes += ["model.cross_attention=random", "data.validation_examples=1", "schedule.steps=2"]
    recipe = tiny_recipe(*changes)
    run = Run(recipe, text, tmp_path / "run")
    (stream,) = run.streams
    assert stream.languages == ("de",)
    follows = {
        (tuple(one.tolist()), tuple(other.tolist()))
        for one, other in pairwise(encode_sentences(tiny_tokenizer, lines))
    }
    batch = next(run.open_loaders()[0])[1]
    ids, bounds = batch.tokens.ids.clone(), batch.tokens.offsets.tolist()
    ids[batch.masked] = batch.labels
    parts = [tuple(ids[a + 1 : b - 1].tolist()) for a, b in pairwise(bounds)]
    pairs = set(zip(parts[::2], parts[1::2], strict=True))
    pairs = {pair for pair in pairs if pair[1]}  # the others only fill the shape of the batch
    assert len(pairs) > 3
    assert pairs <= follows
    run.create_folder()
    stop = StopSignal()
    with stop.handled():
        Trainer(run, stop=stop).train()
    with pytest.raises(InputError, match="no plain text with examples of at most 64 tokens"):
        Run(recipe, tiny_text, tmp_path / "bitext")


def test_freezing_everything_at_first_is_an_error(runs: Runs, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="every parameter is frozen"):
        Run(runs.recipe("veco", "freeze=['encoder.*']"), runs.text("veco"), tmp_path)


# Encoder–decoders


def test_last_checkpoints_are_averaged_and_tied_weights_stay_tied(runs: Runs) -> None:
    run = runs.straight("seq2seq last")
    halves = [read_weights(run / f"step-0000000{n}") for n in (6, 8)]
    result = read_weights(run / "model")
    assert result.keys() == halves[0].keys()
    for name, value in result.items():
        torch.testing.assert_close(value, (halves[0][name] + halves[1][name]) / 2)
    tied = [name for name in result if name.startswith("encoder.encoder.layer.1.")]
    for name in tied:
        twin = name.replace("encoder.encoder.layer.1.", "decoder.roberta.encoder.layer.0.")
        assert torch.equal(result[name], result[twin]), name
    assert len(tied) == 16
    alone, whole = Encoder.load(run / "model" / "encoder"), Seq2Seq.load(run / "model")
    for name, value in whole.model.encoder.state_dict().items():
        if "pooler" not in name:
            assert torch.equal(value, alone.model.state_dict()[f"roberta.{name}"])


def test_encoder_decoder_is_trained_further(
    runs: Runs, tiny_recipe: MakeRecipe, languages: str, tiny_text: Path, tmp_path: Path
) -> None:
    """It has tokens of its target languages, which the prepared text does not know."""
    model = runs.straight("seq2seq last") / "model"
    recipe = tiny_recipe(
        f"model.start={model}",
        "model.decoder={tie: all, languages: [de]}",
        f"data.leave_out_languages={languages.replace('en, ', '').replace('de, ', '')}",
        "objectives=[{kind: translation, batch_tokens: 512}]",
        "schedule={steps: 2, warmup: 0}",
    )
    again = Seq2Seq.load(train(recipe, output=tmp_path, prepared=tiny_text).model)
    before = Seq2Seq.load(model)
    assert again.start_tokens == {"de": before.start_tokens["de"]}
    assert len(again.tokenizer) == len(before.tokenizer)
    assert again.directions == [("en", "de")]
    assert again.model.config.decoder.num_hidden_layers == 1
    assert again.model.config.calque["decoder_layers"] == [1]


def test_masked_lm_trains_the_encoder_of_an_encoder_decoder(runs: Runs, tmp_path: Path) -> None:
    objectives = f"objectives=[{TRANSLATION}, {{kind: masked_lm, batch_tokens: 256}}]"
    Seq2Seq.load(runs.train("seq2seq", tmp_path, objectives, "schedule.steps=2"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([], r"the model has no decoder"),
        (["model.decoder={}"], r"\(set model.decoder.languages="),
        (["model.decoder={layers: 5}"], r"decoder.layers=5, but "),
    ],
)
def test_impossible_decoder_is_an_error_before_the_run_starts(
    changes: list[str], message: str, tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe("objectives=[{kind: translation, batch_tokens: 512}]", *changes)
    with pytest.raises(InputError, match=message):
        train(recipe, output=tmp_path / "run", prepared=tiny_text)
    assert not (tmp_path / "run").exists()


# DeBERTa


def test_trained_deberta_is_a_plain_model(runs: Runs, deberta_folder: Path) -> None:
    folder = runs.straight("deberta") / "model"
    model, found = AutoModelForMaskedLM.from_pretrained(folder, output_loading_info=True)
    assert not any(found.values())
    assert model.cls.predictions.decoder.weight is model.get_input_embeddings().weight
    _, found = AutoModel.from_pretrained(folder, output_loading_info=True)
    assert not found["missing_keys"]
    before, after = read_weights(deberta_folder), read_weights(folder)
    assert after.keys() == before.keys()
    assert [name for name in after if torch.equal(after[name], before[name])] == []


def test_compiled_deberta_step_computes_the_same(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one graph, with pairs whose positions start again from 0."""

    def compile_quickly(step: TrainStep) -> None:
        for objective in step.objectives:
            objective.compile(dynamic=False, fullgraph=True, backend="aot_eager")

    changes = ["model.dropout=0", "model.attention_dropout=0", "schedule.steps=2"]
    changes += ["objectives=[{kind: translation_lm, batch_tokens: 512}]", "engine.compile=true"]
    with monkeypatch.context() as patch:
        patch.setattr(TrainStep, "compile_objectives", lambda step: None)
        plain = runs.train("deberta", tmp_path / "plain", *changes)
    monkeypatch.setattr(TrainStep, "compile_objectives", compile_quickly)
    compiled = read_weights(runs.train("deberta", tmp_path / "compiled", *changes))
    for key, value in read_weights(plain).items():
        torch.testing.assert_close(compiled[key], value, rtol=1e-4, atol=1e-4, msg=key)
