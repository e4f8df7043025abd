"""Tables, plot and stored results of benchmarks/mono_study.py.

    python benchmarks/mono_report.py OUT docs/studies/mono.json    # from new runs
    python benchmarks/mono_report.py --page docs/studies/mono.md   # the page of the stored results
    python benchmarks/mono_report.py --tiny                        # tables of a tiny study

mono.json has the scores of all runs, and the differences of methods in every task with the 95 %
intervals of `calque compare`, over seeds and test items together. The page has the differences and
scores by layer of the methods of each paper; a test compares it with the stored results.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from metaxlm_report import collect
from mono_study import METHODS, run_tiny_study
from study_cells import show

STORED = Path(__file__).parents[1] / "docs" / "studies" / "mono.json"
# The methods of a paper, and with which of them the others are compared.
GROUPS = {
    "XLM-Align": ("mlm", ("none", "tlm", "dwa", "align")),
    "Wu and Dredze": ("none", ("weak", "strong", "l2")),
    "MetaXLM": ("xlm", ("metaxlm", "dict")),
}
OTHER_PAIRS = (("align", "none"), ("align", "tlm"), ("weak", "l2"), ("strong", "l2"))
OTHER_PAIRS += (("weak", "strong"), ("dict", "metaxlm"))
TASKS = {
    "pos": "POS",
    "ner": "NER",
    "parsing": "parsing",
    "xquad": "XQuAD",
    "xnli": "XNLI",
    "tatoeba": "Tatoeba",
    "word_alignment": "AER ↓",
}
LAYERED = {"word_alignment": "AER", "tatoeba": "Tatoeba"}

Cells = dict[str, list[dict[str, Any]]]


def main() -> None:
    """Store results, or write or print the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, nargs="?", help="folder of benchmarks/mono_study.py")
    parser.add_argument("stored", type=Path, nargs="?", default=STORED)
    parser.add_argument("--page", type=Path, help="replace the tables of this page, and its plot")
    parser.add_argument("--tiny", action="store_true", help="run and print a tiny study")
    options = parser.parse_args()
    if options.tiny:
        with tempfile.TemporaryDirectory() as folder:
            out = run_tiny_study(Path(folder), ("none", "weak"), 2)
            store(out, Path(folder) / "mono.json")
            print("\n\n".join(build_tables(read(Path(folder) / "mono.json")).values()))
    elif options.out is not None:
        store(options.out, options.stored)
    elif options.page is not None:
        text = options.page.read_text("utf-8")
        options.page.write_text(fill_page(text, read(options.stored)), encoding="utf-8")
        draw_plot(read(options.stored), options.page.with_suffix(".png"))
    else:
        print("\n\n".join(build_tables(read(STORED)).values()))


# Results.


def store(out: Path, stored: Path) -> None:
    """Write the scores of all runs and the differences between methods into one file."""
    cells = {
        path.stem: json.loads(path.read_text("utf-8"))
        for path in sorted((out / "cells").glob("*.json"))
    }
    methods = {cell["method"] for cell in cells.values()}
    pairs = [(one, base) for base, others in GROUPS.values() for one in others]
    known = [pair for pair in (*pairs, *OTHER_PAIRS) if methods >= {*pair}]
    found = [row for pair in known for row in compare(out, cells, *pair)]
    lines = [json.dumps({"name": name} | cell) for name, cell in cells.items()]
    differences = [json.dumps(row) for row in found]
    text = '{{"cells": [\n{}\n],\n"differences": [\n{}\n]}}\n'
    stored.write_text(text.format(",\n".join(lines), ",\n".join(differences)), encoding="utf-8")
    print(f"{stored}: {len(cells)} runs, {len(found)} differences")


def compare(out: Path, cells: dict[str, Any], one: str, base: str) -> list[dict[str, Any]]:
    """Return the differences between two methods by task, as `calque compare` measures them."""
    import calque

    folders = [
        out / "results" / name for name, cell in cells.items() if cell["method"] in (one, base)
    ]
    comparison = calque.compare(folders, baseline=base, models=[one])
    rows = []
    for task in comparison.tasks:
        difference = task.models[one].overall
        numbers = {
            "score": difference.model.mean,
            "baseline": difference.baseline.mean,
            "low": difference.low,
            "high": difference.high,
        }
        rows.append(
            {"method": one, "versus": base, "task": task.task, "seeds": difference.n_seeds}
            | {name: round(float(value), 3) for name, value in numbers.items() if value is not None}
        )
    return rows


def read(stored: Path) -> dict[str, Any]:
    """Return the stored results."""
    content: dict[str, Any] = json.loads(stored.read_text("utf-8"))
    return content


def by_method(content: dict[str, Any]) -> Cells:
    """Return the runs by method."""
    found: Cells = {}
    for cell in content["cells"]:
        found.setdefault(cell["method"], []).append(cell)
    return found


# Tables.


def build_tables(content: dict[str, Any]) -> dict[str, str]:
    """Return the tables of the page by name."""
    methods = by_method(content)
    tables = {"runs": tabulate_runs(methods)}
    for paper, (base, others) in GROUPS.items():
        others = tuple(name for name in others if name in methods)
        if base not in methods or not others:
            continue
        name = paper.lower().replace(" ", "-")
        tables[f"{name}-differences"] = tabulate_differences(content, base, others)
        for task, title in LAYERED.items():
            tables[f"{name}-{title.lower()}"] = tabulate_layers(methods, task, (base, *others))
    return tables


def tabulate_runs(methods: Cells) -> str:
    """Tabulate the methods: what they are, their seeds and mean seconds."""
    rows = []
    for name, runs in sorted(methods.items(), key=lambda item: [*METHODS].index(item[0])):
        seconds = [np.mean([run["seconds"][part] for run in runs]) for part in ("train", "test")]
        shown = [f"{value:.0f}" for value in seconds]
        rows.append([name, METHODS[name].title, METHODS[name].start, str(len(runs)), *shown])
    header = ["method", "", "start", "seeds", "seconds of training", "of tests"]
    return make_table(header, rows)


def tabulate_differences(content: dict[str, Any], base: str, others: Sequence[str]) -> str:
    """Tabulate the differences of methods from one of them, with their intervals, by task."""
    found = {
        (row["method"], row["task"]): row
        for row in content["differences"]
        if row["versus"] == base and row["method"] in others
    }
    tasks = [task for task in TASKS if any(name == task for _, name in found)]
    rows = []
    for task in tasks:
        first = next(row for (_, name), row in found.items() if name == task)
        cells = [TASKS[task], f"{first['baseline']:.1f}"]
        for other in others:
            row = found.get((other, task))
            cells.append("–" if row is None else show_difference(row, task))
        rows.append(cells)
    header = ["", METHODS[base].title, *(METHODS[name].title for name in others)]
    return make_table(header, rows)


def show_difference(row: dict[str, Any], task: str) -> str:
    """Return a score with its difference and interval, if there is one.

    ↑ and ↓ mark intervals without 0.
    """
    if "low" not in row:
        return f"{row['score']:.1f}"
    low, high = row["low"], row["high"]
    sign = -1 if task == "word_alignment" else 1
    mark = "" if low <= 0 <= high else " ↑" if (low > 0) == (sign > 0) else " ↓"
    difference = row["score"] - row["baseline"]
    text = f"{row['score']:.1f}: {difference:+.1f} \\[{low:+.1f}, {high:+.1f}\\]{mark}"
    return text.replace("-", "−").replace("+0.0", "0.0").replace("−0.0", "0.0")


def tabulate_layers(methods: Cells, task: str, names: Sequence[str]) -> str:
    """Tabulate the scores of methods by layer."""
    rows, depth = [], 0
    for name in names:
        values = collect(methods[name], task)
        depth = values.shape[1]
        is_fixed = METHODS[name].recipe is None  # the same weights for every seed
        columns = values[:1].T if is_fixed else values.T
        rows.append([METHODS[name].title, *(show(column) for column in columns)])
    return make_table([f"{LAYERED[task]} by layer", *map(str, range(depth))], rows)


def make_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rule = ["---"] * len(header)
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, rule, *rows))


def fill_page(text: str, content: dict[str, Any]) -> str:
    """Replace the tables between `<!-- table: NAME -->` and `<!-- end -->` in a page."""
    tables = build_tables(content)

    def replace(found: re.Match[str]) -> str:
        return f"<!-- table: {found[1]} -->\n\n{tables[found[1]]}\n\n<!-- end -->"

    return re.sub(r"<!-- table: (.*?) -->.*?<!-- end -->", replace, text, flags=re.DOTALL)


def draw_plot(content: dict[str, Any], path: Path) -> None:
    """Plot the AER and the retrieval of the methods of XLM-Align by layer."""
    from calque.report.plots import plot_layers, save_plot

    methods = by_method(content)
    base, others = GROUPS["XLM-Align"]
    panels = {
        title: {
            METHODS[name].title: dict(enumerate(collect(methods[name], task).mean(axis=0).tolist()))
            for name in ("none", base, *others[1:])
        }
        for task, title in LAYERED.items()
    }
    save_plot(plot_layers(panels, label="%"), path)


if __name__ == "__main__":
    main()
