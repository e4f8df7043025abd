"""Pictures of attention between two sentences: how much by layer, and from which word to which."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from calque.report.plots import COLORS, MARKERS, PANEL_INCHES, shorten_names
from calque.types import PairAttention

if TYPE_CHECKING:
    import numpy.typing as npt
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    FloatArray = npt.NDArray[np.float32]

N_COLUMNS, PIECE_INCHES = 3, 0.24
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

    n_columns = min(N_COLUMNS, len(readings))
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
