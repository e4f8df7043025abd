"""The transfer probe of a run: what it measures and records, and that training is unaffected."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.training.run_helpers import (
    assert_same_run,
    assert_same_tensors,
    interrupt_at,
    read_rows,
)

from calque.errors import InputError
from calque.models.encoder import Encoder
from calque.training.gap_probe import GapProbe, transfer_gap
from calque.training.loop import train
from calque.training.recipe import ProbeSection, Recipe
from calque.training.sources import open_text
from calque.training.start import build_encoder

MakeRecipe = Callable[..., Recipe]

TAGGED = Path(__file__).parent.parent / "data" / "tagged"
PROBE = (
    f"probe.train={TAGGED}/en_ewt-train.conllu",
    f"probe.test={TAGGED}/{{language}}_*-dev.conllu*",
    "probe.every=3",
    "probe.layer=1",
)


@pytest.fixture(scope="module")
def probed(tiny_recipe: MakeRecipe) -> Recipe:
    return tiny_recipe(*PROBE, "telemetry.every=2")


@pytest.fixture(scope="module")
def straight(probed: Recipe, tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("probed") / "run"
    train(probed, output=folder, prepared=tiny_text)
    return folder


def test_rows_from_step_0_to_the_last(straight: Path) -> None:
    rows = read_rows(straight, "probe")
    assert [row["step"] for row in rows] == [0, 3, 6, 8]
    for row in rows:
        languages = {name: row[f"score/{name}"] for name in ("en", "de", "fr")}
        assert row["source"] == languages["en"]
        assert row["others"] == pytest.approx((languages["de"] + languages["fr"]) / 2)
        assert row["gap"] == pytest.approx(row["source"] - row["others"])
    keys = {"kind", "step", "source", "others", "gap", "score/en", "score/de", "score/fr"}
    assert {frozenset(row) for row in rows} == {frozenset(keys)}


def test_first_and_last_rows_are_the_scores_of_the_models(
    straight: Path, probed: Recipe, tiny_text: Path
) -> None:
    start = build_encoder(probed, open_text(tiny_text)[1])
    rows = read_rows(straight, "probe")
    for encoder, row in ((start, rows[0]), (Encoder.load(straight / "model"), rows[-1])):
        assert probed.probe is not None
        found = GapProbe(probed.probe, encoder).measure(encoder)
        assert (row["source"], row["others"], row["gap"]) == (found.own, found.others, found.gap)
        assert {name: row[f"score/{name}"] for name in found.scores} == found.scores
    assert rows[0]["score/en"] != rows[-1]["score/en"]


def test_log_has_the_gap_but_not_every_language(
    tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = tiny_recipe(*PROBE, "schedule.steps=1", "schedule.warmup=0")
    with caplog.at_level(logging.INFO, "calque"):
        train(recipe, output=tmp_path, prepared=tiny_text)
    assert any(
        line.startswith("probe: 60 sentences of en with 1") and line.endswith("layer 1, accuracy")
        for line in caplog.messages
    )
    row = read_rows(tmp_path, "probe")[0]
    scores = " · ".join(f"{name} {row[name]:.4g}" for name in ("source", "others", "gap"))
    assert f"step 0 · probe · {scores}" in caplog.messages


def test_transfer_gap_reads_the_scores_of_runs(straight: Path, tmp_path: Path) -> None:
    (points,) = transfer_gap([straight, straight]).values()
    rows = read_rows(straight, "probe")
    assert [point.step for point in points] == [0, 3, 6, 8]
    assert [point.gap for point in points] == pytest.approx([100 * row["gap"] for row in rows])
    with pytest.raises(InputError, match="the run has no transfer scores"):
        transfer_gap([tmp_path])
    with pytest.raises(InputError, match="nowhere: there is no such folder"):
        transfer_gap([tmp_path / "nowhere"])


# Training is unaffected


def test_training_is_the_same_without_a_probe(
    straight: Path, tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path
) -> None:
    plain = tiny_recipe("telemetry.every=2")
    train(plain, output=tmp_path, prepared=tiny_text)
    assert_same_tensors(straight / "model", tmp_path / "model")
    assert_same_tensors(straight / "step-00000008", tmp_path / "step-00000008")
    others = [row for row in read_rows(straight) if row["kind"] != "probe"]
    assert others == read_rows(tmp_path)


def test_interrupted_run_resumes_bit_identically(
    straight: Path,
    probed: Recipe,
    tiny_text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interrupt_at(monkeypatch, 3, probed, tiny_text, tmp_path)
    train(probed, output=tmp_path, prepared=tiny_text, resume=True)
    assert_same_run(straight, tmp_path, 8)


def test_run_may_be_resumed_without_its_probe(
    straight: Path, tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(straight, run)
    shutil.rmtree(run / "step-00000008")
    train(tiny_recipe("telemetry.every=2"), output=run, prepared=tiny_text, resume=True)
    assert_same_tensors(straight / "model", run / "model")
    assert [row["step"] for row in read_rows(run, "probe")] == [0, 3, 6]


# Settings


def section(**changes: Any) -> ProbeSection:
    usual = {"train": f"{TAGGED}/en_ewt-train.conllu", "test": f"{TAGGED}/dev-{{language}}.tsv"}
    return ProbeSection(**(usual | changes))


def test_default_layer_is_two_thirds_of_the_way_up(tiny_encoder: Encoder) -> None:
    assert GapProbe(section(), tiny_encoder).layer == 3
    assert GapProbe(section(layer=-1), tiny_encoder).layer == 4
    with pytest.raises(InputError, match="layer 9 does not exist"):
        GapProbe(section(layer=9), tiny_encoder)


def test_numbers_of_sentences_are_limited(tiny_encoder: Encoder) -> None:
    probe = GapProbe(section(train_sentences=20, test_sentences=5), tiny_encoder).probe
    assert len(probe.train.lengths) == 20
    assert {len(text.lengths) for text in probe.tests.values()} == {5}
