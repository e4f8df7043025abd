"""Tables, plot and stored results of benchmarks/mono_study.py.

    python benchmarks/mono_report.py OUT docs/studies/mono-2.json  # from new runs
    python benchmarks/mono_report.py --page docs/studies/mono.md   # the page of the stored results
    python benchmarks/mono_report.py --tiny                        # tables of a tiny study

The starts were trained twice. mono.json has the runs from the first ones, mono-2.json those from
the second ones: the scores of all runs, and the differences of methods in every task with the 95 %
intervals of `calque compare`, over seeds and test items together. The page has the differences and
scores by layer of the methods of each paper; a test compares it with the stored results.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from metaxlm_report import collect
from mono_study import METHODS, run_tiny_study
from study_cells import compare_results, fill_tables, make_table, show

STUDIES = Path(__file__).parents[1] / "docs" / "studies"
STORED = (STUDIES / "mono.json", STUDIES / "mono-2.json")
MIN_SEEDS = 3  # of methods that are compared and shown
# The methods of a paper, and with which of them the others are compared.
GROUPS = {
    "XLM-Align": ("mlm", ("none", "tlm", "dwa", "align")),
    "Label switches": (
        "tlm-align",
        ("label-layer", "pointer-layer", "union", "unmasked", "all-queries"),
    ),
    "Wu and Dredze": ("none", ("weak", "noisy", "strong", "l2")),
    "Linear maps": ("none-features", ("linear",)),
    "A smaller start": ("small-none", ("none", "small-weak")),
    "X2S-MA": ("mlm", ("mse", "dcca", "dcca-skipgram")),
    "VECO": ("tlm", ("none", "veco", "mbart")),
    "Plug-in": ("plug-out", ("plug-in",)),
    "MetaXLM": ("xlm", ("metaxlm", "dict", "dict-paper", "xlm-matched")),
    "Parts of MetaXLM": ("metaxlm", ("body", "embeddings", "frozen", "kd")),
    "Directions": ("xlm-directions", ("metaxlm-directions",)),
    "Combinations": ("align", ("sentences", "align-sentences")),
    "DCCA and weak alignment": ("weak-mlm", ("mlm", "dcca", "dcca-weak")),
    "A grown start": ("metaxlm-tlm", ("metaxlm", "veco-grown")),
}
WITH_LAYERS = ("XLM-Align", "Label switches", "Wu and Dredze", "X2S-MA", "VECO", "MetaXLM")
WITH_LAYERS += ("Combinations",)  # the groups with tables by layer
OTHER_PAIRS: tuple[tuple[str, str], ...] = (("align", "none"), ("align", "tlm"), ("mlm", "none"))
OTHER_PAIRS += (("noisy", "weak"), ("weak", "l2"), ("strong", "l2"), ("weak", "strong"))
OTHER_PAIRS += (("dict", "metaxlm"), ("dict-paper", "dict"), ("metaxlm", "xlm-matched"))
OTHER_PAIRS += (("align-sentences", "sentences"), ("linear", "none"), ("none", "small-weak"))
OTHER_PAIRS += (("veco", "none"), ("veco", "mbart"), ("dcca", "dcca-skipgram"))
OTHER_PAIRS += (("dict-paper", "xlm-matched"), ("dict-paper", "body"))
OTHER_PAIRS += (("tlm", "mbart"), *(("metaxlm", part) for part in GROUPS["Parts of MetaXLM"][1]))
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
Content = dict[str, Any]  # of a file of stored results


def main() -> None:
    """Store results, or write or print the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, nargs="?", help="folder of benchmarks/mono_study.py")
    parser.add_argument("stored", type=Path, nargs="?", default=STORED[-1])
    parser.add_argument("--page", type=Path, help="replace the tables of this page, and its plot")
    parser.add_argument("--tiny", action="store_true", help="run and print a tiny study")
    options = parser.parse_args()
    contents: list[Content]
    if options.tiny:
        with tempfile.TemporaryDirectory() as folder:
            out = run_tiny_study(Path(folder), ("none", "weak"), MIN_SEEDS)
            store(out, Path(folder) / "mono.json")
            contents = read([Path(folder) / "mono.json"])
    elif options.out is not None:
        return store(options.out, options.stored)
    else:
        contents = read(STORED)
    if options.page is not None:
        text = options.page.read_text("utf-8")
        options.page.write_text(fill_tables(text, build_tables(contents)), encoding="utf-8")
        return draw_plot(contents, options.page.with_suffix(".png"))
    return print("\n\n".join(build_tables(contents).values()))


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
    """Return the differences between two methods by task, if there are enough seeds."""
    runs = [name for name, cell in cells.items() if cell["method"] in (one, base)]
    rows = compare_results([out / "results" / name for name in runs], one, base)
    return [row for row in rows if row["seeds"] == 0 or row["seeds"] >= MIN_SEEDS]


def read(files: Sequence[Path]) -> list[Content]:
    """Return the contents of files of stored results."""
    return [json.loads(path.read_text("utf-8")) for path in files]


def by_method(content: Content) -> Cells:
    """Return the runs by method, without methods that have few seeds."""
    found: Cells = {}
    for cell in content["cells"]:
        found.setdefault(cell["method"], []).append(cell)
    return {name: runs for name, runs in found.items() if len(runs) >= MIN_SEEDS}


# Tables.


def build_tables(contents: Sequence[Content]) -> dict[str, str]:
    """Return the tables of the page by name."""
    tables = {"runs": tabulate_runs(contents)}
    for paper, (base, others) in GROUPS.items():
        name = paper.lower().replace(" ", "-")
        content = choose_content(contents, base, others)
        if content is None:
            continue
        methods = by_method(content)
        tables[f"{name}-differences"] = tabulate_differences(contents, base, others)
        shown = [method for method in (base, *others) if method in methods]
        layered = LAYERED if paper in WITH_LAYERS else {}
        for task, title in layered.items():
            if all(task in methods[method][0]["scores"] for method in shown):
                tables[f"{name}-{title.lower()}"] = tabulate_layers(methods, task, shown)
    directions = tabulate_directions(by_method(contents[-1]))
    return tables | ({"directions": directions} if directions else {})


def choose_content(contents: Sequence[Content], base: str, others: Sequence[str]) -> Content | None:
    """Return the results with most of the methods, the latest ones if several have equally many."""
    counts = {}
    for number, content in enumerate(contents):
        methods = by_method(content)
        if base in methods and methods.keys() & {*others}:
            counts[len(methods.keys() & {*others}), number] = content
    return counts[max(counts)] if counts else None


def tabulate_runs(contents: Sequence[Content]) -> str:
    """Tabulate the methods: what they are, their seeds and, of the latest runs, mean seconds."""
    found = [by_method(content) for content in contents]
    rows = []
    for name, method in METHODS.items():
        runs = [methods.get(name, []) for methods in found]
        if not any(runs):
            continue
        latest = [each for each in runs if each][-1]
        seconds = [np.mean([run["seconds"][part] for run in latest]) for part in ("train", "test")]
        seeds = [str(len(each) or "–") for each in runs]
        rows.append([name, method.title, method.start, *seeds, *(f"{t:.0f}" for t in seconds)])
    numbers = [f"seeds, start {number}" for number in range(1, len(contents) + 1)]
    header = ["method", "", "start", *numbers, "seconds of training", "of tests"]
    return make_table(header, rows, has_numbers=False)


def tabulate_differences(contents: Sequence[Content], base: str, others: Sequence[str]) -> str:
    """Tabulate the differences of methods from one of them, with their intervals.

    There is a row for every task and start.
    """
    rows = []
    for task in TASKS:
        for number, content in enumerate(contents, start=1):
            found = {
                row["method"]: row
                for row in content["differences"]
                if (row["versus"], row["task"]) == (base, task) and row["seeds"] >= MIN_SEEDS
            }
            known = [found[name] for name in others if name in found]
            if known:
                shown = [show_difference(found.get(name), task) for name in others]
                baseline = f"{known[0]['baseline']:.1f}"
                rows.append([f"{TASKS[task]}, start {number}", baseline, *shown])
    header = ["", METHODS[base].title, *(METHODS[name].title for name in others)]
    return make_table(header, rows, has_numbers=False)


def tabulate_directions(methods: Cells) -> str:
    """Tabulate NER by the language that is learned and the one that is tested."""
    base, (other,) = GROUPS["Directions"]
    if not {base, other} <= methods.keys():
        return ""
    names = methods[base][0]["scores"]["ner"]
    languages = sorted({name.partition("-")[0] for name in names})

    def show_pair(direction: str) -> str:
        pair = (collect(methods[name], "ner", direction).mean() for name in (base, other))
        return " → ".join(f"{value:.1f}" for value in pair)

    rows = [[src, *(show_pair(f"{src}-{tgt}") for tgt in languages)] for src in languages]
    header = ["learned in", *(f"tested in {name}" for name in languages)]
    return make_table(header, rows, has_numbers=False)


def show_difference(row: dict[str, Any] | None, task: str) -> str:
    """Return a score with its difference and interval, if there is one.

    ↑ and ↓ mark intervals without 0.
    """
    if row is None:
        return "–"
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


def draw_plot(contents: Sequence[Content], path: Path) -> None:
    """Plot the AER and the retrieval of the methods of XLM-Align by layer."""
    from calque.report.plots import plot_layers, save_plot

    base, others = GROUPS["XLM-Align"]
    content = choose_content(contents, base, others)
    if content is None:
        raise SystemExit("there are no runs of XLM-Align to plot")
    methods = by_method(content)
    names = [name for name in ("none", base, *others[1:]) if name in methods]
    panels = {
        title: {
            METHODS[name].title: dict(enumerate(collect(methods[name], task).mean(axis=0).tolist()))
            for name in names
        }
        for task, title in LAYERED.items()
    }
    save_plot(plot_layers(panels, label="%"), path)


if __name__ == "__main__":
    main()
