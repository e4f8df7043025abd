"""Tagging probes as tasks: files found, rows complete, tables."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from calque.cli import run
from calque.errors import InputError
from calque.evaluation.registry import find_tasks
from calque.evaluation.tasks.tagging_probe import NER, POS, find_files, score_tagging_probe
from calque.io.conllu import read_tagged
from calque.models.encoder import Encoder
from calque.models.tag_probe import TagProbe

TAGGED = Path(__file__).parents[1] / "data" / "tagged"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """XTREME's parts of speech, a treebank folder, and a few names."""
    data = tmp_path_factory.mktemp("data")
    for name in ("xtreme/udpos", "xtreme/panx", "ud"):
        (data / name).mkdir(parents=True)
    for name in ("dev-en.tsv", "dev-zh.tsv"):
        shutil.copy(TAGGED / name, data / "xtreme" / "udpos" / name)
    shutil.copy(TAGGED / "dev-zh.tsv", data / "xtreme" / "udpos" / "train-en.tsv")
    for name in ("en_ewt-train.conllu", "en_ewt-dev.conllu", "de_gsd-dev.conllu.xz"):
        shutil.copy(TAGGED / name, data / "ud" / name.replace("-", "-ud-", 1))
    names = "to\tO\nNew\tB-LOC\nYork\tI-LOC\n\nto\tO\nParis\tB-LOC\n\n"
    for name in ("train-en", "dev-en", "dev-de"):
        (data / "xtreme" / "panx" / f"{name}.tsv").write_text(names)
    return data


def test_rows_are_those_of_the_probe(tiny_encoder: Encoder, data: Path) -> None:
    told: list[str] = []
    found = score_tagging_probe(
        tiny_encoder, data / "ud", task=POS, model="m", layers=[1, -1], on_language=told.append
    )
    assert told == ["en", "de"]
    tests = {
        "en": read_tagged(TAGGED / "en_ewt-dev.conllu"),
        "de": read_tagged(TAGGED / "de_gsd-dev.conllu.xz"),
    }
    train = read_tagged(TAGGED / "en_ewt-train.conllu")
    expected = TagProbe(tiny_encoder, train, tests, source="en").measure(tiny_encoder, [1, 4])
    rows = {(score.layer, score.language, score.metric): score for score in found}
    assert len(rows) == len(found) == 8
    for layer, scores in expected.items():
        assert rows[layer, "en", "accuracy"].value == scores.own
        assert rows[layer, "de", "accuracy"].value == scores.scores["de"]
        assert rows[layer, "mean", "accuracy"].value == scores.others
        assert rows[layer, "mean", "gap"].value == scores.gap
    assert {score.n_items for score in found} == {15}
    assert {(score.model, score.task) for score in found} == {("m", "pos_probe")}


def test_files_are_found_in_and_above_their_folder(data: Path) -> None:
    xtreme = data / "xtreme"
    for folder in (data, xtreme, xtreme / "udpos"):
        files = find_files(folder, POS)
        assert Path(files.train) == xtreme / "udpos" / "train-en.tsv"
        assert list(files.find_tests()) == ["en", "zh"]
    assert Path(find_files(data / "ud", POS).train).name == "en_ewt-ud-train.conllu"
    assert list(find_files(data, NER, ["de"]).find_tests()) == ["en", "de"]


def test_treebanks_in_folders_of_their_own(data: Path, tmp_path: Path) -> None:
    for path in (data / "ud").glob("*.conllu*"):
        nested = tmp_path / "released" / "ud" / f"UD_{path.name[:6]}"
        nested.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, nested)
    mine, theirs = (find_files(place, POS) for place in (tmp_path / "released", data / "ud"))
    assert Path(mine.train).name == Path(theirs.train).name
    assert list(mine.find_tests()) == list(theirs.find_tests())


def test_missing_files_are_named(data: Path, tmp_path: Path) -> None:
    # Names must not be taken for parts of speech.
    with pytest.raises(InputError, match=r"no files of pos_probe here .*udpos/train-en.tsv\*"):
        find_files(data / "xtreme" / "panx", POS)
    with pytest.raises(InputError, match="no such folder"):
        find_files(tmp_path / "none", NER)
    with pytest.raises(InputError, match=r"no test of 'fr' \(choose from: en zh\)"):
        find_files(data, POS, ["fr"]).find_tests()


def test_names_are_scored_by_spans(tiny_encoder: Encoder, data: Path) -> None:
    found = find_tasks(NER)[NER](tiny_encoder, data, model="m", layers=[0], languages=["de"])
    assert {score.metric for score in found} == {"span_f1", "gap"}
    # The test is the text it learnt from.
    assert all(score.value == (0 if score.metric == "gap" else 1) for score in found)


def test_the_command(
    tiny_folder: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "scores.jsonl"
    options = ["--tasks", "pos_probe", "--data", str(data / "ud"), "-o", str(out)]
    assert run(["evaluate", str(tiny_folder), *options]) == 0
    shown = capsys.readouterr().out
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 5 * 4
    means = {
        r["layer"]: r["value"] for r in rows if r["language"] == "mean" and r["metric"] != "gap"
    }
    best = max(sorted(means), key=lambda layer: means[layer])
    gap = next(r["value"] for r in rows if r["metric"] == "gap" and r["layer"] == best)
    lines = [line for line in shown.splitlines() if "mean of others │" in line]
    assert lines[0].split("│")[2].strip() == f"{100 * means[best]:.1f}"
    assert f"layer {best}" in shown
    assert any(
        line.split("│")[1].strip() == "gap" and line.split("│")[2].strip() == f"{100 * gap:.1f}"
        for line in shown.splitlines()
        if line.count("│") == 3
    )
