"""The baseline study with a tiny model: packed, stopped, continued in another folder, and shown."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GOLD = ROOT / "tests" / "data" / "gold"


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    def call(*arguments: object) -> int:
        script = ROOT / "benchmarks" / "baseline_study.py"
        monkeypatch.setattr(sys, "argv", [str(script), *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(script), run_name="__main__")
        return int(end.value.code or 0)

    return call


@pytest.fixture
def data(demo_rows: list[tuple[str, str, str]], tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    (folder / "gold_alignments").mkdir(parents=True)
    for name in ("de-en.gold", "de-en.text", "ja-en.gold", "ja-en.text"):
        shutil.copy(GOLD / name, folder / "gold_alignments" / name)
    (folder / "tatoeba").mkdir()
    for short, code in (("de", "deu"), ("hi", "hin")):
        for side, column in (("eng", 1), (code, 2)):
            text = "".join(row[column] + "\n" for row in demo_rows if row[0] == short)
            (folder / "tatoeba" / f"tatoeba.{code}-eng.{side}").write_text(text, "utf-8")
    return folder


def test_the_study(
    study: Callable[..., int],
    data: Path,
    tiny_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, archive, model = tmp_path / "out", tmp_path / "data.tar.xz", ["--model", tiny_folder]
    assert study("pack", data, "-o", archive, "--languages", "de,en", *model) == 0
    assert "4 files" in capsys.readouterr().out  # without Hindi and Japanese
    options = ["--from", archive, "--languages", "de,en", "--seeds", 2, "--jobs", 0, *model]
    assert study("run", "-o", out, "--minutes", 0, *options) == 1
    assert "6 runs left, 0 failed" in capsys.readouterr().out
    assert study("run", "-o", out, "--tasks", "tatoeba", *options) == 0
    assert "3/3 " in capsys.readouterr().out

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copy(out / "study.tar.xz", elsewhere)
    assert study("run", "-o", elsewhere, *options) == 0
    assert "3 runs to do; 3 are done" in capsys.readouterr().out
    lines = (elsewhere / "results" / "results.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert sorted((row["task"], row["language"]) for row in rows) == [
        *[("tatoeba", "de")] * 3,
        *[("word_alignment", "de-en")] * 3,
    ]

    assert study("table", elsewhere) == 0
    page = capsys.readouterr().out
    assert "## tatoeba" in page and "## word" in page and "## Cost" in page
    assert f"| tatoeba | random:{tiny_folder} | 2 |" in page
    assert "Sessions: " in page


def test_files_are_chosen_by_language() -> None:
    script = str(ROOT / "benchmarks" / "baseline_study.py")
    find = runpy.run_path(script)["is_wanted"]
    names = {
        "dev-de.tsv.xz": True,
        "dev-yo.tsv.xz": False,
        "train-de.tsv.xz": False,  # the study trains on English
        "tydiqa.goldp.en.train.json.xz": True,
        "ar-ud-dev.conllu.xz": False,
        "tatoeba.deu-eng.eng": True,
        "tatoeba.hin-eng.eng": False,
    }
    assert {name: find(name, ["en", "de"]) for name in names} == names
