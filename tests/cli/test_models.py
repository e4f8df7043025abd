"""`calque models`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from calque.cli import run
from calque.cli.training_commands import describe_model
from calque.models import loading


def test_installation_without_a_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loading, "embedded_models", dict)
    assert run(["models"]) == 0
    assert "This installation contains no model" in capsys.readouterr().out


def test_table_of_models(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loading, "embedded_models", lambda: {"tiny": tiny_folder})
    assert run(["models"]) == 0
    shown = capsys.readouterr().out
    assert "1,500" in shown
    assert f"tiny: {tiny_folder}\n" in shown


def test_cards(capsys: pytest.CaptureFixture[str]) -> None:
    """Without the settings for model hubs before the text."""
    assert run(["models", "--card"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("# calque-mini\n")
    assert "## Limits" in shown and "license: apache" not in shown


def test_languages_and_scores_are_read_from_the_config(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    assert describe_model(folder)[1:] == ["4", "64", "1,500", "–", "–"]
    (folder / "README.md").write_text("# A card\n")
    assert describe_model(folder)[4:] == ["see --card", "see --card"]
    config = json.loads((folder / "config.json").read_text())
    config["calque"] = {"languages": ["de", "fr"], "scores": {"tatoeba": 0.4567}}
    (folder / "config.json").write_text(json.dumps(config))
    assert describe_model(folder)[4:] == ["de fr", "tatoeba 0.457"]


def test_a_damaged_model_is_an_error_of_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("[")
    monkeypatch.setattr(loading, "embedded_models", lambda: {"damaged": tmp_path})
    assert run(["models"]) == 2
    assert f"{tmp_path / 'config.json'}: this is not valid JSON" in capsys.readouterr().err
