"""The VECO study, tiny: packing, runs that wait for their start and resume, and a report."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from calque.models.encoder import Encoder

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
NAMES = "to\tO\nNew\tB-LOC\nYork\tI-LOC\n\nof\tO\nParis\tB-LOC\n\n"
KINDS = "the\tDET\nold\tADJ\nhouse\tNOUN\n\na\tDET\nhouse\tNOUN\nfell\tVERB\n\n"


Call = Callable[..., str]


@pytest.fixture(scope="module")
def call(run_benchmark: Callable[..., CompletedProcess[str]]) -> Call:
    def run(script: str, *arguments: object, fails: bool = False) -> str:
        done = run_benchmark(script, *arguments)
        assert (done.returncode != 0) == fails, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


@pytest.fixture(scope="module")
def pack(
    call: Call,
    demo_rows: Sequence[tuple[str, str, str]],
    tiny_encoder: Encoder,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Public data in small: the demo's sentences, a few annotated ones, a tiny encoder."""
    data, out = tmp_path_factory.mktemp("data"), tmp_path_factory.mktemp("out") / "pack"
    multi30k = data / "translation" / "multi30k"
    for folder in ("bitext", "tatoeba", "xtreme/udpos", "xtreme/panx", "translation/multi30k"):
        (data / folder).mkdir(parents=True)
    for language, code in (("de", "deu"), ("fr", "fra")):
        pairs = [(english, text) for name, english, text in demo_rows if name == language]
        lines = [f"{english}\t{text}\ttatoeba\n" for english, text in pairs]
        (data / "bitext" / f"en-{language}.tsv").write_text("".join(lines))
        for side, suffix in ((0, "eng"), (1, code)):
            test = data / "tatoeba" / f"tatoeba.{code}-eng.{suffix}"
            test.write_text("".join(f"{pair[side]}\n" for pair in pairs[:9]))
        if language == "de":
            for name in ("train", "val", "test_2016_flickr", "test_2017_flickr"):
                for side, suffix in ((0, "en"), (1, "de")):
                    text = "".join(f"{pair[side]}\n" for pair in pairs)
                    (multi30k / f"{name}.{suffix}").write_text(text)
    for name in ("train-en", "dev-en", "dev-de", "dev-fr"):
        (data / "xtreme" / "panx" / f"{name}.tsv").write_text(NAMES)
        (data / "xtreme" / "udpos" / f"{name}.tsv").write_text(KINDS)
    shutil.copytree(DATA / "gold", data / "gold_alignments")
    tiny_encoder.save(data / "encoder")
    options = ("--tokenizer", data / "encoder", "--languages", "de,fr", "--workers", 1)
    call("veco_pack.py", data, "-o", out, *options)
    about = json.loads((out / "pack.json").read_text())
    assert about["languages"] == about["tatoeba"] == ["de", "fr"]
    assert about["multi30k"]["val"] == len(pairs)
    shutil.move(data / "encoder", out / "encoder")
    return out


@pytest.mark.slow
def test_runs_resume_and_are_told(call: Call, pack: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    study = ("--tiny", "--languages", "de,fr", "--mini", pack / "encoder", "--seeds", 1)
    told = call("veco_study.py", pack, "-o", out, *study, "--only", "scratch-veco,mini-none")
    assert "2 runs of 2 to do" in told
    # On another machine there are the bundle and no models; two workers share the rest.
    bundle, other = (out / "study.json").read_text(), tmp_path / "other"
    other.mkdir()
    (other / "study.json").write_text(bundle)
    told = call("veco_study.py", pack, "-o", other, *study, "--jobs", 2)
    assert "29 runs of 30 to do" in told  # VECO's model from scratch is made again
    assert "failed" not in told
    cells = json.loads((other / "study.json").read_text())["cells"]
    assert len(cells) == 30
    assert cells["scratch-veco-1"] == json.loads(bundle)["cells"]["scratch-veco-1"]
    check_cells(cells)
    check_report(other / "study.md")
    assert "0 runs of 30 to do" in call("veco_study.py", pack, "-o", other, *study)


def check_cells(cells: dict[str, dict]) -> None:
    for cell in cells.values():
        if cell["direction"]:
            assert [step for step, _ in cell["curve"]] == [1, 2, 3, 4, 5]
            assert "nrefs:1" in cell["signatures"][0]
            continue
        n_layers = 2 if cell["start"] == "scratch" else 4
        assert set(cell["scores"]) == {"tatoeba", "aer", "pos", "ner"}
        for measure in cell["scores"].values():
            assert {len(layers) for layers in measure.values()} == {n_layers + 1}
    # Five steps teach methods different things, and each start is its own; one encoder is kept.
    assert cells["mini-plug-1"]["scores"] == cells["mini-none-1"]["scores"]
    scores = [json.dumps(cell["scores"]) for cell in cells.values() if not cell["direction"]]
    assert len(set(scores)) == len(scores) - 1 == 7


def check_report(path: Path) -> None:
    report = path.read_text()
    for title in ("random", "XLM", "mBART", "VECO", "calque-mini", "calque-mini + VECO"):
        assert f"\n| {title} | 1 |" in report  # of translation
        assert f"\n| en → de, {title} | " in report  # along training
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


def test_without_data_scripts_say_so_and_end_well(call: Call, tmp_path: Path) -> None:
    assert "skipped" in call("veco_study.py", "-o", tmp_path / "out")
    assert "skipped" in call("veco_pack.py", "-o", tmp_path / "pack")
    assert list(tmp_path.iterdir()) == []
