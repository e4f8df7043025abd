"""Small plots as SVG text: intervals by language, seeds side by side, lines by layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

N_COLORS = 6  # classes c0 to c5, colored by the page
WIDTH, LEFT, RIGHT, TOP, BOTTOM = 620, 90, 16, 26, 38
ROW = 16
SHAPES = 3
LONGEST = 60


@dataclass(frozen=True, slots=True)
class Interval:
    """A difference with its bounds, and what hovering says."""

    middle: float
    low: float | None
    high: float | None
    title: str
    sure: bool = False


def draw_intervals(
    rows: Mapping[str, Mapping[str, Interval]], places: Mapping[str, int], *, label: str
) -> str:
    """Draw differences as dots with whiskers, a row a language; 0 is marked.

    A model's place among all decides its color and shape. A filled dot is a verdict; an empty
    one is within noise.
    """
    ends = [0.0]
    for by_model in rows.values():
        for each in by_model.values():
            ends += [e for e in (each.middle, each.low, each.high) if e is not None]
    scale = _Scale(*_spread(ends), LEFT, WIDTH - RIGHT)
    step = ROW * len(places) + 8
    bottom = TOP + step * len(rows)
    parts = _draw_vertical_grid(scale, bottom)
    zero = scale.place(0)
    parts.append(f'<line class="zero" x1="{zero:.1f}" x2="{zero:.1f}" y1="{TOP}" y2="{bottom}"/>')
    for number, (name, by_model) in enumerate(rows.items()):
        top = TOP + number * step
        if number % 2:
            parts.append(f'<rect class="band" x="0" y="{top}" width="{WIDTH}" height="{step}"/>')
        parts.append(_write(LEFT - 8, top + step / 2 + 4, name, "end"))
        for line, (model, place) in enumerate(places.items()):
            if model in by_model:
                y = top + 4 + ROW * (line + 0.5)
                parts.append(_draw_interval(by_model[model], scale, y, place))
    parts.append(_write((LEFT + WIDTH - RIGHT) / 2, bottom + 32, label, "middle"))
    return _wrap(parts, bottom + BOTTOM, label)


def draw_seeds(
    scores: Mapping[str, Mapping[str, float]],
    places: Mapping[str, int],
    *,
    label: str,
    height: int = 220,
) -> str:
    """Draw scores of seeds as dots, a column a model; lines join the same seed."""
    values = [value for by_seed in scores.values() for value in by_seed.values()]
    scale = _Scale(*_spread(values), TOP + height, TOP)
    models = list(scores)
    columns = {
        model: LEFT + (WIDTH - LEFT - RIGHT) * (place + 0.5) / len(models)
        for place, model in enumerate(models)
    }
    parts = _draw_horizontal_grid(scale)
    for before, after in pairwise(models):
        for seed in [seed for seed in scores[before] if seed in scores[after]]:
            ends = [(columns[m], scale.place(scores[m][seed])) for m in (before, after)]
            parts.append(_join(ends, "seed"))
    for model in models:
        for seed, value in scores[model].items():
            title = f"{model}, {seed}: {value:.2f}"
            parts.append(draw_mark(columns[model], scale.place(value), places[model], title))
        parts.append(_write(columns[model], TOP + height + 18, model, "middle"))
    parts.append(_write(LEFT - 8, TOP - 14, label, "end", "small"))
    return _wrap(parts, TOP + height + BOTTOM, f"{label} by seed")


def draw_layers(
    lines: Mapping[str, Mapping[int, float]],
    places: Mapping[str, int],
    *,
    label: str,
    height: int = 240,
) -> str:
    """Draw a score by layer, a line a model."""
    layers = sorted({layer for line in lines.values() for layer in line})
    values = [value for line in lines.values() for value in line.values()]
    up = _Scale(*_spread(values), TOP + height, TOP)
    along = _Scale(layers[0], max(layers[-1], layers[0] + 1), LEFT + 10, WIDTH - RIGHT - 10)
    parts = _draw_horizontal_grid(up)
    every = math.ceil(len(layers) / 13)
    for layer in layers[::every]:
        parts.append(_write(along.place(layer), TOP + height + 18, str(layer), "middle"))
    for model, line in lines.items():
        points = [(along.place(layer), up.place(value)) for layer, value in line.items()]
        parts.append(_join(points, f"line c{places[model] % N_COLORS}"))
        for (x, y), (layer, value) in zip(points, line.items(), strict=True):
            title = f"{model}, layer {layer}: {value:.2f}"
            parts.append(draw_mark(x, y, places[model], title))
    parts.append(_write((LEFT + WIDTH) / 2, TOP + height + 34, "layer", "middle"))
    parts.append(_write(LEFT - 8, TOP - 14, label, "end", "small"))
    return _wrap(parts, TOP + height + BOTTOM, f"{label} by layer")


@dataclass(frozen=True, slots=True)
class _Scale:
    """A straight line from values to places."""

    low: float
    high: float
    start: float
    end: float

    def place(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round values inside, five or so."""
        step = choose_step(self.high - self.low)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [k * step for k in range(first, last + 1)]


def choose_step(width: float) -> float:
    """Choose 1, 2 or 5 times a power of ten that cuts a width into four to nine.

    >>> choose_step(10), choose_step(0.7)
    (2.0, 0.1)
    """
    power = 10.0 ** math.floor(math.log10(width / 4))
    return max(power * factor for factor in (1, 2, 5) if power * factor <= width / 4)


def _spread(values: Sequence[float]) -> tuple[float, float]:
    """Give bounds with some air around values."""
    low, high = min(values), max(values)
    air = 0.06 * (high - low) or 0.5
    return low - air, high + air


def _draw_vertical_grid(scale: _Scale, bottom: float) -> list[str]:
    parts = []
    for tick in scale.ticks():
        x = scale.place(tick)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom:.1f}"/>')
        parts.append(_write(x, bottom + 15, _show_tick(tick), "middle"))
    return parts


def _draw_horizontal_grid(scale: _Scale) -> list[str]:
    parts = []
    for tick in scale.ticks():
        y = scale.place(tick)
        right = WIDTH - RIGHT
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_write(LEFT - 8, y + 4, _show_tick(tick), "end"))
    return parts


def _draw_interval(each: Interval, scale: _Scale, y: float, place: int) -> str:
    color, whisker = f"c{place % N_COLORS}", ""
    if each.low is not None and each.high is not None:
        x1, x2 = scale.place(each.low), scale.place(each.high)
        whisker = f'<line class="line {color}" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y}" y2="{y}"/>'
    return whisker + draw_mark(scale.place(each.middle), y, place, each.title, filled=each.sure)


def draw_mark(x: float, y: float, place: int, title: str = "", *, filled: bool = True) -> str:
    """Draw a circle, square or diamond: colors alone do not tell models apart for everyone."""
    kind = f'class="mark c{place % N_COLORS}{"" if filled else " empty"}"'
    hover = f"<title>{escape(title)}</title>" if title else ""
    shape = place % SHAPES
    if shape == 0:
        return f'<circle {kind} cx="{x:.1f}" cy="{y:.1f}" r="4.5">{hover}</circle>'
    turn = "" if shape == 1 else f' transform="rotate(45 {x:.1f} {y:.1f})"'
    box = f'x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8"'
    return f"<rect {kind} {box}{turn}>{hover}</rect>"


def _join(points: Sequence[tuple[float, float]], kind: str) -> str:
    shown = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline class="{kind}" points="{shown}"/>'


def _write(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    shown = text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
    style = f' class="{kind}"' if kind else ""
    return f'<text{style} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(shown)}</text>'


def _show_tick(value: float) -> str:
    return f"{value:.6g}".replace("-", "−") if abs(value) > 1e-9 else "0"


def _wrap(parts: Sequence[str], height: float, label: str) -> str:
    head = f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}">'
    return head + "".join(parts) + "</svg>"
