"""`calque evaluate`: tables on the screen, records in a file, plots, invalid options."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calque.cli import run
from calque.io.locks import lock_output
from calque.vectors.static import WordVectors

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module")
def data(demo_rows: list[tuple[str, str, str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "tatoeba").mkdir()
    for short, code in (("de", "deu"), ("hi", "hin")):
        rows = [row for row in demo_rows if row[0] == short]
        for side, column in (("eng", 1), (code, 2)):
            text = "".join(row[column] + "\n" for row in rows)
            (folder / "tatoeba" / f"tatoeba.{code}-eng.{side}").write_text(text, "utf-8")
    (folder / "gold_alignments").symlink_to(DATA / "gold")
    (folder / "ud").mkdir()
    for name in ("en_ewt-train.conllu", "en_ewt-dev.conllu", "de_gsd-dev.conllu.xz"):
        shutil.copy(DATA / "tagged" / name, folder / "ud" / name.replace("-", "-ud-", 1))
    return folder


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def split_table(shown: str) -> list[list[str]]:
    return [line.replace("│", " ").split() for line in shown.splitlines()]


def test_tables_and_records(
    tiny_folder: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results.jsonl"
    options = ["--data", str(data), "--languages", "hi,deu", "-o", str(out)]
    assert run(["evaluate", str(tiny_folder), *options]) == 0
    captured = capsys.readouterr()
    records = read(out)
    assert [record["language"] for record in records] == ["de", "hi"]
    assert {record["counts"]["layer"] for record in records} == {2}
    rows = split_table(captured.out)
    for record in records:
        names = ("accuracy_to_english", "accuracy_from_english")
        cells = [f"{record['metrics'][name]:.1f}" for name in names]
        assert [record["language"], *cells] in rows
    for layer in range(5):
        mean = sum(record["layers"][str(layer)] for record in records) / 2
        assert [str(layer), f"{mean:.1f}"] in rows
    assert captured.err.endswith(f"{out}: 2 records\n")


def test_word_alignment_with_a_plot(
    tiny_folder: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    other = tmp_path / "other"
    other.symlink_to(tiny_folder)
    plot, models = tmp_path / "layers.svg", [str(tiny_folder), str(other)]
    options = ["--tasks", "word_alignment", "--data", str(data), "--languages", "de,fr"]
    assert run(["evaluate", *models, *options, "--plot", str(plot)]) == 0
    captured = capsys.readouterr()
    row = next(cells for cells in split_table(captured.out) if cells[:1] == ["de-en"])
    assert len(row) == 1 + 2 * 4
    assert row[1:5] == row[5:]
    assert captured.err.endswith(f"{plot}: aer (%) by layer\n")
    picture = plot.read_text()
    assert all(f"<!-- {text} -->" in picture for text in ("tiny", "other", "de-en", "mean"))


def test_probes_show_the_transfer_gap(
    tiny_folder: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "scores.jsonl"
    options = ["--tasks", "pos_probe", "--data", str(data), "-o", str(out)]
    assert run(["evaluate", str(tiny_folder), *options]) == 0
    rows = split_table(capsys.readouterr().out)
    english, german = read(out)
    assert ["mean", "of", "others", f"{german['value']:.1f}"] in rows
    assert ["gap", f"{english['value'] - german['value']:.1f}"] in rows
    first, rest = (record["layers"]["1"] for record in (english, german))
    assert ["1", f"{first:.1f}", f"{rest:.1f}", f"{first - rest:.1f}"] in rows


def test_word_vectors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    random = np.random.default_rng(0)
    matrix = random.standard_normal((20, 8)).astype(np.float32)
    for name in ("vectors", "data/muse", "data/word_similarity/rg65"):
        (tmp_path / name).mkdir(parents=True)
    for language in ("de", "en"):
        words = [f"{language}{row}" for row in range(20)]
        WordVectors(words, matrix).save(tmp_path / "vectors" / f"{language}.vec")
    entries = "".join(f"de{row} en{row}\n" for row in range(40))
    (tmp_path / "data/muse/de-en.5000-6500.txt").write_text(entries)
    pairs = "".join(f"en{row}\ten{row + 1}\t{row}\n" for row in range(10))
    (tmp_path / "data/word_similarity/rg65/english.txt").write_text(pairs)
    fixed = ["evaluate", str(tmp_path / "vectors"), "--data", str(tmp_path / "data")]
    assert run([*fixed, "--tasks", "lexicon_induction,word_similarity"]) == 0
    rows = split_table(capsys.readouterr().out)
    assert ["de-en", "50.0", "50.0", "50.0", "50.0", "100.0", "50.0"] in rows
    similarity = next(cells for cells in rows if cells[:2] == ["rg65", "en"])
    assert similarity[-1] == "100.0"
    assert run([*fixed, "--tasks", "lexicon_induction", "--layers", "1"]) == 2
    assert "lexicon_induction does not support layers" in capsys.readouterr().err


def test_data_may_come_from_the_environment(
    tiny_folder: Path,
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CALQUE_DATA", str(data))
    assert run(["evaluate", str(tiny_folder), "--layers", "0,-1", "--center"]) == 0
    assert "hi" in capsys.readouterr().out


def test_models_are_evaluated_once_and_have_names(
    tiny_folder: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results.jsonl"
    for run_name in ("one", "two"):
        (tmp_path / run_name).mkdir()
        (tmp_path / run_name / "model").symlink_to(tiny_folder)
    models = [f"{tmp_path}/one/model", f"{tmp_path}/two/model", f"mine={tiny_folder}"]
    options = ["--data", str(data), "--layers", "0", "-o", str(out)]
    assert run(["evaluate", *models, models[0], *options]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("one/model", "two/model", "mine"))
    assert [record["model"] for record in read(out)][::2] == [*models[:2], "mine"]
    assert run(["evaluate", f"a={models[0]}", f"a={models[1]}", *options, "--overwrite"]) == 2
    assert "two models have the name 'a'" in capsys.readouterr().err


def test_a_file_is_replaced_only_if_asked(
    tiny_folder: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "own.jsonl"
    out.write_text("precious\n")
    options = ["--data", str(data), "--languages", "de", "--layers", "0", "-o", str(out)]
    assert run(["evaluate", str(tiny_folder), *options]) == 2
    assert "own.jsonl: the file exists already" in capsys.readouterr().err
    assert out.read_text() == "precious\n"
    assert run(["evaluate", str(tiny_folder), *options, "--overwrite"]) == 0
    assert [record["language"] for record in read(out)] == ["de"]


def test_settings_that_a_task_ignores_are_named(
    tiny_folder: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--data", str(data), "--languages", "de", "--set", "test_examples=1"]
    assert run(["evaluate", str(tiny_folder), *options, "--source", "de"]) == 0
    assert "tatoeba ignores test_examples, source\n" in capsys.readouterr().err


def test_similarity_counts_as_a_setting(
    tiny_folder: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [str(tiny_folder), "--data", str(data), "-o", str(tmp_path / "out")]
    assert run(["evaluate", *options]) == 0
    margin = ["--set", "similarity=margin"]
    assert run(["evaluate", *options, *margin]) == 2
    assert "were made with other settings or languages" in capsys.readouterr().err
    assert run(["evaluate", *options, *margin, "--tasks", "tatoeba,word_alignment"]) == 2
    assert "word_alignment does not support similarity" in capsys.readouterr().err


def test_names_are_no_markup(
    tiny_folder: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = [f"[bold]={tiny_folder}", f"[red]x={tiny_folder}"]
    assert run(["evaluate", *models, "--data", str(data), "--layers", "0"]) == 0
    shown = capsys.readouterr().out
    assert "[bold]" in shown and "[red]x" in shown


def test_random_weights_have_seeds(tiny_folder: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    options = ["--data", str(data), "--seeds", "2", "--languages", "de", "-o", str(out)]
    assert run(["evaluate", f"random:{tiny_folder}", *options]) == 0
    assert [record["seed"] for record in read(out)] == [1, 2]


def test_one_process_writes_a_file(
    tiny_folder: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r.jsonl"
    with lock_output(out):
        assert run(["evaluate", str(tiny_folder), "--data", str(data), "-o", str(out)]) == 2
    error = capsys.readouterr().err
    assert f"{out}: process {os.getpid()} on {socket.gethostname()} is writing here" in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--languages", "fr"], "tatoeba has no test for fr"),
        (["--layers", "high"], "--layers high is not a list of numbers"),
        (["--layers", "7"], "layer 7"),
        (["--tasks", "nope"], "there is no task 'nope'"),
        (["--neutral"], "no language-neutral space"),
        (["--tasks", "word_alignment", "--center"], "word_alignment does not support center"),
        (["--seeds", "9" * 12], "999999999999 seeds are too many"),
        (["--seeds", f"1,{2**64}"], "the seeds [1, 18446744073709551616] are invalid"),
        (["--jobs", "9" * 5000], "use auto or a number such as 4"),
        (["--device", "cuda:" + "9" * 5000], "use auto, cpu or cuda"),
        (["--set", "epochs=" + "9" * 5000], "use a number"),
        (["-o", "r.jsonl/x.jsonl"], "its folder does not exist"),
        (["--plot", "plot.txt"], "plot.txt"),
        (["--plot", "nowhere/plot.png"], "nowhere/plot.png: the file cannot be created"),
        (["--plot", "p.png", "--tasks", "word_alignment,tatoeba"], "--plot draws a single task"),
        (["--plot", "p.png", "--tasks", "pos"], "pos is not measured by layer"),
    ],
)
def test_invalid_options_write_nothing(
    tiny_folder: Path,
    data: Path,
    tmp_path: Path,
    options: list[str],
    problem: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["evaluate", str(tiny_folder), "--data", str(data), "-o", "r.jsonl", *options]) == 2
    assert problem in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
