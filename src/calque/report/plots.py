"""Pictures of scores: how models do from layer to layer, and along training.

Pictures of attention between two sentences: how much by layer, and from which word to which.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calque.errors import InputError, MissingExtra
from calque.types import PairAttention, Score

if TYPE_CHECKING:
    import numpy.typing as npt
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    FloatArray = npt.NDArray[np.float32]

SUFFIXES = (".png", ".svg", ".pdf")
MEAN = "mean"
N_COLUMNS, PANEL_INCHES = 3, (3.6, 2.8)
LEGEND_COLUMNS = 4
# Told apart by the color-blind, and by their shapes in black and white (Okabe and Ito, 2008).
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "osD^vP"


def check_plot(path: Path) -> None:
    """Refuse a picture that cannot be made, before the work begins."""
    if path.suffix not in SUFFIXES:
        fix = f"name it {path.stem}.png, .svg or .pdf"
        raise InputError(f"no picture is written as {path.suffix!r}", file=path, fix=fix)
    if not path.parent.is_dir():
        raise InputError("its folder does not exist", file=path, fix=f"mkdir -p {path.parent}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MissingExtra("matplotlib", "plots") from None


def plot_layers(scores: Sequence[Score], metric: str, *, label: str | None = None) -> Figure:
    """Draw a metric by layer, a line for each model, a panel for each language and the mean.

    With word alignments it is Figure 2 of XLM-Align (Chi et al., 2021).
    """
    from matplotlib.figure import Figure

    mine = [score for score in scores if score.metric == metric and score.layer is not None]
    if not mine:
        raise InputError(f"no {metric} by layer to draw", fix="score several layers")
    languages = list(dict.fromkeys(score.language for score in mine))
    if len(languages) == 2 and MEAN in languages:  # of one language
        languages.remove(MEAN)
    names = shorten_names(dict.fromkeys(score.model for score in mine))
    n_columns = min(N_COLUMNS, math.ceil(math.sqrt(len(languages))))
    n_rows = math.ceil(len(languages) / n_columns)
    width, height = PANEL_INCHES
    figure = Figure(figsize=(width * n_columns, height * n_rows), layout="constrained")
    panels = figure.subplots(n_rows, n_columns, squeeze=False).ravel()
    for language, panel in zip(languages, panels, strict=False):
        _draw_panel(panel, [score for score in mine if score.language == language], names)
        panel.set_title(language, fontsize="medium")
    for panel in panels[len(languages) :]:
        panel.set_visible(False)
    figure.supxlabel("layer")
    figure.supylabel(label or metric)
    _add_legend(figure, *panels[0].get_legend_handles_labels(), most=1 + n_columns)
    return figure


def plot_transfer(
    curves: Mapping[str, Sequence[tuple[int, float, float]]], *, label: str = "score (%)"
) -> Figure:
    """Draw (step, source, others) of runs: others, source and the gap between, a line a run.

    It is Figure 5 of MetaXLM (Chi et al., 2021).
    """
    from matplotlib.figure import Figure

    if not any(curves.values()):
        raise InputError("no transfer to draw", fix="train with a `probe` in the recipe")
    width, height = PANEL_INCHES
    figure = Figure(figsize=(3 * width, height + 0.6), layout="constrained")
    panels = figure.subplots(1, 3)
    names = shorten_names(curves)
    for number, (run, points) in enumerate(curves.items()):
        steps = [step for step, _, _ in points]
        source, others = ([100 * point[side] for point in points] for side in (1, 2))
        gap = [own - other for own, other in zip(source, others, strict=True)]
        for panel, values in zip(panels, (others, source, gap), strict=True):
            _draw_line(panel, steps, values, number, names[run])
    for panel, title in zip(panels, ("other languages, mean", "source", "gap"), strict=True):
        panel.set_title(title, fontsize="medium")
    figure.supxlabel("step")
    figure.supylabel(label)
    _add_legend(figure, *panels[0].get_legend_handles_labels())
    return figure


def plot_curves(
    panels: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]], *, across: str, label: str
) -> Figure:
    """Draw (step, value) of runs, a line a run, a panel for each title.

    With BLEU by updates it is the picture in Table 3 of VECO (Luo et al., 2021).
    """
    from matplotlib.figure import Figure

    runs = list(dict.fromkeys(run for curves in panels.values() for run in curves))
    if not runs:
        raise InputError("no curves to draw", fix="give a run")
    width, height = PANEL_INCHES
    figure = Figure(figsize=(width * len(panels), height + 0.6), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False).ravel()
    handles: dict[str, Any] = {}
    for (title, curves), panel in zip(panels.items(), axes, strict=True):
        for run, points in curves.items():
            steps, values = [step for step, _ in points], [value for _, value in points]
            _draw_line(panel, steps, values, runs.index(run), run)
        panel.set_title(title, fontsize="medium")
        lines, names = panel.get_legend_handles_labels()
        handles |= dict(zip(names, lines, strict=True))
    figure.supxlabel(across)
    figure.supylabel(label)
    _add_legend(figure, [handles[run] for run in runs], runs)
    return figure


def _add_legend(
    figure: Figure, lines: Sequence[Any], names: Sequence[str], *, most: int = LEGEND_COLUMNS
) -> None:
    """Name the lines above the panels, in as many columns as there is room for."""
    for columns in range(min(len(names), most), 0, -1):
        legend = figure.legend(
            lines, names, loc="outside upper center", ncols=columns, frameon=False
        )
        box = legend.get_tightbbox()
        if columns == 1 or box is None or box.width <= figure.bbox.width:
            return
        legend.remove()


def save_plot(figure: Figure, path: Path) -> None:
    """Write a picture, whole or not at all."""
    draft = path.with_name(f".{path.stem}.partial{path.suffix}")
    try:
        figure.savefig(draft, dpi=150)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def shorten_names(models: Iterable[str]) -> dict[str, str]:
    """Name models by the last part of their paths, or whole where those are the same.

    The folder `model` of a run says nothing without the run.

    >>> shorten_names(["runs/a", "runs/b"]), shorten_names(["/runs/a/model", "calque-mini"])
    ({'runs/a': 'a', 'runs/b': 'b'}, {'/runs/a/model': 'a/model', 'calque-mini': 'calque-mini'})
    """
    last = {model: _take_last(model) for model in models}
    return last if len(set(last.values())) == len(last) else {model: model for model in last}


def _take_last(model: str) -> str:
    parts = model.rstrip("/").split("/")
    return "/".join(parts[-2:] if parts[-1] == "model" else parts[-1:]).lstrip("/")


def _draw_panel(panel: Axes, scores: Sequence[Score], names: Mapping[str, str]) -> None:
    for number, (model, name) in enumerate(names.items()):
        points = sorted((s.layer or 0, 100 * s.value) for s in scores if s.model == model)
        _draw_line(panel, [x for x, _ in points], [y for _, y in points], number, name)


def _draw_line(
    panel: Axes, steps: Sequence[int], values: Sequence[float], number: int, name: str
) -> None:
    """Draw the line of the model or run of a number, in its colour and shape."""
    from matplotlib.ticker import MaxNLocator

    # Beyond the colours, lines are dashed.
    style = "-" if number < len(COLORS) else "--"
    color, marker = COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)]
    panel.plot(steps, values, style, color=color, marker=marker, markersize=4, label=name)
    panel.xaxis.set_major_locator(MaxNLocator(nbins="auto", integer=True))
    panel.grid(alpha=0.3)


N_COLUMNS_ATTENTION_PLOT, PIECE_INCHES = 3, 0.24
# It comes with matplotlib.
USUAL_FONT = "DejaVu Sans"
# A font that has a box for every character there is.
BOXES = "Last Resort"
# Lines fainter than this share of the darkest are left out.
FAINTEST = 0.02


def plot_attention(readings: Sequence[PairAttention], *, layer: int | None = None) -> Figure:
    """Draw the share of attention that crosses by layer, and lines from piece to piece.

    The lines are those of a layer, counted from 1, or the mean over layers; the darker, the more
    attention, by one scale for all. It is Figure 1 of VECO (Luo et al., 2021), and its sum.
    """
    from matplotlib.figure import Figure

    n_columns = min(N_COLUMNS_ATTENTION_PLOT, len(readings))
    n_rows = math.ceil(len(readings) / n_columns)
    n_pieces = max(max(len(one.src), len(one.tgt)) for one in readings)
    lines_height = max(2.0, PIECE_INCHES * n_pieces + 0.6)
    width, height = PANEL_INCHES
    figure = Figure(
        figsize=(max(1.6 * width, width * n_columns), height + 0.6 + lines_height * n_rows),
        layout="constrained",
    )
    ratios = (height + 0.6, lines_height * n_rows)
    upper, lower = figure.subfigures(2, 1, squeeze=False, height_ratios=ratios)[:, 0]
    _draw_shares(upper.subplots(), readings)
    upper.legend(loc="outside upper center", ncols=min(2, len(readings)), frameon=False)
    panels = lower.subplots(n_rows, n_columns, squeeze=False).ravel()
    scores = [_choose(one, layer) for one in readings]
    darkest = max(score.max() for score in scores) or 1.0
    for panel, one, score in zip(panels, readings, scores, strict=False):
        _draw_lines(panel, one, score / darkest)
        panel.set_title(label_reading(one, readings), fontsize="medium")
    for panel in panels[len(readings) :]:
        panel.set_visible(False)
    return figure


def label_reading(reading: PairAttention, readings: Sequence[PairAttention]) -> str:
    """Name a reading by its model, shortened, and its kind."""
    return f"{shorten_names(one.model for one in readings)[reading.model]}, {reading.kind}"


def find_fonts(text: str) -> tuple[list[str], str]:
    """Choose fonts that draw a text between them, and give the characters that none draws.

    >>> find_fonts("été")
    (['DejaVu Sans'], '')
    """
    from matplotlib.font_manager import fontManager
    from matplotlib.ft2font import FT2Font

    left = {character for character in text if not character.isspace()}
    upright = [entry for entry in fontManager.ttflist if entry.style == "normal"]
    files = {entry.name: entry.fname for entry in upright if entry.weight == 400}
    files = {name: file for name, file in files.items() if not name.startswith(BOXES)}
    chosen = [USUAL_FONT]
    for name in sorted(files, key=lambda name: (name != USUAL_FONT, name)):
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


def _choose(reading: PairAttention, layer: int | None) -> FloatArray:
    """Take a layer, or the mean of all; what either sentence gives the other is averaged."""
    both = (reading.src_to_tgt + reading.tgt_to_src.swapaxes(1, 2)) / 2
    return np.asarray(both.mean(axis=0) if layer is None else both[layer - 1], dtype=np.float32)


def _draw_shares(panel: Axes, readings: Sequence[PairAttention]) -> None:
    from matplotlib.ticker import MaxNLocator

    for number, one in enumerate(readings):
        color, marker = COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)]
        layers, shares = range(1, len(one.shares) + 1), [100 * share for share in one.shares]
        label = label_reading(one, readings)
        panel.plot(layers, shares, color=color, marker=marker, markersize=4, label=label)
        panel.axhline(100 * one.even, color=color, linewidth=0.8, linestyle=":")
    panel.set_ylim(0, 100)
    panel.xaxis.set_major_locator(MaxNLocator(nbins="auto", integer=True))
    panel.set_xlabel("layer (dotted: if attention were even)")
    panel.set_ylabel("to the other sentence (%)")
    panel.grid(alpha=0.3)


def _draw_lines(panel: Axes, reading: PairAttention, darkness: FloatArray) -> None:
    """Write the pieces in two columns, and join them."""
    sides = [spread(len(side)) for side in (reading.src, reading.tgt)]
    fonts, missing = find_fonts("".join(reading.src + reading.tgt))
    for place, align, names, heights in (
        (-0.04, "right", reading.src, sides[0]),
        (1.04, "left", reading.tgt, sides[1]),
    ):
        for number, (name, height) in enumerate(zip(names, heights, strict=True), start=1):
            # A piece that no font can draw goes by its number.
            text = str(number) if set(name) & set(missing) else name
            panel.text(place, height, text, ha=align, va="center", family=fonts, fontsize="small")
    for i, from_height in enumerate(sides[0]):
        for j, to_height in enumerate(sides[1]):
            shade = float(darkness[i, j])
            if shade >= FAINTEST:
                panel.plot([0, 1], [from_height, to_height], color=COLORS[0], alpha=shade)
    panel.set_xlim(-0.5, 1.5)
    panel.set_ylim(-0.05, 1.05)
    panel.axis("off")


def spread(n_pieces: int) -> list[float]:
    """Give heights from the top to the bottom.

    >>> spread(3), spread(1)
    ([1.0, 0.5, 0.0], [0.5])
    """
    return [1 - k / (n_pieces - 1) for k in range(n_pieces)] if n_pieces > 1 else [0.5]
