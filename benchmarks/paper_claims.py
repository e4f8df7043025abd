"""Compare the claims of the papers with the stored results, and write the tables of docs/papers.md.

    python benchmarks/paper_claims.py docs/papers.md     # replace the tables of the page
    python benchmarks/paper_claims.py                    # print the tables
    python benchmarks/paper_claims.py --tiny             # the same: it takes a second

benchmarks/paper_claims.toml has the claims, the figures of the papers and which results belong to
them. Our own figures are never typed: they come from the runs in docs/studies/*.json, or from a
cell of a stored table (`page`) where only tables exist. Differences in tasks (`task`) are those of
`calque compare`, whose 95 % intervals cover seeds and test items. Other differences of runs are
paired by seed, and their intervals are Student's t. Scores of layers are those at two thirds of the
depth, where the papers measure word alignment (8 of 12), so that no layer is chosen on the test.
"""

from __future__ import annotations

import argparse
import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
from metaxlm_report import AER, NER, POS, SIGNS, TATOEBA, collect
from mono_report import TASKS
from study_cells import fill_tables, make_table
from veco_report import DIRECTIONS, name_direction

from calque.report.statistics import interval_half_width, paired_error, summarize

ROOT = Path(__file__).resolve().parents[1]
CLAIMS = Path(__file__).with_suffix(".toml")
ALPHA = 0.05
MIN_SEEDS = {"test": 3, "indication": 2}
Outcome: TypeAlias = Literal["holds", "within noise", "fails"]
Run: TypeAlias = dict[str, Any]
# What a result can show at most. An indication has another start or measure than the paper, or
# fewer seeds than a test.
Strength: TypeAlias = Literal["test", "indication"]
UNTESTED = "not tested yet"
INDICATIONS = {
    "holds": "indication for",
    "fails": "indication against",
    "within noise": "indication: within noise",
}
MIXED = "indication: mixed"
NAMES = {POS: "POS", NER: "NER", TATOEBA: "Tatoeba", AER: "AER"}
GAPS = {"pos-gap": POS, "ner-gap": NER}  # English minus the mean of the other languages, fine-tuned
NAMES |= {name: f"{NAMES[task]} gap" for name, task in GAPS.items()}
# Names of starts. Starts of the same kind that were trained again are numbered.
STARTS = {"mono": "mono", "minilm": "MiniLM"}
STARTS |= {"scratch": "from scratch", "mini": "from calque-mini"}
NUMBERED_STARTS = {
    ("mono", "mono"): "mono 1",
    ("mono-2", "mono"): "mono 2",
    ("mono-2", "tlm"): "mono 2",
    ("mono-2", "metaxlm"): "own 3",
    ("mono-2", "veco"): "mono 2",
    ("veco-mono", "mini"): "mono 2",
    ("mono-aligners", "mono"): "mono 2",
    ("mono-vectors", "mono"): "mono 2",
    ("metaxlm", "own"): "own 1",
    ("mono", "english"): "own 2",
    ("mono-2", "english"): "own 3",
}


@dataclass(frozen=True)
class Figure:
    """A difference of two scores, the interval of the difference, and what it says of a claim.

    `expected` is the sign of the difference that is claimed, or 0 if no difference is claimed. With
    `margin`, the difference may miss this sign by so many points.
    """

    label: str
    score: float
    baseline: float
    half_width: float | None
    expected: int
    margin: float = 0.0
    digits: int = 1
    bounds: tuple[float, float] | None = None  # of an interval that is not symmetric

    @property
    def has_interval(self) -> bool:
        return self.half_width is not None

    @property
    def difference(self) -> float:
        return self.score - self.baseline

    @property
    def interval(self) -> tuple[float, float] | None:
        """The bounds of the 95 % interval of the difference."""
        if self.half_width is None or self.bounds is not None:
            return self.bounds
        return self.difference - self.half_width, self.difference + self.half_width

    @property
    def outcome(self) -> Outcome:
        """What the interval says of the claim or, without an interval, the difference alone."""
        low, high = self.interval or (self.difference, self.difference)
        if self.expected == 0:  # a difference that is not claimed can only be refuted
            return "fails" if low > self.margin or high < -self.margin else "within noise"
        if self.expected < 0:
            low, high = -high, -low
        return "holds" if low > -self.margin else "fails" if high < -self.margin else "within noise"

    def show(self) -> str:
        numbers = (self.score, self.baseline)
        one, other = (f"{number:.{self.digits}f}" for number in numbers)
        return f"{self.label} {one} against {other}: {show_signed(self.difference, self.digits)}"

    def show_interval(self) -> str:
        if self.interval is None:
            return "–"
        low, high = (show_signed(bound, self.digits) for bound in self.interval)
        return f"\\[{low}, {high}\\]"


@dataclass(frozen=True)
class PartCount:
    """How many layers or languages differ as claimed, and how many the other way, by intervals.

    The claim may except some of them.
    """

    label: str
    n_as_claimed: int
    n_opposite: int
    n_parts: int
    parts: str = "layers"
    n_exceptions: int = 0
    has_interval: ClassVar[bool] = True

    @property
    def outcome(self) -> Outcome:
        if self.n_opposite > self.n_exceptions:
            return "fails"
        is_shown = self.n_as_claimed >= self.n_parts - self.n_exceptions
        return "holds" if is_shown else "within noise"

    def show(self) -> str:
        return f"{self.label}: as claimed at {self.n_as_claimed} of {self.n_parts} {self.parts}"

    def show_interval(self) -> str:
        return f"opposite at {self.n_opposite}"


AnyFigure: TypeAlias = Figure | PartCount


def show_signed(number: float, digits: int) -> str:
    """Return a number with its sign, and without one if it is rounded to 0.

    >>> show_signed(-0.04, 1), show_signed(1.25, 2)
    ('0.0', '+1.25')
    """
    rounded = round(number, digits)
    shown = f"{rounded:+.{digits}f}" if rounded else f"{0:.{digits}f}"
    return shown.replace("-", "−")


# Results of runs.


@cache
def read_runs(study: str) -> tuple[Run, ...]:
    """Return the runs of a study by seed."""
    content = json.loads((ROOT / "docs" / "studies" / f"{study}.json").read_text("utf-8"))
    return tuple(sorted(list_runs(content["cells"]), key=lambda run: run["seed"]))


def list_runs(cells: Any) -> list[Run]:
    """Return the runs of a stored study, with the name that AER has in all of them."""
    runs = cells if isinstance(cells, list) else cells.values()
    names = {"word_alignment": AER}
    return [
        run | {"scores": {names.get(name, name): value for name, value in run["scores"].items()}}
        if "scores" in run
        else run
        for run in runs
    ]


def find_runs(study: str, start: str, method: str, measure: str, decoder: str) -> dict[int, Run]:
    """Return the runs of a method by seed that have a measure."""
    direction = next((name for name in DIRECTIONS if measure.startswith(name)), "")
    wanted = (start, method, direction, decoder)
    defaults = {"direction": "", "decoder": "full"}
    names = ("start", "method", "direction", "decoder")
    found = [
        run
        for run in read_runs(study)
        if tuple((defaults | run)[name] for name in names) == wanted
        and (direction or "scores" in run)
    ]
    if not found:
        raise ValueError(f"{study}: there are no runs of {wanted}")
    return {run["seed"]: run for run in found}


@dataclass(frozen=True)
class Part:
    """What of the scores is measured: by default, all languages at two thirds of the depth."""

    layer: int | None = None
    languages: tuple[str, ...] | None = None


USUAL_PART = Part()


def measure_runs(runs: Sequence[Run], measure: str, part: Part = USUAL_PART) -> list[float]:
    """Return the scores of runs in one measure.

    `en-de` is BLEU on the test, `en-de@280` BLEU on validation sentences after 280 updates,
    `gap@50` the transfer gap of POS after 50 steps, `ner-gap` that of a fine-tuned task; the others
    are scores at a layer.
    """
    name, _, step = measure.partition("@")
    if name in DIRECTIONS:
        if not step:
            return [float(run["bleu"]) for run in runs]
        return [float(dict(run["curve"])[int(step)]) for run in runs]
    if name == "gap":
        curves = [{row[0]: row[1:] for row in run["curves"]["transfer"]} for run in runs]
        return [100 * float(curve[int(step)][0] - curve[int(step)][1]) for curve in curves]
    if name in GAPS:
        task = GAPS[name]
        others = collect(runs, task)
        return [float(gap) for gap in (collect(runs, task, "en") - others)[:, 0]]
    values = collect(runs, name)
    if part.languages is not None:
        values = np.mean([collect(runs, name, each) for each in part.languages], axis=0)
    layer = round(2 / 3 * (values.shape[1] - 1)) if part.layer is None else part.layer
    return [float(value) for value in values[:, layer]]


def compare_runs(
    runs: Mapping[int, Run],
    others: Mapping[int, Run],
    measures: tuple[str, str],
    part: Part = USUAL_PART,
    min_seeds: int = MIN_SEEDS["test"],
) -> tuple[float, float, float]:
    """Return the two means over the seeds that both have, and half the width of the interval."""
    seeds = sorted(runs.keys() & others.keys())
    if len(seeds) < min_seeds:
        raise ValueError(f"there are only {len(seeds)} seeds")
    scores = measure_runs([runs[seed] for seed in seeds], measures[0], part)
    baseline = measure_runs([others[seed] for seed in seeds], measures[1], part)
    half_width = interval_half_width(paired_error(scores, baseline), ALPHA)
    return summarize(scores).mean, summarize(baseline).mean, half_width


def compare_study(spec: Mapping[str, Any], expected: int | None, margin: float) -> AnyFigure:
    """Return the figure of two methods of a study."""
    measure, other = measures = spec["measure"], spec.get("versus_measure", spec["measure"])
    name = measure.partition("@")[0]
    sign = SIGNS.get(name, -1 if name.endswith("gap") else 1) if expected is None else expected
    runs, others = (
        find_runs(
            spec.get(f"{side}study", spec["study"]),
            spec.get(f"{side}start", spec["start"]),
            spec[method],
            m,
            spec.get(f"{side}decoder", "full"),
        )
        for side, method, m in (("", "method", measure), ("versus_", "versus", other))
    )
    label, min_seeds = make_label(spec, name_measure(name)), spec["min_seeds"]
    if "each" in spec:
        parts = list_parts(spec, [*runs.values(), *others.values()], name)
        outcomes = [
            Figure(label, *compare_runs(runs, others, measures, part, min_seeds), sign).outcome
            for part in parts
        ]
        counts = outcomes.count("holds"), outcomes.count("fails"), len(outcomes)
        return PartCount(label, *counts, f"{spec['each']}s", spec.get("exceptions", 0))
    part = Part(languages=tuple(spec["languages"])) if "languages" in spec else USUAL_PART
    numbers = compare_runs(runs, others, measures, part, min_seeds)
    return Figure(label, *numbers, sign, margin)


def list_parts(spec: Mapping[str, Any], runs: Sequence[Run], measure: str) -> list[Part]:
    """Return the layers from the first one on, or the languages that all runs were tested in."""
    if spec["each"] == "layer":
        depth = collect(runs, measure).shape[1] - 1
        return [Part(layer) for layer in range(spec.get("first_layer", 1), depth + 1)]
    languages = set.intersection(*({*run["scores"][measure]} for run in runs))
    return [Part(languages=(language,)) for language in sorted(languages)]


def make_label(spec: Mapping[str, Any], measure: str) -> str:
    """Return the start and the measure of a figure; `label` may replace the measure."""
    study, start = spec["study"], spec["start"]
    name = NUMBERED_STARTS.get((study, start)) or STARTS[start]
    return f"{name}, {spec.get('label', measure)}"


def name_measure(name: str) -> str:
    if name in DIRECTIONS:
        return f"BLEU {name_direction(name)}"
    return NAMES.get(name, name)


# Differences by `calque compare`.


@cache
def parse_json(text: str) -> Any:
    """Return the content of a file that is read for many figures."""
    return json.loads(text)


def compare_tasks(spec: Mapping[str, Any], expected: int | None, margin: float) -> Figure:
    """Return the stored difference of two methods in a task, with the interval of `compare`."""
    path = ROOT / "docs" / "studies" / f"{spec['study']}.json"
    rows = parse_json(path.read_text("utf-8"))["differences"]
    wanted = {name: spec[name] for name in ("method", "versus", "task")}
    found = [row for row in rows if wanted.items() <= row.items()]
    if len(found) != 1:
        raise ValueError(f"{path.name}: {len(found)} differences are those of {wanted}")
    row = found[0]
    if 0 < row["seeds"] < MIN_SEEDS["test"]:  # without seeds, the intervals cover test items alone
        raise ValueError(f"there are only {row['seeds']} seeds")
    sign = (-1 if spec["task"] == "word_alignment" else 1) if expected is None else expected
    low, high = row["low"], row["high"]
    label = make_label(spec, TASKS.get(spec["task"], spec["task"]).split()[0])
    scores = row["score"], row["baseline"]
    digits, bounds = spec.get("digits", 1), (low, high)
    return Figure(label, *scores, (high - low) / 2, sign, margin, digits, bounds)


# Results of stored tables.


def split_row(line: str) -> list[str]:
    return [cell.strip().strip("*") for cell in line.strip().strip("|").split("|")]


def read_tables(text: str) -> Iterable[list[list[str]]]:
    """Yield the Markdown tables of a page as rows of cells, without the rules below headers."""
    for block in re.findall(r"(?:^ *\|.*\n)+", text, re.MULTILINE):
        rows = [split_row(line) for line in block.replace("\\|", "¦").splitlines()]
        yield [row for row in rows if not all(re.fullmatch(r":?-+:?", cell) for cell in row)]


def read_cell(text: str, row: Sequence[str], column: str, first: str | None = None) -> str:
    """Return the cell of the only row that begins with these texts, in the tables with a column.

    `first` is the header of the first column, where several tables have such rows.
    """
    found = [
        cells[table[0].index(column)]
        for table in read_tables(text)
        if column in table[0] and first in (None, table[0][0])
        for cells in table[1:]
        if all(cell.startswith(start) for cell, start in zip(cells, row, strict=False))
    ]
    if len(found) != 1:
        raise ValueError(f"{len(found)} rows begin with {row} in tables with a column {column!r}")
    return found[0]


def compare_cells(spec: Mapping[str, Any], expected: int | None, margin: float) -> Figure:
    """Return the figure of two cells of a stored table, without an interval."""
    text = (ROOT / spec["page"]).read_text("utf-8")
    where = spec["column"], spec.get("first")
    cells = [read_cell(text, spec[name], *where) for name in ("row", "versus")]
    numbers = []
    for cell in cells:
        found = re.match(r"\d+(\.\d+)?", cell)
        if not found:
            raise ValueError(f"{spec['page']}: {cell!r} does not begin with a number")
        numbers.append(found[0])
    digits = max(len(number.partition(".")[2]) for number in numbers)
    score, baseline = map(float, numbers)
    sign = spec.get("sign", 1) if expected is None else expected
    return Figure(spec["label"], score, baseline, None, sign, margin, digits)


# Claims.


@dataclass(frozen=True)
class Claim:
    """A row of a table: a claim, its figures and the verdict."""

    claim: str
    paper: str
    experiment: str
    figures: tuple[AnyFigure, ...]
    strength: Strength
    why: str

    @property
    def verdict(self) -> str:
        """The verdict over all figures.

        A claim holds if every figure shows it, and fails if one figure shows the opposite.
        """
        if not self.figures:
            return UNTESTED
        outcomes = {figure.outcome for figure in self.figures}
        word: Outcome = "within noise"
        if "fails" in outcomes:
            word = "fails"
        elif outcomes == {"holds"}:
            word = "holds"
        if self.strength == "test":
            return word
        shown = MIXED if outcomes >= {"holds", "fails"} else INDICATIONS[word]
        has_intervals = any(figure.has_interval for figure in self.figures)
        return shown if has_intervals else f"{shown}, no interval"

    def cells(self) -> list[str]:
        ours = "<br>".join(figure.show() for figure in self.figures) or "–"
        intervals = "<br>".join(figure.show_interval() for figure in self.figures) or "–"
        return [self.claim, self.paper, self.experiment, ours, intervals, self.verdict, self.why]


def build_claim(content: Mapping[str, Any]) -> Claim:
    """Return a claim of the TOML file with its figures."""
    expected, margin = content.get("expected"), content.get("margin", 0.0)
    strength, figures = content.get("strength", "indication"), []
    for spec in content.get("figures", []):
        compare = compare_study
        if "page" in spec or "task" in spec:
            compare = compare_cells if "page" in spec else compare_tasks
        studies = spec["study"] if isinstance(spec.get("study"), list) else [spec.get("study")]
        sign = spec.get("expected", expected)
        common = {**spec, "min_seeds": MIN_SEEDS[strength]}
        figures += [compare({**common, "study": study}, sign, margin) for study in studies]
    needs_interval = strength == "test" or expected == 0
    if needs_interval and not all(figure.has_interval for figure in figures):
        raise ValueError(f"{content['claim']}: this cannot be decided without an interval")
    claim, paper, experiment, why = (
        content[name] for name in ("claim", "paper", "experiment", "why")
    )
    return Claim(claim, paper, experiment, tuple(figures), strength, why)


@cache
def read_claims() -> dict[str, tuple[str, list[Claim]]]:
    """Return the title and the claims of every paper, and what was tried to make claims hold."""
    content = tomllib.loads(CLAIMS.read_text("utf-8"))
    return {
        name: (paper["title"], [build_claim(claim) for claim in paper["claims"]])
        for name, paper in content.items()
    }


# Tables.

HEADER = ["claim", "paper", "experiment", "ours", "95 % interval", "verdict", "why"]
TRIED = "tried"
TRIED_HEADER = [
    "claim that failed",
    "tried",
    "experiment",
    "ours",
    "95 % interval",
    "result",
    "why",
]
SUMMARY = ["holds", "within noise", "fails", "indication only", UNTESTED]


def count_verdicts(claims: Iterable[Claim]) -> list[int]:
    """Return the numbers of claims by verdict, in the order of SUMMARY."""
    verdicts = [claim.verdict for claim in claims]
    groups = ["indication only" if word.startswith("indication") else word for word in verdicts]
    return [groups.count(name) for name in SUMMARY]


def summarize_claims() -> str:
    """Count the verdicts of every paper."""
    papers = {title: rows for name, (title, rows) in read_claims().items() if name != TRIED}
    every = [claim for claims in papers.values() for claim in claims]
    *tested, n_indications, n_untested = count_verdicts(every)
    rows = [
        [title, str(len(claims)), *map(str, count_verdicts(claims))]
        for title, claims in [*papers.items(), ("**all**", every)]
    ]
    sentence = (
        f"**Of {len(every)} claims, {sum(tested)} are tested, {n_indications} have an indication "
        f"only, and {n_untested} are not tested yet.**"
    )
    return f"{sentence}\n\n{make_table(['', 'claims', *SUMMARY], rows)}"


def tabulate_runs() -> str:
    """Tabulate the number of runs of the studies with stored runs, and their time."""
    rows = []
    for study in ("mono", "mono-2", "veco", "veco-longer", "veco-mono", "metaxlm"):
        runs = read_runs(study)
        hours = sum(sum(run["seconds"].values()) for run in runs) / 3600
        seeds = {run["seed"] for run in runs}
        devices = ", ".join(sorted({run["device"] for run in runs}))
        link = f"[{study}.json](studies/{study}.json)"
        rows.append([link, str(len(runs)), str(len(seeds)), f"{hours:.1f}", devices])
    header = ["results", "runs", "seeds", "hours of all runs", "device"]
    return make_table(header, rows, has_numbers=False)


def build_tables() -> dict[str, str]:
    """Return all tables by the names of their places in the page."""
    tables = {"summary": summarize_claims(), "runs": tabulate_runs()}
    for name, (_, claims) in read_claims().items():
        header = TRIED_HEADER if name == TRIED else HEADER
        rows = [claim.cells() for claim in claims]
        tables[name] = make_table(header, rows, has_numbers=False)
    return tables


def main() -> None:
    """Write the tables into a page, or print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", type=Path, nargs="?", help="docs/papers.md; default: print")
    parser.add_argument("--tiny", action="store_true", help="print the tables")
    options = parser.parse_args()
    if options.page and not options.tiny:
        page = fill_tables(options.page.read_text("utf-8"), build_tables())
        options.page.write_text(page, encoding="utf-8")
    else:
        print("\n\n".join(build_tables().values()))


if __name__ == "__main__":
    main()
