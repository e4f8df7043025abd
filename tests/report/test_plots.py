"""Plots: points in the right panels, and files of the right type."""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from calque.errors import InputError, MissingExtra
from calque.report.plots import (
    IntervalMark,
    check_plot,
    page_style,
    plot_curves,
    plot_differences,
    plot_layers,
    plot_reliability,
    plot_seeds,
    plot_transfer,
    save_plot,
    shorten_names,
    to_svg,
)
from calque.types import Reliability

MODELS = (("runs/a", 50.0), ("runs/b", 30.0))
PANELS = {
    language: {model: dict.fromkeys((2, 0, 1), start + shift) for model, start in MODELS}
    for language, shift in (("mean", 2), ("en-fr", 5), ("de-en", 0))
}


def test_layers_have_one_panel_per_language_and_one_line_per_model() -> None:
    pytest.importorskip("matplotlib")
    figure = plot_layers(PANELS, label="AER (%)")
    panels = [panel for panel in figure.axes if panel.get_visible()]
    assert [panel.get_title() for panel in panels] == ["mean", "en-fr", "de-en"]
    for panel, shift in zip(panels, (2, 5, 0), strict=True):
        lines = {line.get_label(): line for line in panel.get_lines()}
        assert set(lines) == {"a", "b"}
        assert list(lines["a"].get_xdata()) == [0, 1, 2]
        assert list(lines["a"].get_ydata()) == [50 + shift] * 3
        assert list(lines["b"].get_ydata()) == [30 + shift] * 3
        assert lines["a"].get_color() != lines["b"].get_color()
    (legend,) = figure.legends
    assert {text.get_text() for text in legend.get_texts()} == {"a", "b"}
    with pytest.raises(InputError, match="no scores by layer to draw"):
        plot_layers({}, label="BLEU")


@pytest.mark.parametrize(
    ("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")]
)
def test_files(tmp_path: Path, suffix: str, start: bytes) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"plot{suffix}"
    check_plot(path)
    save_plot(plot_layers(PANELS, label="AER"), path)
    assert path.read_bytes().startswith(start)
    assert [found.name for found in tmp_path.iterdir()] == [path.name]


def test_names() -> None:
    assert shorten_names(["x/a/", "b"]) == {"x/a/": "a", "b": "b"}
    assert shorten_names(["x/model", "y/model"]) == {"x/model": "x/model", "y/model": "y/model"}
    # `model` alone would be the name of every run.
    assert shorten_names(["/a/run/model", "b"]) == {"/a/run/model": "run/model", "b": "b"}
    assert shorten_names(["model"]) == {"model": "model"}


def test_names_are_safe_in_a_terminal() -> None:
    assert shorten_names(["a\x1b[31m", "b"]) == {"a\x1b[31m": r"a\x1b[31m", "b": "b"}


@pytest.mark.parametrize("name", [r"$\frac$", "_a$$<b>&"])
def test_names_are_drawn_literally(tmp_path: Path, name: str) -> None:
    """A dollar sign begins no formula, and an underscore hides no line."""
    pytest.importorskip("matplotlib")
    point = [(1, 2.0)]
    figures = [
        plot_layers({name: {name: {0: 1.0}, "b": {0: 2.0}}}, label=name),
        plot_curves({name: {name: point, "b": point}}, across=name, label=name),
        plot_transfer({name: [(0, 50, 20)], "b": [(0, 50, 20)]}, label=name),
    ]
    for figure in figures:
        assert [text.get_text().strip() for text in figure.legends[0].get_texts()] == [name, "b"]
        save_plot(figure, tmp_path / "plot.svg")
        content = ElementTree.parse(tmp_path / "plot.svg")
        assert content.getroot().tag.endswith("svg")
    with page_style():
        mark = IntervalMark(1.0, 0.5, 1.5)
        differences = plot_differences({name: {name: mark}}, {name: 0}, label=name)
        seeds = plot_seeds({name: {"seed 1": 1.0}}, {name: 0}, label=name)
        for figure in (differences, seeds):
            assert f">{escape(name, quote=False)}</text>" in to_svg(figure, name)


def test_a_missing_matplotlib_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtra, match=r"matplotlib is not installed .*calque\[plots\]"):
        check_plot(tmp_path / "a.png")


CURVES = {
    "runs/a": [(0, 50, 20), (10, 80, 60)],
    "runs/b": [(0, 30, 30), (20, 90, 50)],
}


def test_others_source_and_gap_along_training() -> None:
    pytest.importorskip("matplotlib")
    panels = plot_transfer(CURVES).axes
    assert [panel.get_title() for panel in panels] == ["other languages, mean", "source", "gap"]
    expected = {"a": ([0, 10], [20, 60], [50, 80], [30, 20]), "b": ([0, 20], [30, 50], [30, 90])}
    expected["b"] = (*expected["b"], [0, 40])
    for number, panel in enumerate(panels, start=1):
        lines = {line.get_label(): line for line in panel.get_lines()}
        assert set(lines) == {"a", "b"}
        for name, line in lines.items():
            assert list(line.get_xdata()) == expected[name][0]
            assert list(line.get_ydata()) == pytest.approx(expected[name][number])


def test_many_runs_have_different_styles() -> None:
    pytest.importorskip("matplotlib")
    panel = plot_transfer({f"run{number}": CURVES["runs/a"] for number in range(12)}).axes[0]
    styles = {(line.get_color(), line.get_linestyle()) for line in panel.get_lines()}
    assert len(styles) == 12


def test_no_probe_scores() -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(InputError, match="no probe scores to plot"):
        plot_transfer({"a": []})


def test_curves_have_one_panel_per_title_and_runs_keep_their_colors() -> None:
    pytest.importorskip("matplotlib")
    panels = {"en → de": {"XLM": [(1, 2.0), (3, 4.0)], "VECO": [(1, 5.0)]}, "de → en": {}}
    panels["de → en"] = {"VECO": [(2, 7.0)]}
    figure = plot_curves(panels, across="updates", label="BLEU")
    first, second = figure.axes
    assert [panel.get_title() for panel in (first, second)] == list(panels)
    xlm, veco = first.get_lines()
    assert list(xlm.get_xdata()) == [1, 3]
    assert list(xlm.get_ydata()) == [2.0, 4.0]
    assert second.get_lines()[0].get_color() == veco.get_color() != xlm.get_color()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["XLM", "VECO"]
    with pytest.raises(InputError, match="no curves to plot"):
        plot_curves({"en → de": {}}, across="updates", label="BLEU")


def test_reliability_has_a_point_per_filled_bin() -> None:
    found = Reliability(np.array([8, 0, 2]), np.array([0.1, 0.0, 0.9]), np.array([0.25, 0.0, 0.5]))
    figure = plot_reliability({"argmax": found})
    panel, below = figure.axes
    _, line = panel.lines
    np.testing.assert_allclose(line.get_xydata(), [[10, 25], [90, 50]])
    (legend,) = figure.legends
    # (8 · 0.15 + 2 · 0.4) / 10
    assert legend.get_texts()[0].get_text() == "argmax, calibration error 20.0 %"
    assert below.patches[0].get_data().values.tolist() == [8, 0, 2]
    figure.draw_without_rendering()
    assert "10" in [label.get_text() for label in below.get_yticklabels()]


@pytest.mark.parametrize(("length", "columns"), [(1, 4), (30, 2), (60, 1)])
def test_long_names_take_more_lines(length: int, columns: int) -> None:
    pytest.importorskip("matplotlib")
    curves = {f"{number}".zfill(length): [(1, 2.0), (3, 4.0)] for number in range(8)}
    figure = plot_curves({"en → de": curves, "de → en": curves}, across="updates", label="BLEU")
    (legend,) = figure.legends
    figure.draw_without_rendering()
    box = legend.get_window_extent()
    assert len({text.get_window_extent().x0 for text in legend.get_texts()}) == columns
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.x1
