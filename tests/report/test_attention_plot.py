"""The plot of attention: its curves, its lines, and pieces that no font draws."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from calque.report.plots import attention_label, find_fonts, plot_attention, save_plot
from calque.types import PairAttention

NOWHERE = "\U0010fff0"  # private use


def make_reading(model: str, kind: str, scale: float) -> PairAttention:
    """Two layers; the second gives twice as much, and all to the first piece."""
    first = np.array([[0.0, 0.2], [0.2, 0.0], [0.0, 0.0]])
    second = np.array([[0.8, 0.0], [0.0, 0.0], [0.0, 0.0]])
    forth = scale * np.stack([first, second]).astype(np.float32)
    back = forth.swapaxes(1, 2)
    return PairAttention(model, kind, ("a", "b", "c"), ("x", NOWHERE), forth, back, 0.4)


READINGS = [make_reading("runs/m", "self-attention", 0.5), make_reading("runs/n", "cross", 1.0)]


def test_shares_are_sums_over_the_other_sentence() -> None:
    assert READINGS[1].shares == pytest.approx([0.8 / 5, 1.6 / 5])


def test_curves_and_lines() -> None:
    pytest.importorskip("matplotlib")
    figure = plot_attention(READINGS, layer=1)
    upper, *panels = [axes for part in figure.subfigs for axes in part.axes]
    lines = {line.get_label(): line for line in upper.get_lines()}
    assert lines["n, cross"].get_ydata() == pytest.approx([16, 32])
    assert list(lines["n, cross"].get_xdata()) == [1, 2]
    drawn = [{round(line.get_alpha(), 3) for line in panel.get_lines()} for panel in panels]
    assert drawn == [{0.5}, {1.0}]
    assert [len(panel.get_lines()) for panel in panels] == [2, 2]
    texts = [text.get_text() for text in panels[0].texts]
    assert texts == ["a", "b", "c", "x", "2"]  # the second piece cannot be drawn
    (mean, *_) = plot_attention(READINGS).subfigs[1].axes
    assert sorted(round(line.get_alpha(), 3) for line in mean.get_lines()) == [0.125, 0.125, 0.5]


def test_fonts_are_found() -> None:
    pytest.importorskip("matplotlib")
    assert find_fonts("été") == (["DejaVu Sans"], "")
    assert find_fonts(f"a {NOWHERE}")[1] == NOWHERE


def test_the_plot_is_saved_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    save_plot(plot_attention(READINGS), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


def test_models_have_short_names() -> None:
    assert attention_label(READINGS[0], READINGS) == "m, self-attention"
