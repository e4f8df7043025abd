"""`calque demo`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import calque
from calque.cli import run
from calque.cli.alignment_commands import find_translations, read_demo_rows
from calque.cli.alignment_tables import color_links, group_words


def test_demo_rows() -> None:
    rows = read_demo_rows()
    assert set(Counter(language for language, _, _ in rows).values()) == {25}
    assert len({english for _, english, _ in rows}) == len(rows) == 200
    assert all(part.strip() == part and part for row in rows for part in row)


def test_translations_are_nearest_neighbors(tiny_folder: Path) -> None:
    model = calque.load(tiny_folder)
    rows = [(language, english, english) for language, english, _ in read_demo_rows()]
    english = [row[1] for row in rows]
    assert np.mean(np.array(find_translations(model, rows)) == english) > 0.9


def test_the_embedded_model_finds_translations() -> None:
    rows = read_demo_rows()
    found = find_translations(calque.load(device="cpu"), rows)
    assert np.mean([best == row[1] for best, row in zip(found, rows, strict=True)]) > 0.3


def test_output(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["demo", "--model", str(tiny_folder), "--examples", "1"]) == 0
    shown = capsys.readouterr().out
    assert "Unsere Gäste" in shown
    assert "not a benchmark" in shown
    assert "₁" in shown  # words of the aligned pairs are numbered
    assert "calque embed" in shown
    few = len(shown.splitlines())
    assert run(["demo", "--model", str(tiny_folder), "--examples", "0"]) == 0
    shown = capsys.readouterr().out
    assert "Unsere Gäste" not in shown
    assert len(shown.splitlines()) < few


def test_indirectly_linked_words_are_one_group() -> None:
    # 0-0, 0-1 and 2-1 are one group; word 1 has no link; 3-2 is a group of its own.
    assert group_words(4, 3, [(3, 2), (0, 0), (2, 1), (0, 1)]) == ([0, None, 0, 1], [0, 0, 1])


def test_colors_follow_the_groups() -> None:
    src, tgt = color_links((["das", "Haus", "!"], ["house", "the"]), [(0, 1), (1, 0)])
    assert (src.plain, tgt.plain) == ("das₁ Haus₂ !", "house₂ the₁")
    styles = {src.plain[span.start : span.end]: span.style for span in src.spans}
    others = {tgt.plain[span.start : span.end]: span.style for span in tgt.spans}
    assert styles["das"] == others["the"] != styles["Haus"] == others["house"]
    assert styles["!"] == "dim"
    src, _ = color_links((["\x1b[31mred", "[bold]"], ["rot"]), [])
    assert src.plain == r"\x1b[31mred [bold]"
