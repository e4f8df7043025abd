"""`calque clean`."""

from __future__ import annotations

import gzip
import json
from dataclasses import fields
from pathlib import Path

import pytest

from calque.cli import run
from calque.cli.sentence_commands import clean
from calque.io.cleaning import CleaningRules

PAIRS = [
    ("Good morning!", "Guten Morgen!"),
    ("Good  morning, Tom\u00a0! ", "Guten Morgen, Tom!"),  # tidied
    ("Good morning!", "Guten Morgen!"),  # there already
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


def test_pairs_are_kept_or_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["clean", "en-de.tsv", "-o", "out.tsv.gz", "--report", "report.json"]) == 0
    with gzip.open("out.tsv.gz", "rt", encoding="utf-8") as stream:
        kept = "Good morning!\tGuten Morgen!\nGood morning, Tom !\tGuten Morgen, Tom!\n"
        assert stream.read() == kept
    said = capsys.readouterr().err
    assert said.startswith("out.tsv.gz: kept 2 of 8 (25.0%); dropped: ")
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
    assert "scripts are not checked" not in capsys.readouterr().err


def test_scripts_need_languages(capsys: pytest.CaptureFixture[str]) -> None:
    Path("en-de.tsv").rename("text.tsv")
    assert run(["clean", "text.tsv", "-o", "out.tsv"]) == 0
    said = capsys.readouterr().err
    assert "scripts are not checked: no languages in the names" in said
    assert "kept 3 of 8" in said
    assert run(["clean", "text.tsv", "-o", "out.tsv", "--languages", "en-de"]) == 0
    said = capsys.readouterr().err
    assert "kept 2 of 8" in said and "not checked" not in said


def test_columns_that_are_not_kept_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        (*pair, "tatoeba", "0.9", "http://example.org")[: 3 + 2 * (n > 0)]
        for n, pair in enumerate(PAIRS)
    ]
    Path("en-de.tsv").write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")
    assert run(["clean", "en-de.tsv", "-o", "out.tsv"]) == 0
    assert all(line.count("\t") == 2 for line in Path("out.tsv").read_text("utf-8").splitlines())
    said = capsys.readouterr().err
    assert "; 7 lines with more than three columns, of which the rest is left out (line 2 " in said
    Path("en-de.txt").write_text("a b\tc\td\te ||| x y z\n")
    assert run(["clean", "en-de.txt", "-o", "out.tsv", "--input", "pipes"]) == 0
    assert "columns" not in capsys.readouterr().err


def test_bad_lines_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with open("en-de.tsv", "ab") as stream:
        stream.write(b"no tab\n\xff\tx\n")
    assert run(["clean", "en-de.tsv", "-o", "out.tsv"]) == 2
    assert "en-de.tsv, line 9: no tab" in capsys.readouterr().err
    assert not Path("out.tsv").exists()
    assert run(["clean", "en-de.tsv", "-o", "out.tsv", "--skip-bad", "bad"]) == 0
    assert "2 bad lines skipped" in capsys.readouterr().err
    assert [line.split("\t")[0] for line in Path("bad").read_text().splitlines()] == ["9", "10"]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ([], "0 outputs (give -o FILE, or -o twice: a file a side)"),
        (["-o", "en-de.tsv"], "en-de.tsv: both read and written"),
        (["-o", "a", "-o", "a"], "both sides are the same file"),
        (["-o", "a", "--report", "a"], "-o, --report and --skip-bad (name different files)"),
        (["-o", "a", "--report", "b", "--skip-bad", "./b"], "(name different files)"),
        (["-o", "a", "--set", "max_rato=2"], "--set max_rato: no such rule; did you mean max_rat"),
        (["-o", "a", "--set", "max_ratio"], "--set max_ratio: not of the form key=value"),
        (["-o", "a", "--set", "max_ratio=x"], "--set max_ratio: Input should be a valid number"),
        (["-o", "a", "--set", "max_ratio=0.5"], "max_ratio=0.5 drops all (give 1 or more)"),
        (["-o", "a", "--set", "max_nonletters=60"], "max_nonletters=60 is no share (give 0 to 1"),
        (["-o", "a", "--set", "min_words=-1"], "min_words=-1 (give 0 or more)"),
        (["-o", "a", "--languages", "de"], "--languages de is no pair (write de-en)"),
        (["-o", "a", "--input", "csv"], "csv"),
    ],
)
def test_bad_options_leave_nothing(
    options: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["clean", "en-de.tsv", *options]) == 2
    error = capsys.readouterr().err
    assert problem in error and error.count("\n") == 1
    assert [path.name for path in Path().iterdir()] == ["en-de.tsv"]


def test_the_help_tells_the_defaults() -> None:
    told = " ".join((clean.__doc__ or "").split())
    for field in fields(CleaningRules):
        if isinstance(field.default, bool):
            assert field.name in told
        else:
            assert f"{field.name} {str(field.default).lower()}" in told
