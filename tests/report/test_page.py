"""The HTML page: well formed, self-contained, and with every number."""

from __future__ import annotations

import re
import runpy
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from calque.report.comparison import Comparison, ComparisonSettings, compare_results
from calque.report.page import build_page
from calque.report.plots import IntervalMark, plot_differences, plot_layers, plot_seeds, to_svg
from calque.report.results import read_results
from calque.report.tables import format_spread, to_csv, verdict_sentences
from calque.report.verdict import format_difference

DRAWN = runpy.run_path(str(Path(__file__).parents[1] / "drawn_results.py"))
NASTY = "<script>alert('x')<b>&\"b"
EMPTY = {"meta", "circle", "rect", "line", "polyline"}


class Outline(HTMLParser):
    """Collects open elements, text and references of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.text: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag != "meta":
            self.open.append(tag)
        for name, value in attrs:
            if name in ("href", "src", "srcset", "action", "data", "xlink:href"):
                self.links.append(value or "")
            if name == "id":
                self.ids.add(value or "")
            assert not name.startswith("on")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    folder = tmp_path_factory.mktemp("results")
    DRAWN["draw_results"](folder, {"base": 55, "better": 80, NASTY: 56})
    return compare_results(
        read_results([folder]), "base", settings=ComparisonSettings(n_resamples=200)
    )


@pytest.fixture(scope="module")
def page(study: Comparison) -> str:
    return build_page(study)


def test_the_page_is_well_formed_and_self_contained(page: str) -> None:
    outline = Outline()
    outline.feed(page)
    outline.close()
    assert outline.open == []
    assert page.startswith("<!DOCTYPE html>")
    assert not {"script", "link", "iframe", "img", "object"} & set(outline.seen)
    assert outline.links and all(link.startswith("#") for link in outline.links)
    assert {link[1:] for link in outline.links} <= outline.ids
    assert not re.search(r"https?:|url\((?!#)|@import", page)
    # Two tasks with a plot by language, by seed and by layer, and the marks of legends.
    assert outline.seen.count("figure") == 6
    assert NASTY in "".join(outline.text)


def test_every_number_is_there(study: Comparison, page: str) -> None:
    outline = Outline()
    outline.feed(page)
    text = " ".join(outline.text)
    for task in study.tasks:
        for each in task.models.values():
            assert each.gap is not None
            for c in (each.overall, *each.languages.values(), each.gap):
                assert format_difference(c) in text
                assert format_spread(c.model) in text
                assert format_spread(c.baseline) in text


def test_plots_are_well_formed_and_labeled(page: str) -> None:
    plots = re.findall(r"<svg.*?</svg>", page, re.S)
    assert len(plots) == 6
    for plot in plots:
        root = ElementTree.fromstring(plot)
        assert root.get("role") == "img" and root.get("aria-label")
    assert page.count('by seed"') == page.count('by layer"') == 2
    # Text takes the color of the page, in light and dark mode.
    assert "currentColor" in plots[0] and "#010203" not in page


def test_notes_are_shown(study: Comparison, tmp_path: Path) -> None:
    assert 'class="notes"' not in build_page(study)
    (tmp_path / "items").mkdir()
    rows = [DRAWN["make_row"](model=m, seed=s) for m, s in (("base", 1), ("b", 1), ("b", 2))]
    DRAWN["write_rows"](tmp_path, rows)
    shown = build_page(compare_results(read_results([tmp_path]), "base"))
    assert "1 cell missing: base, pos, seed 2" in shown
    assert "one seed is not enough" in shown


@pytest.mark.parametrize("n_items", [1, 1000])
@pytest.mark.parametrize("seeds", [(None,), (1, 2, 3)])
def test_one_differing_item_gives_no_interval(
    tmp_path: Path, n_items: int, seeds: tuple[int | None, ...]
) -> None:
    """For two nearly equal models there is no interval, and the page must omit it."""
    (tmp_path / "items").mkdir()
    rows = []
    for model, n_right in (("base", n_items), ("rounded", n_items - 1)):
        right = np.arange(n_items) < n_right
        for seed in seeds:
            name = f"items/{model}{seed}.npz"
            np.savez(tmp_path / name, **{"de.num": right.astype(float), "de.den": np.ones(n_items)})
            value, config = 100 * float(right.mean()), f"aa-bb-{model}"
            rows.append(
                DRAWN["make_row"](
                    model=model, seed=seed, value=value, n_items=n_items, items=name, config=config
                )
            )
    DRAWN["write_rows"](tmp_path, rows)
    found = compare_results(
        read_results([tmp_path]), "base", settings=ComparisonSettings(n_resamples=200)
    )
    compared = found.tasks[0].models["rounded"].overall
    assert (compared.low, compared.high) == (None, None)
    assert compared.p == 1.0
    assert compared.category == "within noise"
    assert format_difference(compared) in build_page(found)
    assert "inf" not in to_csv(found) + "\n".join(verdict_sentences(found))


def test_differences_are_drawn_at_their_values() -> None:
    rows = {
        "de": {"a": IntervalMark(0.5, -1.0, 2.0), "b": IntervalMark(3.0, 2.0, 4.0, True)},
        "ja": {"a": IntervalMark(3.0, None, None)},
    }
    (panel,) = plot_differences(rows, {"a": 0, "b": 1}, label="points").axes
    assert [text.get_text() for text in panel.get_yticklabels()] == ["de", "ja"]
    lines = [(list(line.get_xdata()), line.get_markerfacecolor()) for line in panel.get_lines()]
    intervals = [xs for xs, _ in lines if len(xs) == 2 and xs[0] != xs[1]]
    assert intervals == [[-1.0, 2.0], [2.0, 4.0]]
    marks = [(xs[0], fill) for xs, fill in lines if len(xs) == 1]
    assert [x for x, _ in marks] == [0.5, 3.0, 3.0]
    assert [fill == "none" for _, fill in marks] == [True, False, True]


def test_seeds_are_joined_between_models() -> None:
    scores = {"a": {"seed 1": 50.0, "seed 2": 60.0}, "b": {"seed 2": 70.0}}
    (panel,) = plot_seeds(scores, {"a": 0, "b": 1}, label="F1").axes
    lines = [(list(line.get_xdata()), list(line.get_ydata())) for line in panel.get_lines()]
    assert lines == [([0, 1], [60.0, 70.0]), ([0, 0], [50.0, 60.0]), ([1], [70.0])]


def test_degenerate_plots() -> None:
    assert "<svg" in to_svg(plot_seeds({"a": {"seed 1": 50.0}}, {"a": 0}, label="x"), "x")
    assert "<svg" in to_svg(plot_layers({"": {"a": {3: 50.0}}}, label="x"), "x")
    assert "<svg" in to_svg(plot_differences({}, {}, label="x"), "x")
