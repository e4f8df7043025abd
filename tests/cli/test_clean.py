"""`calque clean`."""

from __future__ import annotations

import gzip
import json
from dataclasses import fields
from pathlib import Path

import pytest

from calque.cli import run
from calque.cli.bitext_commands import clean
from calque.io.cleaning import CleaningRules

PAIRS = [
    ("Good morning!", "Guten Morgen!"),
    ("Good  morning, Tom\u00a0! ", "Guten Morgen, Tom!"),  # normalized
    ("Good morning!", "Guten Morgen!"),  # a duplicate
    ("", "Leer."),
    ("Tom", "Tom"),
    ("Yes.", "Ja, natürlich, sehr gern, wann immer Sie es wünschen und wo."),
    ("It rains.", "Идёт дождь."),
    ("1+1=2 ?!!", "1+1=3 ?!!"),
]


@pytest.fixture(autouse=True)
def bitext(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("en-de.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in PAIRS), encoding="utf-8")


def test_pairs_are_kept_or_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["clean", "en-de.tsv", "-o", "out.tsv.gz", "--report", "report.json"]) == 0
    with gzip.open("out.tsv.gz", "rt", encoding="utf-8") as stream:
        kept = "Good morning!\tGuten Morgen!\nGood morning, Tom !\tGuten Morgen, Tom!\n"
        assert stream.read() == kept
    error = capsys.readouterr().err
    assert error.startswith("out.tsv.gz: kept 2 of 8 (25.0%); dropped: ")
    report = json.loads(Path("report.json").read_text("utf-8"))
    assert sum(report["dropped"].values()) == 6
    assert report["examples"]["wrong script"] == [["It rains.", "Идёт дождь."]]


def test_two_sides_and_other_rules(capsys: pytest.CaptureFixture[str]) -> None:
    for side, name in enumerate(("news.en", "news.de")):
        Path(name).write_text("".join(pair[side] + "\n" for pair in PAIRS), encoding="utf-8")
    rules = ["max_ratio=none", "check_scripts=false", "max_nonletters=1"]
    changes = [part for rule in rules for part in ("--set", rule)]
    command = ["clean", "news.en", "news.de", "-o", "out.en", "-o", "out.de", *changes]
    assert run(command) == 0
    wanted = [0, 1, 5, 6, 7]
    lines = Path("out.de").read_text("utf-8").splitlines()
    assert lines == [PAIRS[number][1] for number in wanted]
    assert len(Path("out.en").read_text("utf-8").splitlines()) == len(lines)
    assert "scripts were not checked" not in capsys.readouterr().err


def test_scripts_need_languages(capsys: pytest.CaptureFixture[str]) -> None:
    Path("en-de.tsv").rename("text.tsv")
    assert run(["clean", "text.tsv", "-o", "out.tsv"]) == 0
    error = capsys.readouterr().err
    assert "scripts were not checked: the file names do not contain languages" in error
    assert "kept 3 of 8" in error
    assert run(["clean", "text.tsv", "-o", "out.tsv", "--languages", "en-de"]) == 0
    error = capsys.readouterr().err
    assert "kept 2 of 8" in error and "not checked" not in error


def test_extra_columns_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        (*pair, "tatoeba", "0.9", "http://example.org")[: 3 + 2 * (n > 0)]
        for n, pair in enumerate(PAIRS)
    ]
    Path("en-de.tsv").write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")
    assert run(["clean", "en-de.tsv", "-o", "out.tsv"]) == 0
    assert all(line.count("\t") == 2 for line in Path("out.tsv").read_text("utf-8").splitlines())
    error = capsys.readouterr().err
    assert "; 7 lines have more than three columns, and the rest was left out (line 2 " in error
    Path("en-de.txt").write_text("a b\tc\td\te ||| x y z\n")
    assert run(["clean", "en-de.txt", "-o", "out.tsv", "--input-format", "pipes"]) == 0
    assert "columns" not in capsys.readouterr().err


def test_bad_lines_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with open("en-de.tsv", "ab") as stream:
        stream.write(b"no tab\n\xff\tx\n")
    assert run(["clean", "en-de.tsv", "-o", "out.tsv"]) == 2
    assert "en-de.tsv, line 9: the line has no tab" in capsys.readouterr().err
    assert not Path("out.tsv").exists()
    assert run(["clean", "en-de.tsv", "-o", "out.tsv", "--skip-bad", "bad"]) == 0
    assert "2 bad lines skipped" in capsys.readouterr().err
    assert [line.split("\t")[0] for line in Path("bad").read_text().splitlines()] == ["9", "10"]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ([], "0 output files were given (choose one TSV file, or two files, one per side)"),
        (["-o", "en-de.tsv"], "en-de.tsv: the file is both input and output"),
        (["-o", "a", "-o", "a"], "both sides are the same file"),
        (
            ["-o", "a", "--report", "a"],
            "bad lines need different files",
        ),
        (
            ["-o", "a", "--report", "b", "--skip-bad", "./b"],
            "(choose other file names)",
        ),
        (["-o", "a", "--set", "max_rato=2"], "--set max_rato: no such rule; did you mean max_rat"),
        (["-o", "a", "--set", "max_ratio"], "--set max_ratio does not have the form"),
        (["-o", "a", "--set", "max_ratio=x"], "--set max_ratio: Input should be a valid number"),
        (["-o", "a", "--set", "max_ratio=0.5"], "max_ratio is 0.5 (choose 1 or more)"),
        (
            ["-o", "a", "--set", "max_nonletters=60"],
            "max_nonletters is 60 (choose a share",
        ),
        (["-o", "a", "--set", "min_words=-1"], "min_words is -1 (choose 0 or more)"),
        (["-o", "a", "--languages", "de"], "'de' does not name two languages"),
        (["-o", "a", "--input-format", "csv"], "unknown format 'csv'"),
    ],
)
def test_invalid_options_write_nothing(
    options: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["clean", "en-de.tsv", *options]) == 2
    error = capsys.readouterr().err
    assert problem in error and error.count("\n") == 1
    assert [path.name for path in Path().iterdir()] == ["en-de.tsv"]


def test_the_help_lists_the_defaults() -> None:
    text = " ".join((clean.__doc__ or "").split())
    for field in fields(CleaningRules):
        if isinstance(field.default, bool):
            assert field.name in text
        else:
            assert f"{field.name} {str(field.default).lower()}" in text
