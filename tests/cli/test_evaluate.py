"""`calque evaluate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from calque.cli import run
from calque.cli.console_tables import choose_layer
from calque.types import Score


@pytest.fixture(scope="module")
def data(demo_rows: list[tuple[str, str, str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("laser")
    for short, code in (("de", "deu"), ("hi", "hin")):
        rows = [row for row in demo_rows if row[0] == short]
        for side, column in (("eng", 1), (code, 2)):
            text = "".join(row[column] + "\n" for row in rows)
            (folder / f"tatoeba.{code}-eng.{side}").write_text(text, "utf-8")
    return folder


def test_tables_and_rows(
    tiny_folder: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results.jsonl"
    arguments = [str(tiny_folder), "--data", str(data), "--languages", "hi,deu", "-o", str(out)]
    assert run(["evaluate", *arguments]) == 0
    captured = capsys.readouterr()
    rows = [Score(**json.loads(line)) for line in out.read_text().splitlines()]
    assert len(rows) == 3 * 5 * 2
    assert {row.language for row in rows} == {"hi", "de", "mean"}
    best = choose_layer(rows, str(tiny_folder))
    shown = [line.replace("│", " ").split() for line in captured.out.splitlines()]
    mean = [row.value for row in rows if row.layer == best and row.language == "mean"]
    assert ["mean", *(f"{100 * value:.1f}" for value in mean)] in shown
    assert [str(best), *(f"{100 * value:.1f}" for value in mean)] in shown
    assert "best on this test" in captured.out
    assert captured.err == f"{out}: 30 scores\n"


def test_data_may_come_from_the_environment(
    tiny_folder: Path,
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CALQUE_DATA", str(data))
    assert run(["evaluate", str(tiny_folder), "--layers", "0,-1", "--center"]) == 0
    shown = capsys.readouterr().out
    assert "best on this test" not in shown
    assert "hi" in shown


def test_a_model_named_twice_is_scored_once(tiny_folder: Path, data: Path, tmp_path: Path) -> None:
    models, out = [str(tiny_folder)] * 2, tmp_path / "results.jsonl"
    arguments = ["--data", str(data), "--layers", "0", "-o", str(out)]
    assert run(["evaluate", *models, *arguments]) == 0
    assert len(out.read_text().splitlines()) == 6


def test_models_of_runs_are_told_apart(
    tiny_folder: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results.jsonl"
    for run_name in ("one", "two"):
        (tmp_path / run_name).mkdir()
        (tmp_path / run_name / "model").symlink_to(tiny_folder)
    models = [f"{tmp_path}/one/model", f"{tmp_path}/two/model", f"mine={tiny_folder}"]
    arguments = ["--data", str(data), "--layers", "0", "-o", str(out)]
    assert run(["evaluate", *models, *arguments]) == 0
    shown = capsys.readouterr().out
    assert all(shown.count(name) == 4 for name in ("one/model", "two/model", "mine"))
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["model"] for row in rows} == {*models[:2], "mine"}
    assert run(["evaluate", f"a={models[0]}", f"a={models[1]}", *arguments]) == 2
    assert "two models are called 'a'" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["random:{}", "a={}/{{seed}}"])
def test_models_of_seeds_need_a_grid(
    model: str, tiny_folder: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["evaluate", model.format(tiny_folder), "--data", str(data)]) == 2
    assert "models of seeds are of a grid (add -o FOLDER)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--languages", "fr"], "no test for 'fr'"),
        (["--layers", "high"], "--layers high is no list of numbers"),
        (["--layers", "7"], "layer 7 does not exist"),
        (["--tasks", "nope"], "no task is called 'nope'"),
    ],
)
def test_bad_options_leave_no_file(
    tiny_folder: Path,
    data: Path,
    tmp_path: Path,
    options: list[str],
    problem: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fixed = [str(tiny_folder), "--data", str(data), "-o", str(tmp_path / "r.jsonl")]
    assert run(["evaluate", *fixed, *options]) == 2
    assert problem in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_of_equal_layers_the_lowest_is_best() -> None:
    values = {1: (0.1, 0.2), 2: (0.2, 0.3), 3: (0.3, 0.2)}
    scores = [
        Score("m", "tatoeba", "mean", metric, value, 1, layer)
        for layer, both in values.items()
        for metric, value in zip(("a", "b"), both, strict=True)
    ]
    assert choose_layer(scores, "m") == 2
