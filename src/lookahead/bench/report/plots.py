"""Plots as SVG, drawn by hand: bars and curves, readable in light and dark pages. Nothing to install."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from lookahead.bench.report.sections import Bars, Curves

COLOURS = ("#3366cc", "#e07b39", "#2e9e6b", "#b4479b", "#8a8f98", "#c9a227", "#4fb3c8", "#a8483b", "#6a5acd")
WIDTH, LEFT_MARGIN, RIGHT_MARGIN, TOP_MARGIN = 760, 56, 16, 46
PLOT_HEIGHT = 260
LEGEND_LINE = 18
"""Height of a line of the legend."""
SLANTED_LETTER, OVERHANG = 4.8, 14
"""Width of a slanted label's letter; how far a label may stand out to the left, where the page has its margin."""


PLOT_STYLE = """
svg text { fill: var(--text); stroke: var(--back); stroke-width: 3px; paint-order: stroke; }
svg .grid { stroke: var(--line); } svg .axis { stroke: var(--dim); }
svg .rule { stroke: var(--dim); stroke-dasharray: 3 3; }
"""
LIGHT = "svg { --text: #1c2330; --dim: #5b6472; --line: #d9dde3; --back: #fff; font-family: sans-serif; }"


def draw(plot: Bars | Curves) -> str:
    """The plot as an `<svg>` element, which takes its colours of text and lines from the page around it."""
    return _bars(plot) if isinstance(plot, Bars) else _curves(plot)


def write(plots: Sequence[Bars | Curves], path: Path) -> None:
    """The plots below each other in one SVG file that needs no page around it."""
    parts, height = [], 0
    for svg in map(draw, plots):
        own = int(svg.split('viewBox="0 0 ', 1)[1].split('"', 1)[0].split()[1])
        parts.append(svg.replace("<svg ", f'<svg y="{height}" width="{WIDTH}" height="{own}" ', 1))
        height += own + LEGEND_LINE
    whole = (
        f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" xmlns="http://www.w3.org/2000/svg">\n'
        f'<style>{LIGHT}{PLOT_STYLE}</style>\n<rect width="100%" height="100%" fill="#fff"/>\n'
    )
    try:
        path.write_text(whole + "\n".join(parts) + "\n</svg>\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write the plot {str(path)!r}: {error.strerror}") from error


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
    slant = max((len(label) for label in plot.labels), default=0) * 7 > (WIDTH - LEFT_MARGIN - RIGHT_MARGIN) / max(
        1, len(plot.labels)
    )
    room = min(150, 18 + 4 * max((len(label) for label in plot.labels), default=0)) if slant else 24
    colours = _colours(names, plot.order)
    drawing = _Drawing(plot.title, colours, room)
    drawing.y_axis(marks, plot.unit)
    if plot.mark is not None:
        drawing.rule(plot.mark)
    if not values:
        drawing.nothing()
    group = drawing.inner / max(1, len(plot.labels))
    width = min(46.0, group * 0.82 / max(1, len(names)))
    for i, label in enumerate(plot.labels):
        middle = LEFT_MARGIN + group * (i + 0.5)
        there = [(name, value) for name in names if (value := plot.series[name][i]) is not None]
        for j, (name, value) in enumerate(there):
            x = middle + (j - len(there) / 2) * width
            top = drawing.y(value)
            colour = colours[name]
            tip = f"{label}, {name}: {value:.2f}{plot.unit}"
            drawing.add(
                f'<rect x="{x + 1:.1f}" y="{top:.1f}" width="{max(1.0, width - 2):.1f}" '
                f'height="{drawing.bottom - top:.1f}" fill="{colour}"><title>{escape(tip)}</title></rect>'
            )
            if many <= 30:
                drawing.text(x + width / 2, top - 4, f"{value:.2f}", "middle", 10)
        drawing.label(middle, label, slant)
    return drawing.svg()


def _curves(plot: Curves) -> str:
    points = [p for series in plot.series.values() for p in series]
    xs, ys = [p[0] for p in points] or [0.0], [p[1] for p in points] or [0.0]
    colours = _colours(list(plot.series), plot.order)
    drawing = _Drawing(plot.title, colours, 44, dashed=plot.paper)
    drawing.y_axis(ticks(0.0, max(ys)), "")
    scale = math.log if plot.log and min(xs) > 0 else float
    start, end = scale(min(xs)), scale(max(xs))
    if start == end:  # one point stands in the middle
        start, end = start - 0.5, end + 0.5
    if not points:
        drawing.nothing()

    def x_of(value: float) -> float:
        return LEFT_MARGIN + 14 + (drawing.inner - 28) * (scale(value) - start) / (end - start)

    shown = -math.inf
    for value in sorted({p[0] for p in points}):
        if x_of(value) - shown > 22:  # else their numbers would touch
            shown = x_of(value)
            drawing.text(shown, drawing.bottom + 16, f"{value:g}", "middle")
            drawing.add(
                f'<line x1="{shown:.1f}" x2="{shown:.1f}" y1="{drawing.bottom}" '
                f'y2="{drawing.bottom + 4}" class="axis"/>'
            )
    drawing.text(LEFT_MARGIN + drawing.inner / 2, drawing.bottom + 36, plot.x, "middle")
    drawing.text(LEFT_MARGIN - 40, TOP_MARGIN - 12, plot.y, "start")
    for name, series in plot.series.items():
        ordered, colour = sorted(series), colours[name]
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


def _colours(names: Sequence[str], order: Sequence[str] = ()) -> dict[str, str]:
    """One for each, by its place in `order` or here; a name that goes on after a comma has the colour of the name
    before it."""
    every = dict.fromkeys((*order, *names))
    found: dict[str, str] = {}
    for name in every:
        first = name.partition(",")[0]
        kin = found.get(first) if first in every else None
        found[name] = kin or COLOURS[len(set(found.values())) % len(COLOURS)]
    return {name: found[name] for name in names}


class _Drawing:
    """A plot's frame: title, legend below, and the way from values to pixels."""

    def __init__(self, title: str, colours: Mapping[str, str], room: int, dashed: Sequence[str] = ()) -> None:
        self.inner = WIDTH - LEFT_MARGIN - RIGHT_MARGIN
        self.bottom = TOP_MARGIN + PLOT_HEIGHT
        self._parts: list[str] = []
        self._title = title
        self._range = (0.0, 1.0)
        self._end = self._legend(colours, self.bottom + room + LEGEND_LINE, dashed)

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
        room = int((x + OVERHANG) / SLANTED_LETTER)
        shown = text if len(text) <= room else text[: room - 1] + "…"
        self.add(
            f'<text x="{x:.1f}" y="{y}" text-anchor="end" font-size="11" transform="rotate(-35 {x:.1f} {y})">'
            f"{escape(shown)}<title>{escape(text)}</title></text>"
        )

    def nothing(self) -> None:
        """In place of what is not there yet: an empty frame would look like a mistake."""
        self.text(LEFT_MARGIN + self.inner / 2, TOP_MARGIN + PLOT_HEIGHT / 2, "nothing measured yet", "middle")

    def y_axis(self, marks: Sequence[float], unit: str) -> None:
        self._range = marks[0], marks[-1]
        for mark in marks:
            y = self.y(mark)
            self.add(f'<line x1="{LEFT_MARGIN}" x2="{WIDTH - RIGHT_MARGIN}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
            self.text(LEFT_MARGIN - 8, y + 4, f"{mark:g}{unit}", "end")

    def y(self, value: float) -> float:
        low, high = self._range
        return self.bottom - PLOT_HEIGHT * (value - low) / (high - low)

    def rule(self, value: float) -> None:
        y = self.y(value)
        self.add(f'<line x1="{LEFT_MARGIN}" x2="{WIDTH - RIGHT_MARGIN}" y1="{y:.1f}" y2="{y:.1f}" class="rule"/>')

    def _legend(self, colours: Mapping[str, str], y: int, dashed: Sequence[str]) -> int:
        """As many lines as the names need; returns where it ends."""
        if len(colours) < 2:
            return y - LEGEND_LINE + 6
        x = float(LEFT_MARGIN)
        for name, colour in colours.items():
            width = 28 + 7.2 * len(name)
            if x > LEFT_MARGIN and x + width > WIDTH - RIGHT_MARGIN:
                x, y = float(LEFT_MARGIN), y + LEGEND_LINE
            dash = ' stroke-dasharray="4 2"' if name in dashed else ""
            self.add(
                f'<line x1="{x:.1f}" x2="{x + 14:.1f}" y1="{y - 4}" y2="{y - 4}" '
                f'stroke="{colour}" stroke-width="6"{dash}/>'
            )
            self.text(x + 20, y, name)
            x += width
        return y + 10

    def svg(self) -> str:
        title = f'<text x="{LEFT_MARGIN}" y="16" font-size="13" font-weight="600">{escape(self._title)}</text>'
        body = "".join(self._parts)
        return (
            f'<svg viewBox="0 0 {WIDTH} {self._end}" role="img" aria-label="{escape(self._title)}" '
            f'xmlns="http://www.w3.org/2000/svg">{title}{body}</svg>'
        )
