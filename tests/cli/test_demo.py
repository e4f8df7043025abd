"""`calque demo`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import calque
from calque.cli import run
from calque.cli.demo import find_translations, read_pairs


def test_bundled_pairs() -> None:
    pairs = read_pairs()
    assert set(Counter(language for language, _, _ in pairs).values()) == {25}
    assert len({english for _, english, _ in pairs}) == len(pairs) == 200
    assert all(part.strip() == part and part for pair in pairs for part in pair)


def test_findings_are_nearest_neighbours(tiny_folder: Path) -> None:
    model = calque.load(tiny_folder)
    pairs = [[language, english, english] for language, english, _ in read_pairs()]
    assert np.mean([f.is_right for f in find_translations(model, pairs)]) > 0.9
    wrong = [[language, english, "?"] for language, english, _ in pairs[:4]]
    findings = find_translations(model, wrong)
    assert [f.english for f in findings] == [english for _, english, _ in pairs[:4]]
    assert sum(f.is_right for f in findings) <= 1


def test_the_embedded_model_finds_translations() -> None:
    findings = find_translations(calque.load(device="cpu"), read_pairs())
    assert np.mean([finding.is_right for finding in findings]) > 0.3


def test_output(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["demo", "--model", str(tiny_folder), "--examples", "1"]) == 0
    shown = capsys.readouterr().out
    assert "Unsere Gäste" in shown
    assert "not a benchmark" in shown
    assert "calque embed" in shown
    few = len(shown.splitlines())
    assert run(["demo", "--model", str(tiny_folder), "--examples", "0"]) == 0
    shown = capsys.readouterr().out
    assert "Unsere Gäste" not in shown
    assert len(shown.splitlines()) < few
