"""The page: well formed, alone, and with every number."""

from __future__ import annotations

import re
import runpy
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from calque.report.page import make_page
from calque.report.results import read_results
from calque.report.study import Judging, Study, make_study
from calque.report.svg import Interval, choose_step, draw_intervals, draw_layers, draw_seeds
from calque.report.tables import list_sentences, show_spread, to_csv
from calque.report.verdict import show_difference

DRAWN = runpy.run_path(str(Path(__file__).parents[1] / "drawn_results.py"))
NASTY = "<script>alert('x')<b>&\"b"
EMPTY = {"meta", "circle", "rect", "line", "polyline"}


class Outline(HTMLParser):
    """What stands open, what was read, and what points elsewhere."""

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
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    folder = tmp_path_factory.mktemp("results")
    DRAWN["draw_results"](folder, {"base": 55, "better": 80, NASTY: 56})
    return make_study(read_results([folder]), "base", judging=Judging(n_resamples=200))


@pytest.fixture(scope="module")
def page(study: Study) -> str:
    return make_page(study)


def test_it_is_well_formed_and_alone(page: str) -> None:
    outline = Outline()
    outline.feed(page)
    outline.close()
    assert outline.open == []
    assert page.startswith("<!DOCTYPE html>")
    assert not {"script", "link", "iframe", "img", "object"} & set(outline.seen)
    assert outline.links and all(link.startswith("#") for link in outline.links)
    assert {link[1:] for link in outline.links} <= outline.ids
    assert not re.search(r"https?:|url\(|@import", page)
    # Two tasks with a plot by language, by seed and by layer, and the marks of legends.
    assert outline.seen.count("figure") == 6
    assert NASTY in "".join(outline.text)


def test_every_number_is_there(study: Study, page: str) -> None:
    outline = Outline()
    outline.feed(page)
    text = " ".join(outline.text)
    for task in study.tasks:
        for each in task.models.values():
            assert each.gap is not None
            for c in (each.overall, *each.languages.values(), each.gap):
                assert show_difference(c) in text
                assert show_spread(c.model) in text
                assert show_spread(c.baseline) in text


def test_pictures_are_well_formed_and_say_what_they_show(page: str) -> None:
    pictures = re.findall(r"<svg.*?</svg>", page, re.S)
    assert len(pictures) > 6
    for picture in pictures:
        ElementTree.fromstring(picture)
    titles = re.findall(r"<title>(.*?)</title>", page)
    assert sum("seed 3" in title for title in titles) == 2 * 3
    assert sum("layer 2" in title for title in titles) == 2 * 3


def test_notes_are_shown(study: Study, tmp_path: Path) -> None:
    assert 'class="mind"' not in make_page(study)
    (tmp_path / "items").mkdir()
    rows = [DRAWN["make_row"](model=m, seed=s) for m, s in (("base", 1), ("b", 1), ("b", 2))]
    DRAWN["write_rows"](tmp_path, rows)
    shown = make_page(make_study(read_results([tmp_path]), "base"))
    assert "1 cell missing: base, pos, seed 2" in shown
    assert "cannot tell" in shown


@pytest.mark.parametrize("n_items", [1, 1000])
@pytest.mark.parametrize("seeds", [(None,), (1, 2, 3)])
def test_one_item_that_differs_bounds_nothing(
    tmp_path: Path, n_items: int, seeds: tuple[int | None, ...]
) -> None:
    """Two nearly equal models: no interval is as wide as that, and the page must do without."""
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
    found = make_study(read_results([tmp_path]), "base", judging=Judging(n_resamples=200))
    compared = found.tasks[0].models["rounded"].overall
    assert (compared.low, compared.high) == (None, None)
    assert compared.p == 1.0
    assert compared.category == "within noise"
    assert show_difference(compared) in make_page(found)
    assert "inf" not in to_csv(found) + "\n".join(list_sentences(found))


def test_places_on_scales() -> None:
    """A difference of 0 stands on the line of 0, bounds at the ends of their whisker."""
    rows = {
        "de": {"a": Interval(0.0, -1.0, 1.0, "zero")},
        "ja": {"a": Interval(3.0, None, None, "")},
    }
    root = ElementTree.fromstring(draw_intervals(rows, {"a": 1}, label="points"))
    lines = {each.get("class"): each for each in root.iter("line")}
    zero = float(lines["zero"].get("x1", ""))
    marks = [each for each in root.iter("rect") if "mark" in each.get("class", "")]
    assert float(marks[0].get("x", "")) + 4 == pytest.approx(zero, abs=0.11)
    whisker = lines["line c1"]
    left, right = float(whisker.get("x1", "")), float(whisker.get("x2", ""))
    assert (left + right) / 2 == pytest.approx(zero, abs=0.11)
    assert float(marks[1].get("x", "")) + 4 == pytest.approx(zero + 3 * (right - zero), abs=0.5)


def test_degenerate_plots() -> None:
    assert "<svg" in draw_seeds({"a": {"seed 1": 50.0}}, {"a": 0}, label="x")
    assert "<svg" in draw_layers({"a": {3: 50.0}}, {"a": 0}, label="x")
    assert "<svg" in draw_intervals({}, {}, label="x")


@pytest.mark.parametrize("width", [1e-6, 0.03, 1, 7, 99, 12345])
def test_steps_of_scales(width: float) -> None:
    step = choose_step(width)
    assert 4 <= width / step < 10.001
