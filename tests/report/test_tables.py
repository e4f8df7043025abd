"""Tables: the same numbers in all formats, and escaped names."""

from __future__ import annotations

import csv
import io
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from calque.report.comparison import Comparison, ComparisonSettings, compare_results
from calque.report.results import read_results
from calque.report.tables import (
    task_table,
    to_csv,
    to_latex,
    to_markdown,
    to_rich,
    verdict_sentences,
    verdict_table,
    without_column,
)

DRAWN = runpy.run_path(str(Path(__file__).parents[1] / "drawn_results.py"))
NASTY = "a_b|[bold]<i>&$%#{}~^\\"


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    folder = tmp_path_factory.mktemp("results")
    DRAWN["draw_results"](folder, {"base": 55, "better": 80, NASTY: 56})
    return compare_results(
        read_results([folder]), "base", settings=ComparisonSettings(n_resamples=200)
    )


def test_a_table_for_the_terminal(study: Comparison) -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=200)
    tables = [verdict_table(study), *(task_table(study, task) for task in study.tasks)]
    console.print(*map(to_rich, tables))
    shown = stream.getvalue()
    c = study.tasks[0].models["better"].overall
    assert f"{c.model.mean:.1f} ± {c.model.deviation:.1f}" in shown
    assert f"+{c.difference:.1f} [{c.low:.1f}, {c.high:.1f}]" in shown
    assert NASTY in shown and "▲" in shown and "gap to en" in shown
    narrow = task_table(study, study.tasks[0], ["better"])
    assert len(narrow.headers) == 4 and len(narrow.rows) == 3 and len(narrow.below) == 2
    smaller = without_column(tables[0], "1 sd rule")
    assert len(smaller.headers) == len(smaller.rows[0]) == len(tables[0].headers) - 1


def test_upper_bounds_are_named(tmp_path: Path) -> None:
    rows = DRAWN["draw_results"](tmp_path, {"base": 55, "veco": 80}, tasks=("xnli", "pos"))
    notes = {"upper_bound": "tests are read beside human translations"}
    is_bound = {("xnli", "veco"): {"notes": notes}}
    rows = [row | is_bound.get((row["task"], row["model"]), {}) for row in rows]
    DRAWN["write_rows"](tmp_path, rows)
    settings = ComparisonSettings(n_resamples=50)
    found = compare_results(read_results([tmp_path]), "base", settings=settings)
    assert [row[:2] for row in verdict_table(found).rows] == [
        ["xnli", "veco (upper bound)"],
        ["pos", "veco"],
    ]
    assert [task_table(found, task).headers[1:3] for task in found.tasks] == [
        ["base", "veco (upper bound)"],
        ["base", "veco"],
    ]
    assert [note for note in found.notes if "bound" in note] == [
        "xnli: the score of veco is an upper bound: tests are read beside human translations"
    ]


def test_csv_has_every_comparison(study: Comparison) -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv(study))))
    assert len(rows) == 2 * 2 * (1 + 3 + 1)
    c = study.tasks[1].models["better"].languages["ja"]
    (row,) = (r for r in rows if (r["task"], r["model"], r["name"]) == ("ner", "better", "ja"))
    assert float(row["difference"]) == pytest.approx(c.difference, rel=1e-5)
    assert float(row["p_adjusted"]) == pytest.approx(c.p_adjusted, rel=1e-5)
    assert (row["scope"], row["verdict"]) == ("language", c.category)
    assert {row["model"] for row in rows} == {"better", NASTY}


@pytest.mark.parametrize("name", ["=1+2", "+1", "-1", "@sum", "-1.5"])
def test_csv_has_no_formulas(tmp_path: Path, name: str) -> None:
    """Names that a spreadsheet would compute are quoted; negative numbers are not."""
    DRAWN["draw_results"](tmp_path, {"base": 80, name: 50}, tasks=[name], languages=[name, "en"])
    settings = ComparisonSettings(n_resamples=100)
    text = to_csv(compare_results(read_results([tmp_path]), "base", settings=settings))
    rows = list(csv.DictReader(io.StringIO(text)))
    assert {row["model"] for row in rows} == {row["task"] for row in rows} == {f"'{name}"}
    assert {row["name"] for row in rows} == {"mean", "gap", "en", f"'{name}"}
    assert rows[0]["difference"].startswith("-") and float(rows[0]["difference"]) < 0
    assert (rows[0]["higher_is_better"], rows[0]["paired"]) == ("true", "true")
    cells = [cell for row in csv.reader(io.StringIO(text)) for cell in row]
    assert not [cell for cell in cells if cell.startswith(("=", "+", "@", "\t", "\r"))]


def test_markdown_tables_have_equal_rows(study: Comparison) -> None:
    text = to_markdown(study)
    tables = re.findall(r"(?:^\|.*\n)+", text, re.M)
    assert len(tables) == 3
    for table in tables:
        # A pipe that is escaped divides no cells.
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1
    assert "a\\_b\\|\\[bold\\]\\<i\\>\\&\\$%\\#{}\\~^\\\\" in text
    c = study.tasks[0].models["better"].overall
    assert f"better: +{c.difference:.1f}" in text


def test_latex_is_escaped(study: Comparison) -> None:
    text = to_latex(study)
    escaped = r"a\_b|[bold]$<$i$>$\&\$\%\#\{\}\textasciitilde{}\textasciicircum{}\textbackslash{}"
    assert escaped in text
    assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == 3
    for body in re.findall(r"\\toprule\n(.*?)\\bottomrule", text, re.S):
        lines = [line for line in body.splitlines() if line.endswith(r"\\")]
        assert len({len(re.findall(r"(?<!\\)&", line)) for line in lines}) == 1
    assert not re.search("[±−▲▼–↓]", text)


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """Compare thirty models in sixty languages."""
    folder = tmp_path_factory.mktemp("crowd")
    names = {"base": 55, **{f"alignment-{k}": 60 for k in range(30)}}
    languages = ("en", *(f"l{k}" for k in range(1, 60)))
    options = {"tasks": ["pos"], "languages": languages, "seeds": [1, 2], "with_items": False}
    DRAWN["draw_results"](folder, names, **options)
    return compare_results(
        read_results([folder]), "base", settings=ComparisonSettings(n_resamples=100)
    )


def test_latex_tables_fit_on_pages(crowd: Comparison) -> None:
    text = to_latex(crowd)
    tables = re.findall(r"\\begin{tabular}.*?\\end{tabular}", text, re.S)
    found = set()
    for table in tables:
        rows = [line.removesuffix(r" \\") for line in table.splitlines() if line.endswith(r" \\")]
        assert len(rows) <= 45 + 3  # and a heading, a mean and a gap
        cells = [re.sub(r"\$(\\\w+|-)\$", "x", row).split(" & ") for row in rows]
        width = sum(max(map(len, column)) + 2 for column in zip(*cells, strict=True))
        assert width <= 105
        for column in range(2, len(cells[0]), 2):
            found |= {(cells[0][column], row[0]) for row in cells if cells[0][0] == "language"}
    # Every model stands in every row, and floats are given out before LaTeX has too many.
    for model in crowd.models:
        assert {(model, name) for name in ("en", "l59", "mean", "gap to en")} <= found
    assert all(part.count(r"\begin{table}") <= 10 for part in text.split(r"\clearpage"))
    assert "pos, part 1 of 15, page 1 of 2: accuracy" in text


@pytest.mark.parametrize("name", ["study", "crowd"])
def test_latex_compiles(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    engine = shutil.which("pdflatex")
    if engine is None:
        pytest.skip("no LaTeX here")
    body = to_latex(request.getfixturevalue(name))
    frame = "\\documentclass{article}\\usepackage{booktabs}\\begin{document}%s\\end{document}"
    (tmp_path / "a.tex").write_text(frame % body, "utf-8")
    command = [engine, "-interaction=nonstopmode", "-halt-on-error", "a.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    assert "Overfull" not in done.stdout and "too large for page" not in done.stdout


def test_sentences(study: Comparison) -> None:
    lines = verdict_sentences(study)
    assert len(lines) == 2 * (2 + 2 + 1)
    assert lines[0].startswith("better: +") and "on pos: helps (5 seeds; p " in lines[0]
    assert lines[4] == "better, 2 tasks: helps on 2, hurts on 0"
