"""Tables and plots of the results of benchmarks/veco_study.py, which calls this module."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from metaxlm_report import (
    AER,
    MEASURES,
    NER,
    POS,
    SIGNS,
    TATOEBA,
    at_best,
    bundle_results,
    collect,
)
from study_cells import judge, make_table, show

if TYPE_CHECKING:
    import numpy.typing as npt

    Values = npt.NDArray[np.float64]
    Runs = list[dict[str, Any]]

SCRATCH, MINI = "scratch", "mini"
STARTS = (SCRATCH, MINI)
NONE, XLM, MBART, PLUG, VECO = METHODS = ("none", "xlm", "mbart", "plug", "veco")
DIRECTIONS = ("en-de", "de-en")
FULL, LAST, FIRST, FRESH = "full", "last", "first", "fresh"
# Controls from a trained encoder: the cross-attention `self` without training, VECO from a random
# one, mBART from `self`, the mBART of the paper's control, and XLM with the compute of VECO.
CONTROLS = ("self", "veco-random", "mbart-self", "mbart-masked", "xlm-equal")
NAMES = {XLM: "XLM", MBART: "mBART", PLUG: "cross-attention alone", VECO: "VECO"}
NAMES |= {"self": "`self` cross-attention, not trained", "xlm-equal": "XLM, compute of VECO"}
NAMES |= {"veco-random": "VECO, random cross-attention", "mbart-self": "mBART, `self`"}
NAMES |= {"mbart-masked": "mBART, masked words only"}
UNDERSTANDING = (TATOEBA, AER, POS, NER)
# Findings of the paper, and of the first stage of VECO alone: the first method is better than the
# second in these measures.
CLAIMS = (
    ("Tables 3 and 5", VECO, XLM, (*UNDERSTANDING, *DIRECTIONS)),
    ("Tables 3 and 5", VECO, MBART, (*UNDERSTANDING, *DIRECTIONS)),
    ("Table 3", VECO, NONE, DIRECTIONS),
    ("Table 3", XLM, NONE, DIRECTIONS),
    ("Table 5", XLM, MBART, UNDERSTANDING),
    ("Table 5", MBART, XLM, DIRECTIONS),
    ("not in the paper", PLUG, XLM, (*UNDERSTANDING, *DIRECTIONS)),
    ("not in the paper", PLUG, MBART, (*UNDERSTANDING, *DIRECTIONS)),
    ("not in the paper", VECO, PLUG, (*UNDERSTANDING, *DIRECTIONS)),
)
GOAL = 5.0  # BLEU above random weights
READING = """Means ± sample standard deviations over seeds. A difference counts if it exceeds the
standard deviation of the second side; with one seed it is open. Layers are the best ones on these
tests by the mean over seeds."""


def name_start(start: str, method: str) -> str:
    """Return the name of the model that a translation starts from."""
    if start == SCRATCH:
        return NAMES.get(method, "random")
    return "calque-mini" if method == NONE else f"calque-mini + {NAMES[method]}"


def name_direction(direction: str) -> str:
    return direction.replace("-", " → ")


class Results:
    """The results of all runs."""

    def __init__(self, cells: Iterable[dict[str, Any]]) -> None:
        self.cells = sorted(cells, key=lambda cell: cell["seed"])

    def pretrained(self, start: str, method: str) -> Runs:
        """Return the runs of a method that have scores."""
        mine = (start, method, "")
        found = [c for c in self.cells if (c["start"], c["method"], c["direction"]) == mine]
        return [cell for cell in found if "scores" in cell]

    def translated(self, direction: str, start: str, method: str, decoder: str = FULL) -> Runs:
        """Return the runs of a translation."""
        mine = (direction, start, method, decoder)
        names = ("direction", "start", "method", "decoder")
        return [cell for cell in self.cells if tuple(cell[name] for name in names) == mine]

    def values(self, measure: str, start: str, method: str) -> Values:
        """Return the scores of a method by seed: of the encoder, or BLEU of a direction."""
        if measure in DIRECTIONS:
            return np.array([run["bleu"] for run in self.translated(measure, start, method)])
        runs = self.pretrained(start, method)
        return at_best(runs, measure)[0] if runs else np.array([])


# Comparisons.


def show_mean(values: Values) -> str:
    return show(values) if len(values) else "–"


def show_gain(values: Values, before: Values) -> str:
    if not len(values) or not len(before):
        return "–"
    return f"{values.mean() - before.mean():+.1f}".replace("-", "−")


# The report.


def write_report(out: Path, path: Path | None = None) -> None:
    """Write tables and plots of all results, by default to OUT/study.md."""
    results, path = Results(bundle_results(out).values()), path or out / "study.md"
    plots = draw_plots(results, path)
    parts = ["# VECO in small", describe_runs(results)]
    parts += ["## Goals", list_goals(results)]
    parts += ["## Translation (Table 3)", tabulate_translation(results), tabulate_curves(results)]
    parts += [f"![]({plot.name})" for plot in plots if "curves" in plot.name]
    parts += ["## Shallow decoders (Table 4)", tabulate_decoders(results)]
    parts += ["## Ways to pre-train (Table 5)"]
    parts += [tabulate_pretraining(results, start) for start in STARTS]
    parts += [f"![]({plot.name})" for plot in plots if "layers" in plot.name]
    for start in STARTS:
        parts += [f"## Order of the paper, {start}", tabulate_claims(results, start)]
    for measure, title in MEASURES.items():
        parts += [f"## {title} by layer", tabulate_layers(results, measure)]
    parts += ["## Cost", tabulate_cost(results)]
    path.write_text("\n\n".join(filter(None, parts)) + "\n", encoding="utf-8")
    print(f"{path}: {len(results.cells)} runs")


def describe_runs(results: Results) -> str:
    """Describe the runs, and how to read the tables."""
    if not results.cells:
        return "No results yet."
    lines = []
    kinds = {
        "pre-training from scratch": [
            run for m in METHODS for run in results.pretrained(SCRATCH, m)
        ],
        "pre-training from calque-mini": [
            run for m in METHODS[1:] for run in results.pretrained(MINI, m)
        ],
        "translation": [run for run in results.cells if run["direction"]],
    }
    for kind, runs in kinds.items():
        settings = {
            f"{run['steps']:,} steps of {' + '.join(map(str, run['batch_tokens']))} tokens, "
            f"maximum learning rate {run['rate']:g}"
            for run in runs
        }
        lines += [f"- {len(runs)} runs of {kind}: {'; '.join(sorted(settings))}."] if runs else []
    devices = ", ".join(sorted({run["device"] for run in results.cells}))
    tests = sorted({f"{run['test']}, {run['n_lines']:,} lines" for run in kinds["translation"]})
    signatures = sorted({name for run in kinds["translation"] for name in run["signatures"]})
    lines += [f"- BLEU and chrF of Multi30k's {'; '.join(tests)}: {', '.join(signatures)}."]
    return "\n".join([f"On {devices}.", "", *lines, "", READING])


def list_goals(results: Results) -> str:
    """Compare VECO with random weights and XLM, and with the goals of the study."""
    lines = []
    for start, method in ((SCRATCH, VECO), (MINI, PLUG), (MINI, VECO)):
        for direction in DIRECTIONS:
            veco, xlm = (results.values(direction, start, each) for each in (method, XLM))
            random = results.values(direction, SCRATCH, NONE)
            name = f"{name_start(start, method)}, {name_direction(direction)}"
            if len(veco) and len(random):
                gain = veco.mean() - random.mean()
                word = "reached" if gain >= GOAL else "not reached"
                verdict = (
                    f"{gain:+.1f} BLEU over random weights at equal updates, goal +{GOAL:g}: {word}"
                )
                lines.append(f"- {name}: {verdict}.")
            if len(veco) and len(xlm):
                deviations = ", ".join(show_mean(values) for values in (veco, xlm))
                lines.append(f"- {name}: over XLM {judge(veco, xlm)} ({deviations}).")
    return "\n".join(lines)


def list_starts(results: Results) -> list[tuple[str, str]]:
    """Return the starts of translations, in the order of the tables."""
    every = [(start, method) for start in STARTS for method in (*METHODS, *CONTROLS)]
    return [pair for pair in every if any(results.translated(name, *pair) for name in DIRECTIONS)]


def tabulate_translation(results: Results) -> str:
    """Compare starts of translation with random weights, and with XLM from the same start."""
    header = ["start", "seeds"]
    for direction in DIRECTIONS:
        name = name_direction(direction)
        header += [f"{name} BLEU", "over random", "over XLM", "chrF"]
    rows = []
    for start, method in list_starts(results):
        counts = [len(results.translated(name, start, method)) for name in DIRECTIONS]
        cells = [name_start(start, method), ", ".join(map(str, dict.fromkeys(counts)))]
        for direction in DIRECTIONS:
            bleu = results.values(direction, start, method)
            chrf = [run["chrf"] for run in results.translated(direction, start, method)]
            random, xlm = (
                results.values(direction, *other) for other in ((SCRATCH, NONE), (start, XLM))
            )
            cells += [show_mean(bleu), show_gain(bleu, random), show_gain(bleu, xlm)]
            cells.append(show_mean(np.array(chrf)))
        rows.append(cells)
    return make_table(header, rows)


def average_curve(runs: Sequence[dict[str, Any]]) -> list[tuple[int, float]]:
    """Return the mean learning curve of several seeds."""
    return [(int(step), float(bleu)) for step, bleu in np.mean([r["curve"] for r in runs], axis=0)]


def tabulate_curves(results: Results) -> str:
    """Tabulate BLEU of greedy search on validation sentences by step."""
    rows, steps = [], []
    for direction in DIRECTIONS:
        for start, method in list_starts(results):
            runs = results.translated(direction, start, method)
            if runs:
                steps = [step for step, _ in average_curve(runs)]
                points = np.array([[bleu for _, bleu in run["curve"]] for run in runs]).T
                shown = [show_mean(point) for point in points]
                rows.append([f"{name_direction(direction)}, {name_start(start, method)}", *shown])
    return make_table(["BLEU on val, greedy, at update", *(f"{n:,}" for n in steps)], rows)


def tabulate_decoders(results: Results) -> str:
    """Compare decoders of all, the last and the first layers, and a random cross-attention."""
    direction = DIRECTIONS[0]
    kinds = {
        "random, all layers": (SCRATCH, NONE, FULL),
        "random, few layers": (SCRATCH, NONE, LAST),
        "VECO, first layers": (MINI, PLUG, FIRST),
        "VECO, last layers": (MINI, PLUG, LAST),
        "VECO, all layers": (MINI, PLUG, FULL),
        "VECO, all layers, random cross-attention": (MINI, PLUG, FRESH),
    }
    runs = {name: results.translated(direction, *kind) for name, kind in kinds.items()}
    bleu = {name: np.array([run["bleu"] for run in mine]) for name, mine in runs.items()}
    rows = [
        [
            name,
            str(len(mine)),
            show_mean(bleu[name]),
            show_mean(np.array([run["chrf"] for run in mine])),
            f"{np.mean([run['parts'][1] for run in mine]):.0f}",
        ]
        for name, mine in runs.items()
        if mine
    ]
    every, few = list(kinds), "VECO, last layers"
    claims = [
        ("last above first", few, "VECO, first layers"),
        ("all above last", "VECO, all layers", few),
        ("VECO's last above as many random layers", few, every[1]),
        ("VECO's cross-attention above a random one", "VECO, all layers", every[5]),
    ]
    lines = [f"- {name}: {judge(bleu[one], bleu[other])}" for name, one, other in claims]
    header = [f"decoder, {name_direction(direction)}", "seeds", "BLEU", "chrF", "s to test"]
    return "\n".join([make_table(header, rows), "", *lines])


def tabulate_pretraining(results: Results, start: str) -> str:
    """Compare methods as encoders, and by translation trained from them."""
    header = [start, "seeds", "Tatoeba", "AER", "POS en", "POS others", "NER en", "NER others"]
    header += [f"BLEU {name_direction(direction)}" for direction in DIRECTIONS]
    rows = []
    for method in METHODS:
        runs = results.pretrained(start, method)
        if not runs:
            continue
        cells = [name_start(start, method), str(len(runs))]
        for measure in (TATOEBA, AER):
            values, layer = at_best(runs, measure)
            cells.append(f"{show_mean(values)} at {layer}")
        for measure in (POS, NER):
            values, layer = at_best(runs, measure)
            english = collect(runs, measure, "en")[:, layer]
            cells += [show_mean(english), f"{show_mean(values)} at {layer}"]
        cells += [show_mean(results.values(direction, start, method)) for direction in DIRECTIONS]
        rows.append(cells)
    return make_table(header, rows) if rows else ""


def tabulate_claims(results: Results, start: str) -> str:
    """Tabulate where the order of the paper holds."""
    columns = {measure: MEASURES[measure] for measure in UNDERSTANDING}
    columns |= {direction: f"BLEU {name_direction(direction)}" for direction in DIRECTIONS}
    rows = []
    for table, better, worse, measures in CLAIMS:
        other = (SCRATCH, NONE) if worse == NONE else (start, worse)
        cells = [f"{name_start(start, better)} above {name_start(*other)} ({table})"]
        for measure in columns:
            one, two = results.values(measure, start, better), results.values(measure, *other)
            verdict = judge(one, two, SIGNS.get(measure, 1))
            cells.append(verdict if measure in measures else "")
        if any(cell not in ("", "–") for cell in cells[1:]):
            rows.append(cells)
    return make_table(["gain, more is better", *columns.values()], rows)


def tabulate_layers(results: Results, measure: str) -> str:
    """Compare methods layer by layer."""
    rows, width = [], 0
    for start in STARTS:
        for method in METHODS:
            runs = results.pretrained(start, method)
            if runs:
                columns = collect(runs, measure).T
                width = len(columns)
                rows.append([name_start(start, method), *map(show_mean, columns)])
    return make_table(["layer", *map(str, range(width))], rows)


def tabulate_cost(results: Results) -> str:
    """Tabulate the cost of runs."""
    rows = []
    groups: dict[str, Runs] = {}
    for run in results.cells:
        what = name_direction(run["direction"]) if run["direction"] else "pre-training"
        name = f"{what}, {name_start(run['start'], run['method'])}"
        name += f", {run['decoder']}" if run["decoder"] != FULL else ""
        groups.setdefault(name, []).append(run)
    for name, runs in groups.items():
        speeds = [run["speed"] for run in runs if run["speed"]]
        parts = [run.get("parts") or list(run["seconds"].values()) for run in runs]
        seconds = [f"{value:.0f}" for value in np.mean(parts, axis=0)]
        rows.append([name, str(len(runs)), f"{np.mean(speeds):,.0f}" if speeds else "–", *seconds])
    return make_table(["", "runs", "tokens/s", "s to train", "s to test"], rows)


def draw_plots(results: Results, report: Path) -> list[Path]:
    """Plot learning curves and all measures by layer, if matplotlib is installed."""
    from calque.errors import MissingExtra
    from calque.report.plots import check_plot, plot_curves, plot_layers, save_plot

    paths = {kind: report.with_name(f"{report.stem}-{kind}.png") for kind in ("curves", "layers")}
    try:
        check_plot(paths["curves"])
    except MissingExtra as error:
        print(f"no plots: {error}")
        return []
    drawn = []
    panels = {
        name_direction(direction): {
            name_start(*pair): average_curve(runs)
            for pair in list_starts(results)
            if (runs := results.translated(direction, *pair))
        }
        for direction in DIRECTIONS
    }
    if any(panels.values()):
        save_plot(plot_curves(panels, across="updates", label="BLEU"), paths["curves"])
        drawn.append(paths["curves"])
    pretrained = {
        name_start(start, method): runs
        for start in STARTS
        for method in METHODS
        if (runs := results.pretrained(start, method))
    }
    if pretrained:
        layers = {
            title: {
                name: dict(enumerate(collect(runs, measure).mean(axis=0).tolist()))
                for name, runs in pretrained.items()
            }
            for measure, title in MEASURES.items()
        }
        save_plot(plot_layers(layers, label="%"), paths["layers"])
        drawn.append(paths["layers"])
    return drawn
