"""`calque compare`."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

from calque.cli import run

DRAWN = runpy.run_path(str(Path(__file__).parents[1] / "drawn_results.py"))
make_row, write_rows = DRAWN["make_row"], DRAWN["write_rows"]
QUICK = ["--bootstrap", "200"]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    DRAWN["draw_results"](tmp_path / "results", {"base": 55, "better": 80, "same": 55})
    return tmp_path / "results"


def test_a_verdict_for_every_task(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare", str(results), "--baseline", "base", *QUICK]) == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert any(line.startswith("better: +") and "on pos: helps" in line for line in lines)
    assert any(line.startswith("same: ") and "on ner: within noise" in line for line in lines)
    assert lines[-1] == "same, 2 tasks: helps on 0, hurts on 0, within noise on 2"
    assert shown.err == ""


def test_wide_tables_lose_columns(
    results: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["compare", str(results), "--baseline", "base", "--brief", *QUICK]
    assert run(command) == 0
    assert "1 sd rule" in capsys.readouterr().out
    monkeypatch.setattr("calque.cli.report_commands.FILE_WIDTH", 80)
    assert run(command) == 0
    shown = capsys.readouterr().out
    assert "1 sd rule" not in shown and "helps" in shown


def test_files(results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / f"report{suffix}" for suffix in (".html", ".md", ".tex", ".csv")]
    outputs = [text for path in paths for text in ("-o", str(path))]
    command = ["compare", str(results), "--baseline", "base", *QUICK, *outputs]
    assert run(command) == 0
    assert capsys.readouterr().err == f"{', '.join(map(str, paths))}: 4 verdicts\n"
    first = [path.read_bytes() for path in paths]
    starts = (b"<!DOCTYPE html>", b"# Comparison with base", b"% \\usepackage", b"task,metric,")
    assert all(text.startswith(start) for text, start in zip(first, starts, strict=True))
    assert run(command) == 0
    assert [path.read_bytes() for path in paths] == first
    assert not list(tmp_path.glob(".calque*"))


def test_several_folders_and_some_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, (name, rate) in enumerate({"base": 55, "new": 80}.items()):
        DRAWN["draw_results"](tmp_path / name, {name: rate, f"other{number}": 5})
    folders = [str(tmp_path / "base"), str(tmp_path / "new")]
    options = ["--baseline", "base", "--models", "new", "--tasks", "ner", "--brief"]
    assert run(["compare", *folders, *options, *QUICK, "--correction", "bh"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "new, 1 task: helps on 1" in shown and "Benjamini–Hochberg over 1 comparison" in shown
    assert not re.search(r"\b(pos|other\d|ja)\b", shown)


def test_notes_are_printed(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = results / "results.jsonl"
    lines = path.read_text().splitlines()
    failed = make_row(model="same", seed=9, language=None, value=None, error="CUDA out of memory")
    write_rows(results, [])
    text = "\n".join([*lines, lines[0]]) + "\n"
    path.write_text(text + json.dumps(failed) + "\n" + lines[0][:50])
    assert run(["compare", str(results), "--baseline", "base", *QUICK]) == 0
    notes = capsys.readouterr().err.splitlines()
    assert notes[:3] == [
        "calque: note: 1 truncated last line skipped; was a run killed?",
        "calque: note: 1 row repeated for the same cell; the last one counts",
        "calque: note: 1 cell failed: same, pos, seed 9: CUDA out of memory",
    ]
    assert notes[3].startswith("calque: note: 2 cells missing: base, pos, seed 9; better")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            ["--baseline", "x"],
            "there is no model 'x' in the results (choose from: base, better, same)",
        ),
        (["--baseline", "base", "--models", "base"], "no model to compare with base"),
        (["--baseline", "base", "--models", ","], "the list of names is empty"),
        (["--baseline", "base", "--tasks", "x"], "there is no task 'x' in the results"),
        (["--baseline", "base", "--correction", "x"], "there is no correction 'x'"),
        (["--baseline", "base", "--alpha", "1"], "alpha 1 is not a significance level"),
        (["--baseline", "base", "--bootstrap", "9"], "9 bootstrap resamples are too few"),
        (["--baseline", "base", "--bootstrap", "9" * 9], "resamples are too many"),
        (["--baseline", "base", "--alpha", "nan"], "alpha nan is not a significance level"),
        (["--baseline", "base", "--seed", "-1"], "the seed -1 is negative"),
        (["--baseline", "base", "-o", "a.pdf"], "comparisons are not written as '.pdf'"),
        (["--baseline", "base", "-o", "none/a.md"], "its folder does not exist"),
    ],
)
def test_bad_requests_are_one_line(
    results: Path, options: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["compare", str(results), *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("calque: error: ") and error.count("\n") == 1
    assert problem in error


def test_real_results_as_documented(capsys: pytest.CaptureFixture[str]) -> None:
    """The output is the table and the sentences in docs/how-to/evaluate-and-compare.md."""
    tests = Path(__file__).parents[1]
    assert run(["compare", str(tests / "data" / "results"), "--baseline", "calque-mini"]) == 0
    shown = capsys.readouterr()
    lines = {" ".join(line.split()) for line in shown.out.splitlines()}
    page = (tests.parent / "docs" / "how-to" / "evaluate-and-compare.md").read_text("utf-8")
    example = re.search(r"```\n( language .*?)```", page, re.S)
    assert example is not None
    documented = [" ".join(line.split()) for line in example[1].splitlines() if "─" not in line]
    assert len(documented) > 10
    assert [line for line in documented if line not in lines] == []
    assert shown.err == "calque: note: 1 cell missing: random:calque-mini, tatoeba\n"


def test_terminal_escapes_are_refused(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [make_row(model="base\x1b[31m\n", error="\x1b[31m"), make_row(), make_row(model="b")]
    write_rows(results, rows)
    assert run(["compare", str(results), "--baseline", "base"]) == 2
    error = capsys.readouterr().err
    assert "line 1: model is not a name" in error and error.rstrip("\n").isprintable()
    failed = make_row(model="b", task="ner", error="\x1b[31mno\nway", language=None, value=None)
    write_rows(results, [*rows[1:], failed])
    assert run(["compare", str(results), "--baseline", "base"]) == 0
    shown = capsys.readouterr()
    assert r"1 cell failed: b, ner, seed 1: \x1b[31mno" in shown.err
    assert "\x1b" not in shown.err + shown.out


def test_bad_rows_write_nothing(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (results / "results.jsonl").open("a") as stream:
        stream.write("nonsense\n")
    page = tmp_path / "a.html"
    assert run(["compare", str(results), "--baseline", "base", "-o", str(page)]) == 2
    assert "results.jsonl, line 91: this is not valid JSON" in capsys.readouterr().err
    assert not page.exists()
    assert run(["compare", str(tmp_path / "none"), "--baseline", "base"]) == 2
    assert "pass folders or .jsonl files" in capsys.readouterr().err


def test_a_missing_scipy_is_named(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "scipy.special", None)
    assert run(["compare", str(results), "--baseline", "base"]) == 2
    assert "scipy is not installed (pip install 'calque[eval]')" in capsys.readouterr().err
