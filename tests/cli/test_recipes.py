"""`calque recipes`."""

from __future__ import annotations

from pathlib import Path

import pytest

from calque.cli import run
from calque.cli.training_commands import first_sentence

FOLDER = Path(__file__).parents[2] / "recipes"


def test_all_recipes_are_listed_with_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["recipes"]) == 0
    shown = capsys.readouterr().out
    files = sorted(FOLDER.glob("*.yaml"))
    assert len(files) > 20
    for path in files:
        assert f" {path.stem} " in shown
        sentence = first_sentence(path.read_text("utf-8"))
        assert 20 < len(sentence) < 250 and sentence[0].isupper() | (sentence[0] == "`")


def test_recipe_is_printed_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["recipes", "weak"]) == 0
    assert capsys.readouterr().out == (FOLDER / "weak.yaml").read_text("utf-8")
    assert run(["recipes", "week"]) == 2
    assert "week: no such recipe (pass a YAML file or one of adapt" in capsys.readouterr().err


def test_file_that_is_not_utf8_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_bytes("name: Übung\n".encode("latin-1"))
    assert run(["recipes", str(tmp_path / "mine.yaml")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert (
        captured.err
        == f"calque: error: {tmp_path / 'mine.yaml'}: the file is not UTF-8 (save it as UTF-8)\n"
    )
