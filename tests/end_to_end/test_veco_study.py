"""The VECO study with tiny models: packing, runs that need others, and the report."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from calque.models.encoder import Encoder

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"


Call = Callable[..., str]

# A run of every recipe and of every kind.
ONLY = "scratch-veco,scratch-xlm,mini-none,mini-mbart,mini-plug,"
ONLY += "en-de-scratch-veco,en-de-mini-plug-last"


@pytest.fixture(scope="module")
def call(run_benchmark: Callable[..., CompletedProcess[str]]) -> Call:
    def run(script: str, *arguments: object, fails: bool = False) -> str:
        done = run_benchmark(script, *arguments)
        assert (done.returncode != 0) == fails, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


@pytest.fixture(scope="module")
def pack(call: Call, tiny_encoder: Encoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack of tiny data, with the encoder that the study uses as calque-mini."""
    data, out = tmp_path_factory.mktemp("data"), tmp_path_factory.mktemp("out") / "pack"
    call("tiny_data.py", data)
    tiny_encoder.save(data / "tiny")
    options = ("--tokenizer", data / "tiny", "--languages", "de,fr", "--workers", 1)
    call("veco_pack.py", data, "-o", out, *options)
    about = json.loads((out / "pack.json").read_text())
    assert about["languages"] == about["tatoeba"] == ["de", "fr"]
    assert about["multi30k"]["val"] == 25
    shutil.move(data / "tiny", out / "encoder")
    return out


@pytest.mark.slow
def test_study_is_continued_and_reported(call: Call, pack: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    study = ("--tiny", "--languages", "de,fr", "--mini", pack / "encoder", "--seeds", 1)
    output = call("veco_study.py", pack, "-o", out, *study, "--only", "scratch-veco,mini-none")
    assert "2 runs of 2 to do" in output
    # Another machine has the bundle without the models.
    bundle, other = (out / "study.json").read_text(), tmp_path / "other"
    other.mkdir()
    (other / "study.json").write_text(bundle)
    study += ("--only", ONLY)
    output = call("veco_study.py", pack, "-o", other, *study)
    assert "6 runs of 7 to do" in output  # the model of VECO from scratch is trained again
    assert "failed" not in output
    cells = json.loads((other / "study.json").read_text())["cells"]
    assert len(cells) == 7
    assert cells["scratch-veco-1"] == json.loads(bundle)["cells"]["scratch-veco-1"]
    check_cells(cells)
    assert "0 runs of 7 to do" in call("veco_study.py", pack, "-o", other, *study)
    add_other_runs(cells)
    (other / "study.json").write_text(json.dumps({"cells": cells}))
    call("veco_study.py", "--report-only", "-o", other)
    check_report(other / "study.md")


@pytest.mark.slow
def test_control_starts_from_another_control(call: Call, pack: Path, tmp_path: Path) -> None:
    """mBART takes the cross-attention of a model that was saved without training."""
    study = ("--tiny", "--languages", "de,fr", "--mini", pack / "encoder", "--seeds", 1)
    only = ("--controls", "--only", "en-de-mini-mbart-self")
    output = call("veco_study.py", pack, "-o", tmp_path, *study, *only)
    assert "3 runs of 1 to do" in output and "failed" not in output
    cells = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("cells/*.json")}
    assert set(cells) == {"mini-self-1", "mini-mbart-self-1", "en-de-mini-mbart-self-1"}
    scores = [cells[f"mini-{name}-1"]["scores"] for name in ("self", "mbart-self")]
    assert scores[0] != scores[1]
    assert "| calque-mini + mBART, `self` | 1, 0 |" in (tmp_path / "study.md").read_text()


def add_other_runs(cells: dict[str, dict]) -> None:
    """Add copies of results for the runs that would take long, for the report."""
    kinds = [("", "full"), ("en-de", "full"), ("de-en", "full")]
    kinds += [("en-de", decoder) for decoder in ("last", "first", "fresh")]
    for start, other in (("scratch", "xlm"), ("mini", "mbart")):
        for method in ("none", "xlm", "mbart", "plug", "veco"):
            for direction, decoder in kinds:
                own = {"start": start, "method": method, "direction": direction, "decoder": decoder}
                source = "en-de-scratch-veco-1" if direction else f"{start}-{other}-1"
                parts = (direction, start, method, decoder if decoder != "full" else "", "1")
                cells.setdefault("-".join(filter(None, parts)), cells[source] | own)


def check_cells(cells: dict[str, dict]) -> None:
    for cell in cells.values():
        if cell["direction"]:
            assert [step for step, _ in cell["curve"]] == [1, 2]
            assert "nrefs:1" in cell["signatures"][0]
            continue
        n_layers = 2 if cell["start"] == "scratch" else 4
        assert set(cell["scores"]) == {"tatoeba", "aer", "pos", "ner"}
        for measure in cell["scores"].values():
            assert {len(layers) for layers in measure.values()} == {n_layers + 1}
    # All scores differ, except that plug keeps the encoder of calque-mini.
    assert cells["mini-plug-1"]["scores"] == cells["mini-none-1"]["scores"]
    scores = [json.dumps(cell["scores"]) for cell in cells.values() if not cell["direction"]]
    assert len(set(scores)) == len(scores) - 1 == 4


def check_report(path: Path) -> None:
    report = path.read_text()
    for title in ("random", "XLM", "mBART", "VECO", "calque-mini", "calque-mini + VECO"):
        assert f"\n| {title} | 1 |" in report  # translation
        assert f"\n| en → de, {title} | " in report  # learning curve
    kept = "calque-mini + cross-attention alone"
    assert f"\n| {kept} above calque-mini + XLM (not in the paper) |" in report
    assert f"- {kept}, de → en: over XLM" in report
    for title in ("VECO, last layers", "VECO, first layers", "random, few layers"):
        assert f"\n| {title} | 1 |" in report
    assert "VECO, de → en: over XLM" in report
    assert "BLEU over random weights at equal updates, goal +5" in report
    assert "| calque-mini + VECO above random (Table 3) |" in report
    pytest.importorskip("matplotlib")
    for kind in ("curves", "layers"):
        assert f"![](study-{kind}.png)" in report
        assert (path.parent / f"study-{kind}.png").read_bytes().startswith(b"\x89PNG")


def test_scripts_are_skipped_without_data(call: Call, tmp_path: Path) -> None:
    assert "skipped" in call("veco_study.py", "-o", tmp_path / "out")
    assert "skipped" in call("veco_pack.py", "-o", tmp_path / "pack")
    assert list(tmp_path.iterdir()) == []
