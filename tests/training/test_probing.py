"""The probe of a run: what it finds, what it writes, and that training does not notice it."""

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
from calque.training.gap_probe import RunProbe, make_figures
from calque.training.loop import Interrupted, Trainer, train
from calque.training.recipe import ProbeSection, Recipe, anchor_probe, check_recipe
from calque.training.start import anchor_paths, build_encoder, open_text
from calque.training.telemetry import read_metrics

MakeRecipe = Callable[..., Recipe]
TrainInTwo = Callable[..., subprocess.CompletedProcess[str]]

TAGGED = Path(__file__).parent.parent / "data" / "tagged"
PROBE = (
    f"probe.train={TAGGED}/en_ewt-train.conllu",
    f"probe.test={TAGGED}/{{language}}_*-dev.conllu*",
    "probe.every=3",
    "probe.layer=1",
)


# Accelerate shards on GPUs only; torch's fully_shard itself also runs on CPUs, over gloo.


def read_rows(run: Path) -> list[dict[str, Any]]:
    passing = {"seconds", "tokens_per_second"}
    rows = read_metrics(run / "metrics.jsonl")
    return [{k: v for k, v in row.items() if k not in passing} for row in rows]


def assert_same_tensors(left: Path, right: Path) -> None:
    names = sorted(file.name for file in left.glob("*.safetensors"))
    assert names == sorted(file.name for file in right.glob("*.safetensors")) != []
    for name in names:
        one, other = load_file(left / name), load_file(right / name)
        assert one.keys() == other.keys()
        assert [key for key in one if not torch.equal(one[key], other[key])] == []


def probe_rows(run: Path) -> list[dict[str, Any]]:
    return [row for row in read_rows(run) if row["kind"] == "probe"]


@pytest.fixture(scope="module")
def probed(tiny_recipe: MakeRecipe) -> Recipe:
    return tiny_recipe(*PROBE, "telemetry.every=2")


@pytest.fixture(scope="module")
def straight(probed: Recipe, tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("probed") / "run"
    train(probed, tiny_text, folder)
    return folder


# What is written


def test_rows_begin_at_step_0_and_end_with_the_last(straight: Path) -> None:
    rows = probe_rows(straight)
    assert [row["step"] for row in rows] == [0, 3, 6, 8]
    for row in rows:
        languages = {name: row[f"score/{name}"] for name in ("en", "de", "fr")}
        assert row["source"] == languages["en"]
        assert row["others"] == pytest.approx((languages["de"] + languages["fr"]) / 2)
        assert row["gap"] == pytest.approx(row["source"] - row["others"])
    keys = {"kind", "step", "source", "others", "gap", "score/en", "score/de", "score/fr"}
    assert {frozenset(row) for row in rows} == {frozenset(keys)}


def test_the_first_and_last_rows_are_those_of_the_models(
    straight: Path, probed: Recipe, tiny_text: Path
) -> None:
    start = build_encoder(probed, open_text(tiny_text)[1])
    rows = probe_rows(straight)
    for encoder, row in ((start, rows[0]), (Encoder.load(straight / "model"), rows[-1])):
        assert probed.probe is not None
        figures = make_figures(RunProbe(probed.probe, encoder).measure(encoder))
        assert figures == {key: row[key] for key in figures}
    assert rows[0]["score/en"] != rows[-1]["score/en"]


def test_lines_tell_the_gap_but_not_every_language(
    tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny_recipe(*PROBE, "schedule.steps=1", "schedule.warmup=0")
    train(recipe, tiny_text, tmp_path)
    told = capsys.readouterr().err.splitlines()
    assert any(
        line.startswith("probe: 60 sentences of en with 1") and line.endswith("layer 1, accuracy")
        for line in told
    )
    row = probe_rows(tmp_path)[0]
    figures = " · ".join(f"{name} {row[name]:.4g}" for name in ("source", "others", "gap"))
    assert f"step 0 · probe · {figures}" in told


# What training notices


def test_training_does_not_notice(
    straight: Path, tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path
) -> None:
    plain = tiny_recipe("telemetry.every=2")
    train(plain, tiny_text, tmp_path)
    assert_same_tensors(straight / "model", tmp_path / "model")
    assert_same_tensors(straight / "step-00000008", tmp_path / "step-00000008")
    others = [row for row in read_rows(straight) if row["kind"] != "probe"]
    assert others == read_rows(tmp_path)


@pytest.mark.parametrize("step", [3, 5])
def test_an_interrupted_run_goes_on_bit_identically(
    step: int,
    straight: Path,
    probed: Recipe,
    tiny_text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    take_step = Trainer._take_step

    def interrupted(self: Trainer, loaders: Any) -> Any:
        if self.step + 1 == step:
            signal.raise_signal(signal.SIGINT)
        return take_step(self, loaders)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_take_step", interrupted)
        with pytest.raises(Interrupted):
            train(probed, tiny_text, tmp_path)
    train(probed, tiny_text, tmp_path, resume=True)
    assert read_rows(straight) == read_rows(tmp_path)
    for name in ("step-00000008", "model"):
        assert_same_tensors(straight / name, tmp_path / name)


def test_a_run_may_go_on_without_its_probe(
    straight: Path, tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(straight, run)
    shutil.rmtree(run / "step-00000008")
    train(tiny_recipe("telemetry.every=2"), tiny_text, run, resume=True)
    assert_same_tensors(straight / "model", run / "model")
    assert [row["step"] for row in probe_rows(run)] == [0, 3, 6]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_one_process_of_two_takes_the_probe(
    kind: str,
    tiny_recipe: MakeRecipe,
    tiny_text: Path,
    tmp_path: Path,
    train_in_two: TrainInTwo,
) -> None:
    recipe = tiny_recipe(*PROBE, f"engine.distributed={kind}")
    done = train_in_two(tmp_path / "two", recipe, tiny_text, sharded=kind == "fsdp")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("probe: 60 sentences of en") == 1, done.stderr
    two = tmp_path / "two" / "run"
    train(tiny_recipe(*PROBE, "engine.accumulation=2"), tiny_text, tmp_path / "one")
    rows, others = read_rows(two), read_rows(tmp_path / "one")
    assert [row["step"] for row in rows if row["kind"] == "probe"] == [0, 3, 6, 8]
    for row, other in zip(rows, others, strict=True):
        kind = row.pop("kind")
        assert kind == other.pop("kind")
        # By rounding, a word of some hundred may get another tag.
        exact = kind != "probe" or row["step"] == 0
        assert row == pytest.approx(other, rel=1e-5, abs=0 if exact else 0.015)


# Settings


def section(**changes: Any) -> ProbeSection:
    usual = {"train": f"{TAGGED}/en_ewt-train.conllu", "test": f"{TAGGED}/dev-{{language}}.tsv"}
    return ProbeSection(**(usual | changes))


def test_languages_are_read_off_the_names() -> None:
    assert section().find_tests() == {
        "en": TAGGED / "dev-en.tsv",
        "zh": TAGGED / "dev-zh.tsv",
    }
    test = f"{TAGGED}/{{language}}_*-dev.conllu*"
    assert list(section(test=test).find_tests()) == ["en", "de", "fr"]
    assert list(section(test=test, languages=["fr"]).find_tests()) == ["en", "fr"]
    assert list(section(test=test, source="de").find_tests()) == ["de", "en", "fr"]


def test_files_may_be_listed() -> None:
    files = {"fr": str(TAGGED / "fr_gsd-dev.conllu"), "en": str(TAGGED / "dev-en.tsv")}
    assert section(test=files).find_tests() == {
        "en": TAGGED / "dev-en.tsv",
        "fr": TAGGED / "fr_gsd-dev.conllu",
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"test": f"{TAGGED}/dev-*.tsv"}, r"no \{language\} in the probe's test"),
        ({"test": f"{TAGGED}/none-{{language}}.tsv"}, "finds no file"),
        ({"test": {"en": f"{TAGGED}/none.tsv"}}, "no such file"),
        ({"source": "sw"}, "no test of its source 'sw'"),
        ({"languages": ["zh", "sw"]}, r"no test of 'sw' \(choose from: en zh\)"),
        ({"train": f"{TAGGED}/dev-en.tsv"}, "would learn from its test"),
        ({"train": f"{TAGGED}/none.tsv"}, r"none.tsv: no such file .*probe.train"),
        ({"test": f"{TAGGED}/{{language}}_*.conllu*"}, "is of 'en' too"),
    ],
)
def test_bad_files(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        section(**changes).find_tests()


def test_paths_are_found_beside_the_recipe(tiny_recipe: MakeRecipe) -> None:
    beside = section(train="en_ewt-train.conllu", test="dev-{language}.tsv")
    assert anchor_probe(beside, TAGGED) == section()
    named = section(test={"en": "dev-en.tsv", "zh": "dev-zh.tsv"})
    assert anchor_probe(named, TAGGED) == section(
        test={name: str(TAGGED / f"dev-{name}.tsv") for name in ("en", "zh")}
    )
    assert anchor_probe(section(train="elsewhere.tsv"), TAGGED) == section(train="elsewhere.tsv")
    recipe = tiny_recipe("probe.train=en_ewt-train.conllu", "probe.test=dev-{language}.tsv")
    assert anchor_paths(recipe, TAGGED).probe == section()


def test_the_probe_is_no_part_of_what_a_run_is(tiny_recipe: MakeRecipe) -> None:
    with_probe = tiny_recipe(*PROBE)
    assert with_probe.fingerprint() == tiny_recipe().fingerprint()
    assert check_recipe(with_probe.model_dump(), "itself") == with_probe


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("probe.evry=3", r"probe.evry: unknown key; did you mean every\?"),
        ("probe.every=0", "probe.every: Input should be greater than 0, got 0"),
        ("probe.metric=f1", "probe.metric: Input should be 'accuracy' or 'span_f1', got 'f1'"),
        ("objectives=[{kind: linear_map, solver: procrustes}]", "leaves the encoder as it is"),
    ],
)
def test_bad_settings_are_named(tiny_recipe: MakeRecipe, change: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        tiny_recipe(*PROBE, change)


def test_the_layer_is_two_thirds_up_unless_given(tiny_encoder: Encoder) -> None:
    assert RunProbe(section(), tiny_encoder).layer == 3
    assert RunProbe(section(layer=-1), tiny_encoder).layer == 4
    with pytest.raises(InputError, match="layer 9 does not exist"):
        RunProbe(section(layer=9), tiny_encoder)


def test_numbers_of_sentences_are_bounded(tiny_encoder: Encoder) -> None:
    probe = RunProbe(section(train_sentences=20, test_sentences=5), tiny_encoder).probe
    assert len(probe.train.lengths) == 20
    assert {len(text.lengths) for text in probe.tests.values()} == {5}
    assert torch.is_tensor(probe.train.layout.batches[0].places)
