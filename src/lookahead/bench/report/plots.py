"""Bars and curves, drawn by matplotlib as SVG. Without matplotlib a report has no plots, and says so."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WIDTH, HEIGHT = 8.0, 3.8
"""Inches of a plot."""
MOST_VALUES = 30
"""Bars that have room for their value above them."""
SVG: Any = {"svg.fonttype": "none", "svg.hashsalt": "lookahead", "axes.grid.axis": "y", "axes.grid": True}
"""Text stays text, and the same plot is the same file."""
MISSING = "No plots: they need matplotlib, `pip install 'lookahead-decoding[bench]'`."
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Bars:
    """One group of bars per label, one bar per series; None is no bar. `mark` is a line to compare with."""

    title: str
    labels: Sequence[str]
    series: dict[str, Sequence[float | None]]
    unit: str = ""
    mark: float | None = None


@dataclass(frozen=True)
class Curves:
    """Lines through points; a name in `paper` is drawn dashed. `log` scales the x axis."""

    title: str
    x: str
    y: str
    series: dict[str, Points]
    paper: Sequence[str] = ()
    log: bool = False


def available() -> bool:
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def draw(plots: Sequence[Bars | Curves]) -> str:
    """The plots below each other, as one `<svg>` element."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(SVG):
        figure = Figure(figsize=(WIDTH, HEIGHT * len(plots)), layout="constrained")
        for axes, plot in zip(figure.subplots(len(plots), squeeze=False).flat, plots, strict=True):
            axes.set_title(plot.title, loc="left", fontsize=10)
            axes.set_axisbelow(True)
            something = _bars(axes, plot) if isinstance(plot, Bars) else _curves(axes, plot)
            if not something:  # an empty frame would look like a mistake
                axes.text(0.5, 0.5, "nothing measured yet", ha="center", transform=axes.transAxes)
            if something and len(plot.series) > 1:
                axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
            axes.set_ylim(bottom=0)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    whole = text.getvalue()
    return whole[whole.index("<svg") :]


def write(plots: Sequence[Bars | Curves], path: Path) -> None:
    if not available():
        raise ValueError(f"cannot draw {str(path)!r}: plots need matplotlib, pip install 'lookahead-decoding[bench]'")
    try:
        path.write_text(draw(plots), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write the plot {str(path)!r}: {error.strerror}") from error


def _bars(axes: Any, plot: Bars) -> bool:
    """A group of bars for each label; whether there is any."""
    width = 0.8 / max(1, len(plot.series))
    for number, (name, values) in enumerate(plot.series.items()):
        centres = [i + (number + 0.5) * width - 0.4 for i in range(len(plot.labels))]
        drawn = axes.bar(centres, [value or 0.0 for value in values], width, label=name)
        if len(plot.labels) * len(plot.series) <= MOST_VALUES:
            axes.bar_label(drawn, ["" if value is None else f"{value:.2f}" for value in values], fontsize=7)
    if plot.mark is not None:
        axes.axhline(plot.mark, color="gray", linestyle=":")
    slanted: dict[str, Any] = {"rotation": 35, "ha": "right"} if sum(map(len, plot.labels)) > 80 else {}
    axes.set_xticks(range(len(plot.labels)), plot.labels, fontsize=8, **slanted)
    axes.yaxis.set_major_formatter(f"{{x:g}}{plot.unit}")
    return any(value is not None for values in plot.series.values() for value in values)


def _curves(axes: Any, plot: Curves) -> bool:
    """A line for each series; whether there is any. `N = 5, law` has the colour of `N = 5`."""
    colours: dict[str, str] = {}
    for name, points in plot.series.items():
        kin = name.partition(",")[0]
        colour = colours.setdefault(kin if kin in plot.series else name, f"C{len(colours)}")
        xs, ys = zip(*sorted(points), strict=True) if points else ((), ())
        axes.plot(xs, ys, "o--" if name in plot.paper else "o-", color=colour, label=name, markersize=4)
    ticks = sorted({x for points in plot.series.values() for x, _ in points})
    if plot.log and ticks and ticks[0] > 0:
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks], minor=False)
    axes.set_xlabel(plot.x)
    axes.set_ylabel(plot.y)
    return bool(ticks)
