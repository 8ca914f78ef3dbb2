"""Charts of a report, drawn on a canvas: shares as bars, counts side by side, and lines over a number of streams."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from lookahead.bench.report.canvas import BLUE, FAINT, GREEN, GREY, INK, LINE, ORANGE, PURPLE, RED, TEAL, Canvas

COLOURS = (BLUE, ORANGE, GREEN, PURPLE, TEAL, RED, GREY, INK)
Values = Mapping[str, float]


def colours_of(names: Sequence[str]) -> dict[str, str]:
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}


def legend(canvas: Canvas, x: int, y: int, colours: Mapping[str, str], pitch: int = 0) -> None:
    """A row of coloured squares with names; as far apart as the names are long, or `pitch`."""
    for name, colour in colours.items():
        canvas.box(x, y - 10, 12, 12, colour, radius=2)
        canvas.text(x + 18, y, name, size=12)
        x += pitch or 40 + 7 * len(name)


def stacked(
    canvas: Canvas,
    x: int,
    y: int,
    width: int,
    rows: Mapping[str, Values],
    colours: Mapping[str, str],
    most: float | None = None,
    unit: str = "",
) -> int:
    """A horizontal bar for each row, made of its parts; `most` is the value of a full width. Returns the next y."""
    full = most or max((sum(values.values()) for values in rows.values()), default=0.0) or 1.0
    for label, values in rows.items():
        canvas.text(x, y + 15, label, size=13)
        left, total = x + 90, sum(values.values())
        for name, value in values.items():
            wide = round((width - 150) * value / full)
            if wide > 0:
                canvas.box(left, y, wide, 20, colours[name], radius=0)
                left += wide
        canvas.text(left + 6, y + 15, f"{figure(total)}{unit}", size=12, fill=FAINT)
        y += 28
    return y


def columns(
    canvas: Canvas,
    x: int,
    y: int,
    width: int,
    height: int,
    labels: Sequence[str],
    series: Mapping[str, Sequence[float]],
    colours: Mapping[str, str],
) -> int:
    """Vertical bars: a group for each label, a bar for each series. Returns the next y."""
    most = max((value for values in series.values() for value in values), default=0.0) or 1.0
    group = width // max(1, len(labels))
    wide = max(2, (group - 8) // max(1, len(series)))
    base = y + height
    for i, label in enumerate(labels):
        for j, (name, values) in enumerate(series.items()):
            tall = round((height - 16) * values[i] / most)
            if tall > 0:
                canvas.box(x + group * i + wide * j, base - tall, wide - 1, tall, colours[name], radius=0)
        canvas.text(x + group * i + wide * len(series) // 2, base + 16, label, size=11, anchor="middle")
    canvas.path([(x, base), (x + group * len(labels), base)], LINE, 1)
    return base + 34


def lines(
    canvas: Canvas,
    x: int,
    y: int,
    width: int,
    height: int,
    labels: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    colours: Mapping[str, str],
) -> int:
    """A line for each series over equally spaced labels, from 0 up. None: no point there. Returns the next y."""
    found = [value for values in series.values() for value in values if value is not None]
    top = nice(max(found, default=1.0))
    left, base = x + 60, y + height
    step = (width - 80) / max(1, len(labels) - 1)
    for part in range(5):
        level = base - round(height * part / 4)
        canvas.path([(left, level), (left + width - 80, level)], LINE, 1)
        canvas.text(left - 8, level + 4, figure(top * part / 4), size=11, anchor="end", fill=FAINT)
    for i, label in enumerate(labels):
        canvas.text(left + round(step * i), base + 18, label, size=11, anchor="middle", fill=FAINT)
    for name, values in series.items():
        points = [
            (left + round(step * i), base - round(height * value / top))
            for i, value in enumerate(values)
            if value is not None
        ]
        if len(points) > 1:
            canvas.path(points, colours[name], 2)
        for px, py in points:
            canvas.box(px - 3, py - 3, 6, 6, colours[name], radius=3)
    return base + 36


def nice(value: float) -> float:
    """The next larger 1, 2, 2.5 or 5 times a power of ten."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if factor * power >= value)


def figure(value: float) -> str:
    """A number as it is worth reading: 12,430, 958, 17.9, 4.37."""
    if value and abs(value) < 10:
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return f"{value:.1f}".rstrip("0").rstrip(".") if abs(value) < 100 else f"{value:,.0f}"
