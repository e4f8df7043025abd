"""The MetaXLM study with tiny models: packing, interrupted runs, and the report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import TYPE_CHECKING

import pytest

from calque.io.conllu import read_tagged

if TYPE_CHECKING:
    from calque.models.encoder import Encoder

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"


Call = Callable[..., str]

# A run of every recipe, and both kinds of starts.
ONLY = "own-xlm-1,own-metaxlm,own-dict-1,own-frozen,own-kd,minilm-metaxlm,minilm-kd"


@pytest.fixture(scope="module")
def call(run_benchmark: Callable[..., CompletedProcess[str]]) -> Call:
    def run(script: str, *arguments: object, fails: bool = False) -> str:
        done = run_benchmark(script, *arguments)
        assert (done.returncode != 0) == fails, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


def write_tagged(source: str, path: Path) -> None:
    sentences = read_tagged(DATA / "tagged" / source)
    rows = [zip(s.words, s.tags, strict=True) for s in sentences]
    path.write_text("\n".join("".join(f"{w}\t{t}\n" for w, t in row) for row in rows))


@pytest.fixture(scope="module")
def pack(call: Call, tiny_encoder: Encoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack of tiny data with real part-of-speech tags, so that the scores of models differ."""
    data, out = tmp_path_factory.mktemp("data"), tmp_path_factory.mktemp("out") / "pack"
    call("tiny_data.py", data)
    for name in ("train-en", "dev-en", "dev-de", "dev-fr"):
        kind, language = name.split("-")
        source = {"en": "en_ewt", "de": "de_gsd", "fr": "fr_gsd"}[language]
        suffix = ".conllu.xz" if language == "de" else ".conllu"
        write_tagged(f"{source}-{kind}{suffix}", data / "xtreme" / "udpos" / f"{name}.tsv")
    encoder = data / "tiny"
    tiny_encoder.save(encoder)
    options = ("--tokenizer", encoder, "--minilm", encoder, "--vocabulary", 300, "--workers", 1)
    call("metaxlm_pack.py", data, "-o", out, *options)
    about = json.loads((out / "pack.json").read_text())
    assert about["languages"] == about["tatoeba"] == ["de", "fr"]
    assert about["gold"] == ["de-en", "en-fr"]
    assert about["udpos"] == about["panx"] == ["de", "en", "fr"]
    assert about["dictionaries"] == ["en-de"]
    return out


@pytest.mark.slow
def test_study_is_continued_and_reported(call: Call, pack: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    study = (pack, "-o", out, "--tiny", "--languages", "de,fr")
    output = call("metaxlm.py", *study, "--seeds", 2, "--only", "own-xlm-1,own-xlm-2")
    assert "3 runs of 3 to do" in output
    assert {path.stem for path in (out / "cells").iterdir()} == {
        "own-mono-1",
        "own-xlm-1",
        "own-xlm-2",
    }
    # Another machine has the bundle without the cells; two workers execute the rest.
    bundle, other = (out / "study.json").read_text(), tmp_path / "other"
    other.mkdir()
    (other / "study.json").write_text(bundle)
    study = (pack, "-o", other, "--tiny", "--languages", "de,fr", "--seeds", 1, "--only", ONLY)
    output = call("metaxlm.py", *study, "--jobs", 2)
    assert "7 runs of 8 to do" in output  # the English model is trained again
    assert "failed" not in output
    cells = json.loads((other / "study.json").read_text())["cells"]
    assert len(cells) == 9
    assert cells["own-xlm-1"] == json.loads(bundle)["cells"]["own-xlm-1"]
    check_cells(cells)
    assert "0 runs of 8 to do" in call("metaxlm.py", *study)
    # Copies of results for the runs that would take long, for the report.
    for start in ("own", "minilm"):
        for method in ("xlm", "metaxlm", "dict", "body", "embeddings", "frozen", "kd"):
            own = {"start": start, "method": method}
            cells.setdefault(f"{start}-{method}-1", cells[f"{start}-metaxlm-1"] | own)
    (other / "study.json").write_text(json.dumps({"cells": cells}))
    call("metaxlm.py", "--report-only", "-o", other)
    check_report(other / "study.md")


def check_cells(cells: dict[str, dict]) -> None:
    for name, cell in cells.items():
        if "mono" in name:
            continue
        n_layers = 2 if cell["start"] == "own" else 4
        scores = cell["scores"]
        assert set(scores["pos"]) == set(scores["ner"]) == {"en", "de", "fr"}
        assert set(scores["tatoeba"]) == {"de", "fr"}
        assert set(scores["aer"]) == {"de-en", "en-fr"}
        for measure in scores.values():
            assert {len(layers) for layers in measure.values()} == {n_layers + 1}
        assert [step for step, *_ in cell["curves"]["transfer"]] == [0, 1, 2]
        assert [step for step, _ in cell["curves"]["loss"]] == [1, 2]
    rows = {name: cell["growth"]["rules"] for name, cell in cells.items() if "mono" not in name}
    assert rows["own-xlm-1"] is rows["own-kd-1"] is None
    assert rows["own-dict-1"] is not None
    # At step 0 frozen and MetaXLM are the same model, but XLM is not.
    first = {
        name: cell["curves"]["transfer"][0] for name, cell in cells.items() if "mono" not in name
    }
    assert first["own-metaxlm-1"] == first["own-frozen-1"]
    assert first["own-xlm-1"] == first["own-kd-1"]
    for start in ("own", "minilm"):
        assert first[f"{start}-metaxlm-1"] != first[f"{start}-kd-1"]


def check_report(path: Path) -> None:
    report = path.read_text()
    for title in ("XLM, from scratch", "MetaXLM + Dict", "XLM + KD", "embeddings alone"):
        assert report.count(f"\n| {title} |") == 2 * 8  # both starts, eight tables
    assert report.count("| MetaXLM above XLM, from scratch (Table 1) |") == 2
    assert "Loss of XLM at 60 % of the steps" in report
    pytest.importorskip("matplotlib")
    for start in ("own", "minilm"):
        assert f"![](study-{start}-gap.png)" in report
        assert (path.parent / f"study-{start}-layers.png").read_bytes().startswith(b"\x89PNG")


def test_scripts_are_skipped_without_data(call: Call, tmp_path: Path) -> None:
    assert "skipped" in call("metaxlm.py", "-o", tmp_path / "out")
    assert "skipped" in call("metaxlm_pack.py", "-o", tmp_path / "pack")
    assert list(tmp_path.iterdir()) == []
    assert "neither a method" in call("metaxlm.py", "--methods", "no", fails=True)
