"""Plots as SVG, drawn by hand: bars and curves, readable in light and dark pages. Nothing to install."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from lookahead.bench.sections import Bars, Curves

COLOURS = ("#3366cc", "#e07b39", "#2e9e6b", "#b4479b", "#8a8f98", "#c9a227", "#4fb3c8", "#a8483b", "#6a5acd")
WIDTH, LEFT, RIGHT, TOP = 760, 56, 16, 46
PLOT = 260
LINE = 18
"""Height of a line of the legend."""


def draw(plot: Bars | Curves) -> str:
    return _bars(plot) if isinstance(plot, Bars) else _curves(plot)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers that cover low to high."""
    if high - low < 1e-6 * max(1.0, high):
        high = low + max(1.0, 0.1 * high)
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 10) for number in range(first, last + 1)]


def _bars(plot: Bars) -> str:
    values = [v for series in plot.series.values() for v in series if v is not None]
    marks = ticks(0.0, max([*values, plot.mark or 0.0], default=1.0))
    names = list(plot.series)
    many = len(plot.labels) * len(names)
    slant = max((len(label) for label in plot.labels), default=0) * 7 > (WIDTH - LEFT - RIGHT) / max(
        1, len(plot.labels)
    )
    room = min(150, 18 + 4 * max((len(label) for label in plot.labels), default=0)) if slant else 24
    drawing = _Drawing(plot.title, names, room)
    drawing.y_axis(marks, plot.unit)
    colours = _colours(names)
    group = drawing.inner / max(1, len(plot.labels))
    width = min(46.0, group * 0.82 / max(1, len(names)))
    for i, label in enumerate(plot.labels):
        middle = LEFT + group * (i + 0.5)
        for j, name in enumerate(names):
            value = plot.series[name][i]
            if value is None:
                continue
            x = middle + (j - len(names) / 2) * width
            top = drawing.y(value)
            colour = colours[j]
            tip = f"{label}, {name}: {value:.2f}{plot.unit}"
            drawing.add(
                f'<rect x="{x + 1:.1f}" y="{top:.1f}" width="{max(1.0, width - 2):.1f}" '
                f'height="{drawing.bottom - top:.1f}" fill="{colour}"><title>{escape(tip)}</title></rect>'
            )
            if many <= 30:
                drawing.text(x + width / 2, top - 4, f"{value:.2f}", "middle", 10)
        drawing.label(middle, label, slant)
    if plot.mark is not None:
        drawing.rule(plot.mark)
    return drawing.svg()


def _curves(plot: Curves) -> str:
    points = [p for series in plot.series.values() for p in series]
    xs, ys = [p[0] for p in points] or [0.0], [p[1] for p in points] or [0.0]
    drawing = _Drawing(plot.title, list(plot.series), 44, dashed=plot.paper)
    drawing.y_axis(ticks(0.0, max(ys)), "")
    scale = math.log if plot.log and min(xs) > 0 else float
    start, end = scale(min(xs)), scale(max(xs))
    span = (end - start) or 1.0

    def x_of(value: float) -> float:
        return LEFT + 14 + (drawing.inner - 28) * (scale(value) - start) / span

    shown = -math.inf
    for value in sorted(set(xs)):
        if x_of(value) - shown > 22:  # else their numbers would touch
            shown = x_of(value)
            drawing.text(shown, drawing.bottom + 16, f"{value:g}", "middle")
            drawing.add(
                f'<line x1="{shown:.1f}" x2="{shown:.1f}" y1="{drawing.bottom}" '
                f'y2="{drawing.bottom + 4}" class="axis"/>'
            )
    drawing.text(LEFT + drawing.inner / 2, drawing.bottom + 36, plot.x, "middle")
    drawing.text(LEFT - 40, TOP - 12, plot.y, "start")
    colours = _colours(list(plot.series))
    for (name, series), colour in zip(plot.series.items(), colours, strict=True):
        ordered = sorted(series)
        path = " ".join(f"{x_of(x):.1f},{drawing.y(y):.1f}" for x, y in ordered)
        dash = ' stroke-dasharray="6 4"' if name in plot.paper else ""
        drawing.add(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        for x, y in ordered:
            tip = escape(f"{name}: {plot.x} {x:g}, {y:.3g}")
            drawing.add(
                f'<circle cx="{x_of(x):.1f}" cy="{drawing.y(y):.1f}" r="3.5" fill="{colour}">'
                f"<title>{tip}</title></circle>"
            )
    return drawing.svg()


def _colours(names: Sequence[str]) -> list[str]:
    """One for each; a name that goes on after a comma has the colour of the name before it."""
    found: dict[str, str] = {}
    for name in names:
        first = name.partition(",")[0]
        kin = found.get(first) if first in names else None
        found[name] = kin or COLOURS[len(set(found.values())) % len(COLOURS)]
    return [found[name] for name in names]


class _Drawing:
    """A plot's frame: title, legend below, and the way from values to pixels."""

    def __init__(self, title: str, names: Sequence[str], room: int, dashed: Sequence[str] = ()) -> None:
        self.inner = WIDTH - LEFT - RIGHT
        self.bottom = TOP + PLOT
        self._parts: list[str] = []
        self._title = title
        self._range = (0.0, 1.0)
        self._end = self._legend(names, self.bottom + room + LINE, dashed)

    def add(self, part: str) -> None:
        self._parts.append(part)

    def text(self, x: float, y: float, text: str, anchor: str = "start", size: int = 12) -> None:
        self.add(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>')

    def label(self, x: float, text: str, slant: bool) -> None:
        """Below the axis; slanted where labels would touch."""
        if not slant:
            self.text(x, self.bottom + 18, text, "middle")
            return
        y = self.bottom + 14
        self.add(
            f'<text x="{x:.1f}" y="{y}" text-anchor="end" font-size="11" transform="rotate(-35 {x:.1f} {y})">'
            f"{escape(text)}</text>"
        )

    def y_axis(self, marks: Sequence[float], unit: str) -> None:
        self._range = marks[0], marks[-1]
        for mark in marks:
            y = self.y(mark)
            self.add(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
            self.text(LEFT - 8, y + 4, f"{mark:g}{unit}", "end")

    def y(self, value: float) -> float:
        low, high = self._range
        return self.bottom - PLOT * (value - low) / (high - low)

    def rule(self, value: float) -> None:
        y = self.y(value)
        self.add(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="rule"/>')

    def _legend(self, names: Sequence[str], y: int, dashed: Sequence[str]) -> int:
        """As many lines as the names need; returns where it ends."""
        if len(names) < 2:
            return y - LINE + 6
        x = float(LEFT)
        for name, colour in zip(names, _colours(names), strict=True):
            width = 28 + 7.2 * len(name)
            if x > LEFT and x + width > WIDTH - RIGHT:
                x, y = float(LEFT), y + LINE
            dash = ' stroke-dasharray="4 2"' if name in dashed else ""
            self.add(
                f'<line x1="{x:.1f}" x2="{x + 14:.1f}" y1="{y - 4}" y2="{y - 4}" '
                f'stroke="{colour}" stroke-width="6"{dash}/>'
            )
            self.text(x + 20, y, name)
            x += width
        return y + 10

    def svg(self) -> str:
        title = f'<text x="{LEFT}" y="16" font-size="13" font-weight="600">{escape(self._title)}</text>'
        body = "".join(self._parts)
        return (
            f'<svg viewBox="0 0 {WIDTH} {self._end}" role="img" aria-label="{escape(self._title)}" '
            f'xmlns="http://www.w3.org/2000/svg">{title}{body}</svg>'
        )
