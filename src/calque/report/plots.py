"""All plots, drawn with matplotlib: scores by layer, curves, differences, seeds and attention."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calque.errors import InputError, MissingExtra, printable
from calque.io.files import check_output_file, write_atomically
from calque.types import PairAttention, Reliability

if TYPE_CHECKING:
    import numpy.typing as npt
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure
    from matplotlib.lines import Line2D

    FloatArray = npt.NDArray[np.float32]

SUFFIXES = (".png", ".svg", ".pdf")
N_COLUMNS, PANEL_INCHES = 3, (3.6, 2.8)
LEGEND_COLUMNS = 4
# Distinguishable for color-blind readers, and by their markers in black and white (Okabe and
# Ito, 2008).
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "osD^vP"
# Stands for the text color of an HTML page until the SVG text is written.
PAGE_COLOR = "#010203"
TOKEN_INCHES = 0.24
DEFAULT_FONT = "DejaVu Sans"  # part of matplotlib
PLACEHOLDER_FONT = "Last Resort"  # has an empty box for every character
MIN_DARKNESS = 0.02  # lines with a smaller share of the maximum are left out


def check_plot(path: Path) -> None:
    """Raise InputError if a plot cannot be written to this path."""
    if path.suffix not in SUFFIXES:
        fix = f"name it {path.stem}.png, .svg or .pdf"
        raise InputError(f"plots cannot be written as {path.suffix!r}", file=path, fix=fix)
    check_output_file(path, ())
    check_matplotlib()


def check_matplotlib() -> None:
    """Raise MissingExtra if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MissingExtra("matplotlib", "plots") from None


def save_plot(figure: Figure, path: Path) -> None:
    """Write a plot to a file that appears only when it is complete."""
    _show_text_literally(figure)
    with write_atomically(path, binary=True) as stream:
        figure.savefig(stream, format=path.suffix[1:], dpi=150)


@contextmanager
def page_style() -> Iterator[None]:
    """Draw text and lines in PAGE_COLOR, which `to_svg` replaces by the text color of the page."""
    import matplotlib

    style: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "calque"}
    for key in ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"):
        style[key] = PAGE_COLOR
    with matplotlib.rc_context(style):
        yield


def to_svg(figure: Figure, label: str) -> str:
    """Return a figure as SVG text for an HTML page, with a label for screen readers."""
    stream = io.StringIO()
    _show_text_literally(figure)
    figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    text = re.sub(r"<metadata>.*?</metadata>", "", stream.getvalue(), flags=re.DOTALL)
    text = re.sub(r'xmlns(:\w+)?="[^"]*" ?', "", text[text.index("<svg ") + 5 :].strip())
    text = text.replace("xlink:href", "href").replace(PAGE_COLOR, "currentColor")
    return f'<svg role="img" aria-label="{escape(label)}" {text}'


def plot_layers(panels: Mapping[str, Mapping[str, Mapping[int, float]]], *, label: str) -> Figure:
    """Draw scores by layer: one panel per title, such as a language, and one line per model.

    With alignment error rates it is Figure 2 of XLM-Align (Chi et al., 2021).

    Args:
        panels: Title of a panel → model → layer → score.
        label: Label of the vertical axis.
    """
    from matplotlib.figure import Figure

    models = dict.fromkeys(model for curves in panels.values() for model in curves)
    if not models:
        raise InputError("there are no scores by layer to draw", fix="measure several layers")
    names = shorten_names(models)
    n_columns = min(N_COLUMNS, math.ceil(math.sqrt(len(panels))))
    n_rows = math.ceil(len(panels) / n_columns)
    width, height = PANEL_INCHES
    figure = Figure(figsize=(width * n_columns, height * n_rows), layout="constrained")
    axes = figure.subplots(n_rows, n_columns, squeeze=False).ravel()
    lines: dict[str, Line2D] = {}
    for (title, curves), panel in zip(panels.items(), axes, strict=False):
        for number, (model, name) in enumerate(names.items()):
            layers = sorted(curves.get(model, {}))
            values = [curves[model][layer] for layer in layers]
            lines[name] = _draw_line(panel, layers, values, number, name)
        panel.set_title(title, fontsize="medium")
    for panel in axes[len(panels) :]:
        panel.set_visible(False)
    figure.supxlabel("layer")
    figure.supylabel(label)
    _add_legend(figure, lines, most=1 + n_columns)
    return figure


def plot_transfer(
    curves: Mapping[str, Sequence[tuple[int, float, float]]], *, label: str = "score (%)"
) -> Figure:
    """Draw the transfer gap along training: other languages, source language and gap.

    `curves` maps runs to (step, score of the source, mean of the others).

    It is Figure 5 of MetaXLM (Chi et al., 2021).
    """
    from matplotlib.figure import Figure

    if not any(curves.values()):
        raise InputError(
            "there are no probe scores to plot", fix="train with a `probe` in the recipe"
        )
    width, height = PANEL_INCHES
    figure = Figure(figsize=(3 * width, height + 0.6), layout="constrained")
    panels = figure.subplots(1, 3)
    names, lines = shorten_names(curves), dict[str, "Line2D"]()
    for number, (run, points) in enumerate(curves.items()):
        steps = [step for step, _, _ in points]
        source, others = ([point[side] for point in points] for side in (1, 2))
        gap = [own - other for own, other in zip(source, others, strict=True)]
        for panel, values in zip(panels, (others, source, gap), strict=True):
            name = names[run]
            lines[name] = _draw_line(panel, steps, values, number, name)
    for panel, title in zip(panels, ("other languages, mean", "source", "gap"), strict=True):
        panel.set_title(title, fontsize="medium")
    figure.supxlabel("step")
    figure.supylabel(label)
    _add_legend(figure, lines)
    return figure


def plot_curves(
    panels: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]], *, across: str, label: str
) -> Figure:
    """Draw curves of (step, value): one panel per title, one line per run.

    With BLEU by updates it is the plot in Table 3 of VECO (Luo et al., 2021).
    """
    from matplotlib.figure import Figure

    runs = list(dict.fromkeys(run for curves in panels.values() for run in curves))
    if not runs:
        raise InputError("there are no curves to plot", fix="pass at least one run")
    width, height = PANEL_INCHES
    figure = Figure(figsize=(width * len(panels), height + 0.6), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False).ravel()
    lines: dict[str, Line2D] = {}
    for (title, curves), panel in zip(panels.items(), axes, strict=True):
        for run, points in curves.items():
            steps, values = [step for step, _ in points], [value for _, value in points]
            lines[run] = _draw_line(panel, steps, values, runs.index(run), run)
        panel.set_title(title, fontsize="medium")
    figure.supxlabel(across)
    figure.supylabel(label)
    _add_legend(figure, {run: lines[run] for run in runs})
    return figure


@dataclass(frozen=True, slots=True)
class IntervalMark:
    """A difference and the bounds of its interval; `significant` ones are drawn filled."""

    middle: float
    low: float | None
    high: float | None
    significant: bool = False


def plot_differences(
    rows: Mapping[str, Mapping[str, IntervalMark]], numbers: Mapping[str, int], *, label: str
) -> Figure:
    """Draw differences with their intervals: one row per language, one mark per model.

    The number of a model decides its color and marker; it is the same in all plots of a page.
    """
    from matplotlib.figure import Figure

    height = 0.9 + 0.17 * len(rows) * (len(numbers) + 0.5)
    figure = Figure(figsize=(7.5, height), layout="constrained")
    panel = figure.subplots()
    for k, by_model in enumerate(rows.values()):
        for line, (model, number) in enumerate(numbers.items()):
            if model not in by_model:
                continue
            mark = by_model[model]
            y = k + (line + 0.75) / (len(numbers) + 0.5) - 0.5
            color, marker = _style(number)
            if mark.low is not None and mark.high is not None:
                panel.plot([mark.low, mark.high], [y, y], color=color, linewidth=1.5)
            fill = color if mark.significant else "none"
            panel.plot(
                mark.middle, y, marker=marker, markersize=5, color=color, markerfacecolor=fill
            )
    panel.axvline(0, color=PAGE_COLOR, linewidth=1, linestyle="--")
    panel.set_yticks(range(len(rows)), list(rows))
    panel.set_ylim(max(len(rows), 1) - 0.5, -0.5)
    panel.set_xlabel(label)
    panel.grid(axis="x", alpha=0.3)
    return figure


def plot_seeds(
    scores: Mapping[str, Mapping[str, float]], numbers: Mapping[str, int], *, label: str
) -> Figure:
    """Draw the score of every seed: one column per model; lines join equal seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 2.8), layout="constrained")
    panel = figure.subplots()
    columns = {model: column for column, model in enumerate(scores)}
    for before, after in pairwise(scores):
        for seed in [seed for seed in scores[before] if seed in scores[after]]:
            ends = [scores[before][seed], scores[after][seed]]
            panel.plot([columns[before], columns[after]], ends, color=PAGE_COLOR, alpha=0.3)
    for model, by_seed in scores.items():
        color, marker = _style(numbers[model])
        xs = [columns[model]] * len(by_seed)
        panel.plot(xs, list(by_seed.values()), marker=marker, linestyle="none", color=color)
    panel.set_xticks(range(len(scores)), list(scores))
    panel.set_xlim(-0.5, len(scores) - 0.5)
    panel.set_ylabel(label)
    panel.grid(axis="y", alpha=0.3)
    return figure


def plot_reliability(curves: Mapping[str, Reliability]) -> Figure:
    """Draw the share of right links by their score, and below it the number of links.

    Scores that are reliable probabilities lie on the dotted diagonal.

    Args:
        curves: Name → scores compared with gold links.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import StrMethodFormatter

    width, height = PANEL_INCHES
    figure = Figure(figsize=(1.4 * width, 1.8 * height), layout="constrained")
    panel, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    panel.plot([0, 100], [0, 100], ":", color="gray")
    lines = {}
    for number, (name, found) in enumerate(curves.items()):
        color, marker = _style(number)
        filled = found.n_items > 0
        right, probability = 100 * found.right[filled], 100 * found.probability[filled]
        label = f"{name}, calibration error {100 * found.error:.1f} %"
        (lines[label],) = panel.plot(probability, right, color=color, marker=marker, label=label)
        edges = np.linspace(0, 100, len(found.n_items) + 1)
        below.stairs(found.n_items, edges, color=color, fill=len(curves) == 1)
    panel.set_ylabel("sure in the gold links (%)")
    panel.set_ylim(-2, 102)
    panel.grid(alpha=0.3)
    below.set_yscale("log")
    below.set_ylim(bottom=0.8)
    below.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    below.set_ylabel("links")
    below.set_xlabel("score (%)")
    below.grid(alpha=0.3)
    _add_legend(figure, lines, most=1)
    return figure


def shorten_names(models: Iterable[str]) -> dict[str, str]:
    """Return short names of models: the last part of a path, if these are all different.

    The folder `model` of a run is shown together with the run.

    >>> shorten_names(["runs/a", "runs/b"]), shorten_names(["/runs/a/model", "calque-mini"])
    ({'runs/a': 'a', 'runs/b': 'b'}, {'/runs/a/model': 'a/model', 'calque-mini': 'calque-mini'})
    """
    last = {model: printable(_last_part(model)) for model in models}
    if len(set(last.values())) == len(last):
        return last
    return {model: printable(model, None) for model in last}


def _last_part(model: str) -> str:
    parts = model.rstrip("/").split("/")
    return "/".join(parts[-2:] if parts[-1] == "model" else parts[-1:]).lstrip("/")


def _draw_line(
    panel: Axes, steps: Sequence[int], values: Sequence[float], number: int, name: str
) -> Line2D:
    """Draw the line of a model or run in the color and with the marker of its number."""
    from matplotlib.ticker import MaxNLocator

    # When the colors are used up, lines are dashed.
    style = "-" if number < len(COLORS) else "--"
    color, marker = _style(number)
    (line,) = panel.plot(steps, values, style, color=color, marker=marker, markersize=4, label=name)
    panel.xaxis.set_major_locator(MaxNLocator(nbins="auto", integer=True))
    panel.grid(alpha=0.3)
    return line


def _add_legend(
    figure: Figure | SubFigure, lines: Mapping[str, Line2D], *, most: int = LEGEND_COLUMNS
) -> None:
    """Add a legend above the panels, with as many columns as fit."""
    # Matplotlib leaves out names that begin with an underscore.
    names = [f" {name}" if name.startswith("_") else name for name in lines]
    for columns in range(min(len(names), most), 0, -1):
        legend = figure.legend(
            list(lines.values()), names, loc="outside upper center", ncols=columns, frameon=False
        )
        _show_text_literally(legend)
        box = legend.get_tightbbox()
        if columns == 1 or box is None or box.width <= figure.bbox.width:
            return
        legend.remove()


def _show_text_literally(artist: Artist) -> None:
    """Turn off formulas: dollar signs in names and tokens are dollar signs."""
    from matplotlib.text import Text

    for text in artist.findobj(Text):
        text.set_parse_math(False)


def plot_attention(readings: Sequence[PairAttention], *, layer: int | None = None) -> Figure:
    """Draw the share of attention to the other sentence by layer, and lines between tokens.

    The lines show one layer, counted from 1, or the mean over layers; darker lines mean more
    attention, on one scale for all panels. It extends Figure 1 of VECO (Luo et al., 2021).
    """
    from matplotlib.figure import Figure

    n_columns = min(N_COLUMNS, len(readings))
    n_rows = math.ceil(len(readings) / n_columns)
    n_tokens = max(max(len(one.src), len(one.tgt)) for one in readings)
    lines_height = max(2.0, TOKEN_INCHES * n_tokens + 0.6)
    width, height = PANEL_INCHES
    figure = Figure(
        figsize=(max(1.6 * width, width * n_columns), height + 0.6 + lines_height * n_rows),
        layout="constrained",
    )
    ratios = (height + 0.6, lines_height * n_rows)
    upper, lower = figure.subfigures(2, 1, squeeze=False, height_ratios=ratios)[:, 0]
    _add_legend(upper, _draw_shares(upper.subplots(), readings), most=2)
    panels = lower.subplots(n_rows, n_columns, squeeze=False).ravel()
    scores = [_select_layer(one, layer) for one in readings]
    darkest = max(score.max() for score in scores) or 1.0
    for panel, one, score in zip(panels, readings, scores, strict=False):
        _draw_lines(panel, one, score / darkest)
        panel.set_title(attention_label(one, readings), fontsize="medium")
    for panel in panels[len(readings) :]:
        panel.set_visible(False)
    return figure


def attention_label(reading: PairAttention, readings: Sequence[PairAttention]) -> str:
    """Return the short name of the model and the kind of attention."""
    return f"{shorten_names(one.model for one in readings)[reading.model]}, {reading.kind}"


def find_fonts(text: str) -> tuple[list[str], str]:
    """Return fonts that together draw a text, and the characters that no font has.

    >>> find_fonts("été")
    (['DejaVu Sans'], '')
    """
    from matplotlib.font_manager import fontManager
    from matplotlib.ft2font import FT2Font

    left = {character for character in text if not character.isspace()}
    upright = [entry for entry in fontManager.ttflist if entry.style == "normal"]
    files = {entry.name: entry.fname for entry in upright if entry.weight == 400}
    files = {name: file for name, file in files.items() if not name.startswith(PLACEHOLDER_FONT)}
    chosen = [DEFAULT_FONT]
    for name in sorted(files, key=lambda name: (name != DEFAULT_FONT, name)):
        if not left:
            break
        try:
            drawn = {chr(code) for code in FT2Font(files[name]).get_charmap()}
        except (OSError, RuntimeError):  # a font that cannot be read
            continue
        if left & drawn:
            chosen.append(name)
            left -= drawn
    return list(dict.fromkeys(chosen)), "".join(sorted(left))


def _select_layer(reading: PairAttention, layer: int | None) -> FloatArray:
    """Return the attention of a layer or the mean of all layers, averaged over both directions."""
    both = (reading.src_to_tgt + reading.tgt_to_src.swapaxes(1, 2)) / 2
    return np.asarray(both.mean(axis=0) if layer is None else both[layer - 1], dtype=np.float32)


def _draw_shares(panel: Axes, readings: Sequence[PairAttention]) -> dict[str, Line2D]:
    from matplotlib.ticker import MaxNLocator

    lines = {}
    for number, one in enumerate(readings):
        color, marker = _style(number)
        layers, shares = range(1, len(one.shares) + 1), [100 * share for share in one.shares]
        label = attention_label(one, readings)
        lines[label] = panel.plot(
            layers, shares, color=color, marker=marker, markersize=4, label=label
        )[0]
        panel.axhline(100 * one.uniform, color=color, linewidth=0.8, linestyle=":")
    panel.set_ylim(0, 100)
    panel.xaxis.set_major_locator(MaxNLocator(nbins="auto", integer=True))
    panel.set_xlabel("layer (dotted: uniform attention)")
    panel.set_ylabel("attention to the other sentence (%)")
    panel.grid(alpha=0.3)
    return lines


def _draw_lines(panel: Axes, reading: PairAttention, darkness: FloatArray) -> None:
    """Write the tokens in two columns and join them by lines."""
    sides = [even_heights(len(side)) for side in (reading.src, reading.tgt)]
    fonts, missing = find_fonts("".join(reading.src + reading.tgt))
    for place, align, names, heights in (
        (-0.04, "right", reading.src, sides[0]),
        (1.04, "left", reading.tgt, sides[1]),
    ):
        for number, (name, height) in enumerate(zip(names, heights, strict=True), start=1):
            # A token that no font can draw is shown by its number.
            text = str(number) if set(name) & set(missing) else name
            panel.text(place, height, text, ha=align, va="center", family=fonts, fontsize="small")
    for i, from_height in enumerate(sides[0]):
        for j, to_height in enumerate(sides[1]):
            shade = float(darkness[i, j])
            if shade >= MIN_DARKNESS:
                panel.plot([0, 1], [from_height, to_height], color=COLORS[0], alpha=shade)
    panel.set_xlim(-0.5, 1.5)
    panel.set_ylim(-0.05, 1.05)
    panel.axis("off")


def even_heights(n_tokens: int) -> list[float]:
    """Return evenly spaced heights from top to bottom.

    >>> even_heights(3), even_heights(1)
    ([1.0, 0.5, 0.0], [0.5])
    """
    return [1 - k / (n_tokens - 1) for k in range(n_tokens)] if n_tokens > 1 else [0.5]


def _style(number: int) -> tuple[str, str]:
    """Return the color and marker of a model by its number."""
    return COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)]
