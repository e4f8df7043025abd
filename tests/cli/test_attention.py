"""`calque attention`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from calque.cli import run
from calque.models.encoder import Encoder
from calque.models.veco import Veco


def read_cells(shown: str) -> list[list[str]]:
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines()]
    return [row for row in rows if row]


def test_layers_of_the_embedded_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["attention", "Take a seat", "请坐"]) == 0
    cells = read_cells(capsys.readouterr().out)
    assert [row[0] for row in cells] == [*map(str, range(1, 9)), "mean", "if uniform"]
    shares = [float(row[1]) for row in cells[:8]]
    assert all(0 < share < 100 for share in shares)
    assert float(cells[8][1]) == pytest.approx(sum(shares) / 8, abs=0.1)


def test_several_models_and_a_picture(
    tiny_encoder: Encoder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    veco = Veco.plug(tiny_encoder)
    folder, picture = tmp_path / "model", tmp_path / "a.svg"
    veco.publish(folder, dtype=torch.float32, state=veco.model.state_dict())
    models = ["--model", "calque-mini", "--model", str(folder)]
    sentences = ["The rumor may be true.", "Das Gerücht könnte wahr sein."]
    assert run(["attention", *sentences, *models, "-o", str(picture), "--layer", "2"]) == 0
    captured = capsys.readouterr()
    cells = read_cells(captured.out)
    assert all(len(row) == 4 for row in cells)
    assert cells[7][1] != "–"
    assert cells[7][2:] == ["–", "–"]  # the second model has four layers
    assert picture.read_text().startswith("<?xml")
    assert f"{picture}: shares by layer" in captured.err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["Take a seat", " "], "there are no words in ' '"),
        (["Take a seat", "请坐", "--layer", "9"], "there is no layer 9 (choose 1 to 8"),
        (["Take a seat", "请坐", "--positions", "x"], "positions cannot be 'x'"),
        (["Take a seat", "请坐", "-o", "a.gif"], "plots cannot be written as '.gif'"),
        (["Take a seat", "请坐", "--model", "nowhere/at/all"], "not a hub name"),
    ],
)
def test_invalid_input(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["attention", *arguments]) == 2
    assert problem in capsys.readouterr().err
