"""The tables of docs/papers.md are those that the stored results give."""

from __future__ import annotations

import doctest
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "papers.md"
TABLE = "| name | score |\n|---|--:|\n| one | **1.5 ± 0.1** |\n| one more | 2 |\n"


@pytest.fixture
def claims(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = importlib.import_module("paper_claims")
    module.read_claims.cache_clear()
    yield module
    module.read_claims.cache_clear()


def test_page_has_the_tables_of_the_stored_results(claims: Any) -> None:
    text = PAGE.read_text("utf-8")
    assert claims.fill_tables(text, claims.build_tables()) == text, (
        "run: python benchmarks/paper_claims.py docs/papers.md"
    )


def test_every_figure_of_the_tables_is_computed(claims: Any) -> None:
    """A page in which a digit of a table differs is not the one that the script writes."""
    text = PAGE.read_text("utf-8")
    blocks = list(re.finditer(r"<!-- table: .*?<!-- end -->", text, re.DOTALL))
    tables = claims.build_tables()
    assert len(blocks) == len(tables)
    for block in blocks:
        digits = [found.start() for found in re.finditer(r"\d", block[0])]
        place = block.start() + digits[-1]
        changed = f"{text[:place]}{(int(text[place]) + 1) % 10}{text[place + 1 :]}"
        assert claims.fill_tables(changed, tables) == text != changed


@pytest.mark.parametrize(("study", "table"), [("veco-longer", "veco"), ("metaxlm", "metaxlm")])
def test_another_result_gives_another_table(
    study: str, table: str, claims: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = claims.build_tables()
    read = claims.read_runs

    def change(name: str) -> tuple[dict[str, Any], ...]:
        runs = read(name)
        if name != study:
            return runs
        first = next(run for run in runs if run["method"] in ("veco", "metaxlm"))
        # A single run differs: BLEU by one point, or its scores as if the layers were reversed.
        other = first | {"bleu": first.get("bleu", 0) + 1}
        if "scores" in first:
            other["scores"] = {
                measure: {name: values[::-1] for name, values in scores.items()}
                for measure, scores in first["scores"].items()
            }
        return tuple(other if run is first else run for run in runs)

    monkeypatch.setattr(claims, "read_runs", change)
    claims.read_claims.cache_clear()
    monkeypatch.setattr(claims, "tabulate_runs", lambda: before["runs"])
    after = claims.build_tables()
    assert after[table] != before[table]
    assert after["x2s-ma"] == before["x2s-ma"]


def test_study_page_has_the_tables_of_the_stored_results(claims: Any) -> None:
    report = importlib.import_module("mono_report")
    text = (ROOT / "docs" / "studies" / "mono.md").read_text("utf-8")
    contents = report.read(report.STORED)
    tables = report.build_tables(contents)
    assert report.fill_tables(text, tables) == text, "run: python benchmarks/mono_report.py --page"
    # The first start alone has fewer rows, and no label switches.
    first = report.build_tables(contents[:1])
    assert set(tables) - set(first) >= {"label-switches-aer", "x2s-ma-differences"}
    name = "metaxlm-differences"
    assert "start 2" in tables[name] and "start 2" not in first[name]


@pytest.mark.parametrize("study", ["mono", "mono-2"])
def test_stored_differences_are_those_of_the_runs(study: str, claims: Any) -> None:
    """Scores of fine-tuned tasks are means over seeds and languages, and intervals contain them."""
    content = json.loads((ROOT / "docs" / "studies" / f"{study}.json").read_text("utf-8"))
    runs = {(run["method"], run["seed"]): run["scores"] for run in content["cells"]}
    n_checked = 0
    for row in content["differences"]:
        assert row["low"] < row["score"] - row["baseline"] < row["high"]
        if row["task"] in ("tatoeba", "word_alignment"):
            continue
        sides = row["method"], row["versus"]
        seeds = [n for n in range(1, 6) if all((side, n) in runs for side in sides)]
        means = [
            np.mean([np.mean([*runs[side, n][row["task"]].values()]) for n in seeds])
            for side in sides
        ]
        assert means == pytest.approx([row["score"], row["baseline"]], abs=0.01)
        assert row["seeds"] == len(seeds) >= 3
        n_checked += 1
    assert n_checked > 40


def test_another_interval_gives_another_verdict(
    claims: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    row = {"method": "a", "versus": "b", "task": "word_alignment", "seeds": 5}
    row |= {"score": 55.0, "baseline": 57.0}
    spec = {"study": "one", "start": "mono", "method": "a", "versus": "b", "task": row["task"]}
    monkeypatch.setattr(claims, "ROOT", tmp_path)
    (tmp_path / "docs" / "studies").mkdir(parents=True)
    found = []
    for low, high in ((-3.0, -0.5), (-3.0, 0.5), (0.5, 1.0)):
        text = json.dumps({"differences": [row | {"low": low, "high": high}]})
        (tmp_path / "docs" / "studies" / "one.json").write_text(text)
        figure = claims.compare_tasks(spec, None, 0.0)
        assert figure.interval == (low, high)
        found.append(figure.outcome)
    assert found == ["holds", "within noise", "fails"]
    few = json.dumps({"differences": [row | {"low": 0.0, "high": 1.0, "seeds": 2}]})
    (tmp_path / "docs" / "studies" / "one.json").write_text(few)
    with pytest.raises(ValueError, match="only 2 seeds"):
        claims.compare_tasks(spec, None, 0.0)
    none = few.replace('"seeds": 2', '"seeds": 0')  # nothing was trained: test items alone
    (tmp_path / "docs" / "studies" / "one.json").write_text(none)
    assert claims.compare_tasks(spec, None, 0.0).interval == (0.0, 1.0)


def test_figures_of_several_starts_are_numbered(claims: Any) -> None:
    spec = {"start": "mono", "method": "align", "versus": "mlm", "task": "pos"}
    content = {"claim": "", "paper": "", "experiment": "", "why": "", "strength": "test"}
    content["figures"] = [spec | {"study": ["mono", "mono-2"]}]  # type: ignore[assignment]
    figures = claims.build_claim(content).figures
    assert [figure.label for figure in figures] == ["mono 1, POS", "mono 2, POS"]
    assert figures[0].score != figures[1].score


def test_interval_is_paired_by_seed(claims: Any) -> None:
    """Differences 2, 2 and 2.5: standard error 1/6; t of two degrees of freedom is 4.302653."""
    runs = {seed: {"bleu": bleu} for seed, bleu in ((1, 3.0), (2, 4.0), (3, 5.5), (4, 99.0))}
    others = {seed: {"bleu": bleu} for seed, bleu in ((3, 3.0), (2, 2.0), (1, 1.0))}
    score, baseline, half_width = claims.compare_runs(runs, others, ("en-de", "en-de"))
    assert (score, baseline) == (pytest.approx(12.5 / 3), 2.0)
    assert half_width == pytest.approx(4.302653 / 6, rel=1e-6)
    with pytest.raises(ValueError, match="only 2 seeds"):
        claims.compare_runs(runs, {1: others[1], 2: others[2]}, ("en-de", "en-de"))


def test_layer_is_at_two_thirds_of_the_depth(claims: Any) -> None:
    for n_layers, value in ((9, 5.0), (7, 4.0), (13, 8.0)):
        run = {"scores": {"aer": {"de-en": [float(n) for n in range(n_layers)]}}}
        assert claims.measure_runs([run], "aer") == [value]
        assert claims.measure_runs([run], "aer", claims.Part(layer=1)) == [1.0]


def test_languages_and_transfer_gaps(claims: Any) -> None:
    run = {"scores": {"ner": {"en": [60.0], "de": [40.0], "fr": [30.0]}}}
    assert claims.measure_runs([run], "ner") == [35.0]
    assert claims.measure_runs([run], "ner", claims.Part(languages=("de", "en"))) == [50.0]
    assert claims.measure_runs([run], "ner-gap") == [25.0]


def test_directions_are_counted(claims: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two directions are better by 2, one is worse, and one does not differ clearly."""
    scores = {"x": {"en-de": 30, "de-en": 28, "fr-en": 29, "ja-en": 30}}
    scores["y"] = {"en-de": 28, "de-en": 30, "fr-en": 29, "ja-en": 28}
    runs = tuple(
        {"start": "s", "method": name, "seed": seed}
        | {
            "scores": {
                "ner": {k: [v + seed * (1.1 if name == "x" else 1)] for k, v in table.items()}
            }
        }
        for name, table in scores.items()
        for seed in (1, 2, 3)
    )
    runs[0]["scores"]["ner"]["fr-en"][0] += 1
    monkeypatch.setattr(claims, "read_runs", lambda study: runs)
    monkeypatch.setitem(claims.STARTS, "s", "start")
    spec = {"study": "any", "start": "s", "method": "x", "versus": "y", "measure": "ner"}
    spec |= {"each": "direction", "min_seeds": 3}
    count = claims.compare_study(spec, None, 0.0)
    assert count.show() == "start, NER: as claimed at 2 of 4 directions"
    assert (count.show_interval(), count.outcome) == ("opposite at 1", "fails")
    for n, outcome in ((1, "within noise"), (2, "holds")):
        assert claims.compare_study(spec | {"exceptions": n}, None, 0.0).outcome == outcome


@pytest.mark.parametrize(
    ("difference", "half_width", "expected", "margin", "outcome"),
    [
        (1.0, 0.9, 1, 0.0, "holds"),
        (1.0, 1.1, 1, 0.0, "within noise"),
        (-1.0, 0.9, 1, 0.0, "fails"),
        (-1.0, 0.9, -1, 0.0, "holds"),
        (1.0, 0.9, -1, 0.0, "fails"),
        (1.0, 0.9, 0, 0.0, "fails"),
        (1.0, 1.1, 0, 0.0, "within noise"),
        (-0.5, 0.4, 1, 1.0, "holds"),
        (-1.5, 0.4, 1, 1.0, "fails"),
        (0.1, None, 1, 0.0, "holds"),
        (-0.1, None, 1, 0.0, "fails"),
    ],
)
def test_interval_decides(
    difference: float,
    half_width: float | None,
    expected: int,
    margin: float,
    outcome: str,
    claims: Any,
) -> None:
    figure = claims.Figure("", 10 + difference, 10.0, half_width, expected, margin)
    assert figure.outcome == outcome


@pytest.mark.parametrize(
    ("differences", "test", "indication"),
    [
        ((), "not tested yet", "not tested yet"),
        ((2, 2), "holds", "indication for"),
        ((2, 0), "within noise", "indication: within noise"),
        ((-2, 0), "fails", "indication against"),
        ((-2, 2), "fails", "indication: mixed"),
    ],
)
def test_verdict_over_several_figures(
    differences: tuple[float, ...], test: str, indication: str, claims: Any
) -> None:
    figures = tuple(claims.Figure("", each, 0.0, 1.0, 1) for each in differences)
    for strength, verdict in (("test", test), ("indication", indication)):
        assert claims.Claim("", "", "", figures, strength, "").verdict == verdict


def test_result_without_an_interval_is_never_a_test(claims: Any) -> None:
    spec = {"page": "LOG.md", "row": ["λ = 1, plain"], "versus": ["λ = 1, squared"]}
    spec |= {"column": "retrieval", "label": "retrieval"}
    content = {"claim": "a", "paper": "b", "experiment": "c", "why": "d", "figures": [spec]}
    assert claims.build_claim(content).verdict == "indication against, no interval"
    for change in ({"strength": "test"}, {"expected": 0}):
        with pytest.raises(ValueError, match="without an interval"):
            claims.build_claim(content | change)


def test_cell_is_found_by_the_only_row(claims: Any) -> None:
    assert claims.read_cell(TABLE, ["one more"], "score") == "2"
    assert claims.read_cell("  " + TABLE.replace("\n|", "\n  |"), ["one m"], "score") == "2"
    for row, column, first in ((["one"], "score", None), (["two"], "score", None)):
        with pytest.raises(ValueError, match="rows begin with"):
            claims.read_cell(TABLE, row, column, first)
    with pytest.raises(ValueError, match="0 rows"):
        claims.read_cell(TABLE, ["one more"], "score", "other")


def test_verdicts_are_counted(claims: Any) -> None:
    every = [
        claim
        for name, (_, rows) in claims.read_claims().items()
        if name != "tried"
        for claim in rows
    ]
    counts = claims.count_verdicts(every)
    assert sum(counts) == len(every) and all(counts)
    assert sum(not claim.figures for claim in every) == counts[-1]


def test_scripts_of_the_page_have_the_options(claims: Any) -> None:
    text = re.sub(r" *\\\n *", " ", PAGE.read_text("utf-8"))
    commands = re.findall(r"python (benchmarks/\w+\.py)([^\n`#]*)", text)
    assert len(commands) > 10
    for script, options in commands:
        source = (ROOT / script).read_text("utf-8")
        for option in re.findall(r" (--[a-z-]+)", options):
            assert f'"{option}"' in source, (script, option)


def test_examples(claims: Any) -> None:
    assert not doctest.testmod(claims).failed
