"""`calque grow`."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from tests.toy_tokenizers import sentence_piece

from calque.cli import run
from calque.cli.growth_commands import _tabulate_texts
from calque.growth.grow import MatchReport, TextShare
from calque.growth.match import RULES


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a tokenizer, two dictionaries to the tiny model's pieces, and texts."""
    pieces = ["▁the", "▁The", "▁Hund", "▁и", "s", ".", "▁zzz", "▁[x]"]
    sentence_piece(pieces).save_pretrained(tmp_path / "new")
    (tmp_path / "en-de.txt").write_text("the Hund\n", encoding="utf-8")
    (tmp_path / "en-ru.txt").write_text("the и\n", encoding="utf-8")
    (tmp_path / "de.txt").write_text("The Hund .\n", encoding="utf-8")
    (tmp_path / "ru.txt").write_text("и zzz\n", encoding="utf-8")
    return tmp_path


def call(mono: Path, folder: Path, *more: str) -> int:
    out = str(folder / "out")
    return run(["grow", str(mono), "--tokenizer", str(folder / "new"), "-o", out, *more])


def test_grow(tiny_folder: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    patterns = ["--dictionary", str(folder / "en-*.txt"), "--text", str(folder / "??.txt")]
    patterns += ["--prefer", "surface"]  # so that one dictionary is of no use
    assert call(tiny_folder, folder, *patterns, "--unmatched", "normal", "--seed", "3") == 0
    printed = capsys.readouterr()
    for part in ("rows by rule", "▁Hund → the", "Cyrillic", "others", "de", "▁[x]"):
        assert part in printed.out
    assert "out: 13 rows instead of 1,500" in printed.err
    assert "1 of 2 dictionary entries used, none of en-ru.txt, body copied" in printed.err
    report = json.loads((folder / "out" / "growth.json").read_text("utf-8"))
    assert (report["seed"], report["unmatched"]) == (3, "normal")
    assert [text["name"] for text in report["match"]["texts"]] == ["de", "ru"]
    assert report["match"]["texts"][1]["matched"] == 0.5


def test_embeddings_can_be_new(
    tiny_folder: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(tiny_folder, folder, "--initialize", "body") == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "embeddings new, body copied" in printed.err
    assert call(tiny_folder, folder, "--initialize", "none", "--overwrite") == 0
    assert "embeddings new, body new" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--initialize", "all"], "initialize cannot be 'all' (use both, body,"),
        (["--average", "no"], "average cannot be 'no' (use weighted, plain)"),
        (["--dictionary", "HERE/no-*.txt"], "no-*.txt: there is no such file (check the path)"),
        (["--language", "fr", "--dictionary", "HERE/en-de.txt"], "no column of 'fr'"),
        (
            ["--initialize", "body", "--text", "HERE/de.txt"],
            "texts are not used with initialize=body",
        ),
    ],
)
def test_invalid_options(
    tiny_folder: Path,
    folder: Path,
    options: list[str],
    problem: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = [option.replace("HERE", str(folder)) for option in options]
    assert call(tiny_folder, folder, *options) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert problem in line
    assert not (folder / "out").exists()


def test_the_table_of_texts_fits_a_narrow_terminal() -> None:
    """Pipes are 80 characters wide, and numbers must not be truncated."""
    text = TextShare("a-language", 123_456_789, 1.0, 1.0, dict.fromkeys(RULES, 1.0))
    match = MatchReport({}, {}, {}, {}, [], 0, [text, text])
    stream = io.StringIO()
    Console(file=stream, width=80).print(_tabulate_texts(match, "en"))
    assert stream.getvalue().count("123,456,789") == 2
    assert "246,913,578" in stream.getvalue()
    assert "…" not in stream.getvalue()


def test_too_large_a_seed_is_rejected(tiny_folder: Path, folder: Path) -> None:
    assert call(tiny_folder, folder, "--seed", str(2**64)) == 2
    assert not (folder / "out").exists()
