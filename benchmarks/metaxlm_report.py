"""Tables and plots of the results of benchmarks/metaxlm.py, which calls this module."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from study_cells import judge, make_table, show

if TYPE_CHECKING:
    import numpy.typing as npt

    Methods = dict[str, list[dict[str, Any]]]
    Results = dict[str, Methods]
    Values = npt.NDArray[np.float64]

OWN, MINILM, MONO = "own", "minilm", "mono"
TITLES = {
    "xlm": "XLM, from scratch",
    "metaxlm": "MetaXLM",
    "dict": "MetaXLM + Dict",
    "dict-paper": "MetaXLM + Dict, matched as in the paper",
    "xlm-matched": "XLM, compute of both phases",
    "body": "body alone",
    "embeddings": "embeddings alone",
    "frozen": "MetaXLM, frozen body",
    "kd": "XLM + KD",
}
BASE = "xlm"
# Findings of the paper: the first method is better than the second.
CLAIMS = (
    ("Table 1", "metaxlm", "xlm"),
    ("Table 1", "dict", "metaxlm"),
    ("Table 1", "dict-paper", "metaxlm"),
    ("not in the paper", "metaxlm", "xlm-matched"),
    ("Table 3", "kd", "xlm"),
    ("Table 3", "metaxlm", "kd"),
    ("Table 4", "metaxlm", "frozen"),
    ("Table 5", "metaxlm", "body"),
    ("Table 5", "metaxlm", "embeddings"),
)
LOSS, POS, NER, TATOEBA, AER = "loss", "pos", "ner", "tatoeba", "aer"
MEASURES = {
    POS: "POS of other languages",
    NER: "NER of other languages",
    TATOEBA: "Tatoeba",
    AER: "AER",
}
# 1 if higher is better.
SIGNS = {LOSS: -1, POS: 1, NER: 1, TATOEBA: 1, AER: -1}
EARLY, LATE = 20, 60  # percent of the steps


# Results.


def unpack_results(out: Path) -> None:
    """Write the results in the bundle of another machine as files, unless they exist."""
    bundle = out / "study.json"
    if bundle.exists():
        for name, result in json.loads(bundle.read_text())["cells"].items():
            path = out / "cells" / f"{name}.json"
            if not path.exists():
                path.write_text(json.dumps(result))


def bundle_results(out: Path) -> dict[str, dict[str, Any]]:
    """Write all results into one file, and return them by name."""
    (out / "cells").mkdir(parents=True, exist_ok=True)
    unpack_results(out)
    paths = sorted((out / "cells").glob("*.json"))
    cells = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}
    (out / "study.json").write_text(json.dumps({"cells": cells}) + "\n", encoding="utf-8")
    return cells


def read_results(out: Path) -> Results:
    """Return the results by start and method, in the order of declaration."""
    cells = bundle_results(out)
    found: Results = {}
    for start in (OWN, MINILM):
        for method in TITLES:
            mine = [c for c in cells.values() if (c["start"], c["method"]) == (start, method)]
            if mine:
                found.setdefault(start, {})[method] = mine
    return found


def collect(runs: Iterable[dict[str, Any]], measure: str, language: str | None = None) -> Values:
    """Return scores of runs × layers, of one language or the mean of all but English."""
    tables = [run["scores"][measure] for run in runs]
    if language is not None:
        return np.array([table[language] for table in tables])
    return np.array(
        [np.mean([v for name, v in table.items() if name != "en"], axis=0) for table in tables]
    )


def find_loss(run: dict[str, Any], percent: int) -> float:
    """Return the first validation loss after a share of the steps."""
    due = run["steps"] * percent / 100
    return float(next(loss for step, loss in run["curves"][LOSS] if step >= due))


def find_best(values: Values, measure: str) -> int:
    """Return the layer with the best mean."""
    return int((SIGNS[measure] * values.mean(axis=0)).argmax())


def at_best(runs: Sequence[dict[str, Any]], measure: str) -> tuple[Values, int]:
    """Return the scores of runs at their best layer, and this layer."""
    values = collect(runs, measure)
    layer = find_best(values, measure)
    return values[:, layer], layer


# The report.


def write_report(out: Path, path: Path | None = None) -> None:
    """Write tables and plots of all results, by default to OUT/study.md."""
    results = read_results(out)
    path = path or out / "study.md"
    parts = ["# MetaXLM in small", describe_runs(results)]
    for start, methods in results.items():
        parts += [f"## From {start}", describe_start(out, start, methods)]
        parts += [tabulate_summary(methods), compare_losses(methods)]
        parts += [f"![]({plot.name})" for plot in draw_plots(start, methods, path)]
        parts += [f"### Order of the paper, {start}", tabulate_claims(methods)]
        for measure, title in MEASURES.items():
            parts += [f"### {title} by layer, {start}", tabulate_layers(methods, measure)]
        for measure in (POS, NER):
            title = MEASURES[measure].partition(" ")[0]
            parts += [f"### {title} by language, {start}", tabulate_languages(methods, measure)]
        parts += [f"### Transfer along training, {start}", tabulate_transfer(methods)]
    path.write_text("\n\n".join(filter(None, parts)) + "\n", encoding="utf-8")
    n_runs = sum(len(runs) for methods in results.values() for runs in methods.values())
    print(f"{path}: {n_runs} runs")


def describe_runs(results: Results) -> str:
    """Describe the runs, and how to read the tables."""
    runs = [run for methods in results.values() for mine in methods.values() for run in mine]
    if not runs:
        return "No results yet."
    steps = ", ".join(f"{n:,}" for n in sorted({run["steps"] for run in runs}))
    devices = ", ".join(sorted({run["device"] for run in runs}))
    sizes = ", ".join(f"{n:,}" for n in sorted({run["batch_tokens"] for run in runs}))
    rates = ", ".join(f"{rate:g}" for rate in sorted({run["rate"] for run in runs}))
    names = {measure: ", ".join(runs[0]["scores"][measure]) for measure in (TATOEBA, AER, POS, NER)}
    return f"""{len(runs)} runs of {steps} steps of {sizes} tokens, maximum learning rate {rates},
on {devices}. Means ± standard deviations over seeds (ddof 1); in parentheses the difference from
XLM; ↑ better and ↓ worse by more than the standard deviation of XLM. Best layers are chosen on
these tests by the mean over seeds. POS: {names[POS]}. NER: {names[NER]}.
Tatoeba: {names[TATOEBA]}. AER: {names[AER]}."""


def describe_start(out: Path, start: str, methods: Methods) -> str:
    """Describe the English model, and how much of the vocabulary was matched."""
    lines = []
    path = out / "cells" / f"{OWN}-{MONO}-1.json"
    if start == OWN and path.exists():
        mono = json.loads(path.read_text(encoding="utf-8"))
        lines.append(f"English model: {mono['steps']:,} steps, loss {find_loss(mono, 100):.2f}.")
    for method in ("metaxlm", "dict"):
        rules = methods[method][0]["growth"]["rules"] if method in methods else None
        if rules:
            n_rows = sum(rules.values())
            shown = ", ".join(f"{name} {n:,}" for name, n in rules.items() if n)
            matched = 100 * (1 - rules["unmatched"] / n_rows)
            lines.append(f"{TITLES[method]}: {matched:.0f} % of {n_rows:,} rows matched ({shown}).")
    return " ".join(lines)


def tabulate_summary(methods: Methods) -> str:
    """Compare methods: losses, probes in English and elsewhere, retrieval, word alignment."""
    header = ["", "seeds", *(f"loss at {p} %" for p in (EARLY, LATE, 100))]
    header += [f"{task} {what}" for task in ("POS", "NER") for what in ("en", "others", "gap")]
    header += ["Tatoeba", "AER", "tokens/s", "seconds"]
    rows = []
    base = methods.get(BASE)
    for method, runs in methods.items():
        others = None if method == BASE else base
        cells = [TITLES[method], str(len(runs))]
        for percent in (EARLY, LATE, 100):
            mine, theirs = (
                side and np.array([find_loss(run, percent) for run in side])
                for side in (runs, others)
            )
            cells.append(show(mine, theirs, sign=SIGNS[LOSS], digits=2))
        for measure in (POS, NER):
            cells += show_probe(runs, others, measure)
        for measure in (TATOEBA, AER):
            values, layer = at_best(runs, measure)
            before = others and at_best(others, measure)[0]
            cells.append(f"{show(values, before, sign=SIGNS[measure])} at {layer}")
        speed = np.mean([run["curves"]["tokens_per_second"][0][1] for run in runs])
        seconds = np.mean([sum(run["seconds"].values()) for run in runs])
        rows.append([*cells, f"{speed:,.0f}", f"{seconds:.0f}"])
    return make_table(header, rows)


def show_probe(
    runs: Sequence[dict[str, Any]], base: Sequence[dict[str, Any]] | None, measure: str
) -> list[str]:
    """Return English, other languages and the gap at the layer that is best for the others."""
    sides = []
    for side in (runs, base):
        if side:
            others, layer = at_best(side, measure)
            own = collect(side, measure, "en")[:, layer]
            sides.append((own, others, own - others))
    before = sides[1] if len(sides) > 1 else (None, None, None)
    layer = at_best(runs, measure)[1]
    sign = SIGNS[measure]
    own, others, gap = (show(*pair, sign=sign) for pair in zip(sides[0], before, strict=True))
    return [own, f"{others} at {layer}", gap.replace(" ↑", "").replace(" ↓", "")]


def compare_losses(methods: Methods) -> str:
    """Compare early losses of grown models with the late loss of XLM."""
    if BASE not in methods:
        return ""
    late = np.mean([find_loss(run, LATE) for run in methods[BASE]])
    lines = [f"Loss of XLM at {LATE} % of the steps: {late:.3f}. At {EARLY} %:"]
    for method, runs in methods.items():
        early = np.mean([find_loss(run, EARLY) for run in runs])
        word = "below" if early < late else "not below"
        lines.append(f"- {TITLES[method]}: {early:.3f}, {word}")
    return "\n".join([lines[0], "", *lines[1:]])


def tabulate_claims(methods: Methods) -> str:
    """Tabulate where the order of the paper holds, by paired seeds."""
    rows = []
    for table, better, worse in CLAIMS:
        if not {better, worse} <= methods.keys():
            continue
        cells = [f"{TITLES[better]} above {TITLES[worse]} ({table})"]
        for measure in MEASURES:
            one, other = (at_best(methods[name], measure)[0] for name in (better, worse))
            cells.append(judge(one, other, SIGNS[measure]))
        rows.append(cells)
    return make_table(["gain, more is better", *MEASURES.values()], rows)


def tabulate_layers(methods: Methods, measure: str) -> str:
    """Compare methods layer by layer."""
    rows, width = [], 0
    for method, runs in methods.items():
        columns = collect(runs, measure).T
        width = len(columns)
        rows.append([TITLES[method], *(show(column) for column in columns)])
    return make_table(["layer", *map(str, range(width))], rows)


def tabulate_languages(methods: Methods, measure: str) -> str:
    """Compare methods language by language, each at its best layer."""
    languages = list(next(iter(methods.values()))[0]["scores"][measure])
    rows = []
    for method, runs in methods.items():
        layer = at_best(runs, measure)[1]
        values = [collect(runs, measure, name)[:, layer].mean() for name in languages]
        rows.append([TITLES[method], str(layer), *(f"{value:.1f}" for value in values)])
    return make_table(["", "layer", *languages], rows)


def average_transfer(runs: Sequence[dict[str, Any]]) -> list[tuple[int, float, float]]:
    """Return the mean curve of several seeds."""
    curves = np.array([run["curves"]["transfer"] for run in runs])
    return [(int(step), float(own), float(other)) for step, own, other in curves.mean(axis=0)]


def tabulate_transfer(methods: Methods) -> str:
    """Tabulate English, other languages and the gap by step."""
    curves = {method: average_transfer(runs) for method, runs in methods.items()}
    steps = [step for step, _, _ in next(iter(curves.values()))]
    rows = [
        [
            TITLES[method],
            *(f"{100 * a:.1f} − {100 * b:.1f} = {100 * (a - b):.1f}" for _, a, b in curve),
        ]
        for method, curve in curves.items()
    ]
    return make_table(["step", *(f"{step:,}" for step in steps)], rows)


def draw_plots(start: str, methods: Methods, report: Path) -> list[Path]:
    """Plot transfer by step and all measures by layer, if matplotlib is installed."""
    from calque.errors import MissingExtra
    from calque.report.plots import check_plot, plot_layers, plot_transfer, save_plot

    paths = [report.with_name(f"{report.stem}-{start}-{kind}.png") for kind in ("gap", "layers")]
    try:
        check_plot(paths[0])
    except MissingExtra as error:
        print(f"no plots: {error}")
        return []
    curves = {
        TITLES[method]: [(step, 100 * a, 100 * b) for step, a, b in average_transfer(runs)]
        for method, runs in methods.items()
    }
    save_plot(plot_transfer(curves, label="POS accuracy (%)"), paths[0])
    panels = {
        title: {
            TITLES[method]: dict(enumerate(collect(runs, measure).mean(axis=0).tolist()))
            for method, runs in methods.items()
        }
        for measure, title in MEASURES.items()
    }
    save_plot(plot_layers(panels, label="%"), paths[1])
    return paths
