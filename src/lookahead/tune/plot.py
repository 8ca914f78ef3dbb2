"""The predictions as a plot: bars of text for a terminal, or an SVG file by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lookahead.tune.predict import Prediction
from lookahead.tune.scaling_law import candidates
from lookahead.tune.tuner import Result

WIDTH = 40
INK, GREY, BLUE, ORANGE = "#1f2733", "#8a94a3", "#2563c9", "#b85c00"


def bars(predictions: Sequence[Prediction], width: int = WIDTH) -> str:
    """One bar per candidate, as long as its speedup; `|` marks plain decoding's speed."""
    most = max(1.0, *(p.speedup for p in predictions))
    names = max(len(p.candidate.name) for p in predictions)
    one = round(width / most)
    lines = []
    for p in predictions:
        length = max(1, round(width * p.speedup / most))
        bar = "".join("|" if i + 1 == one else "#" if i < length else " " for i in range(max(length, one)))
        lines.append(f"{p.candidate.name:<{names}}  {bar:<{width}}  {p.speedup:.2f}x")
    return "\n".join(lines) + "\n"


def svg(result: Result, path: Path) -> None:
    """Left: every candidate's speedup. Right: S of the paper's method over W, as measured and by the fitted law."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    shown = list(reversed(result.predictions))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 0.26 * len(shown) + 1.6), layout="constrained")
    _speedups(left, result, shown)
    _law(right, result)
    figure.suptitle(f"{result.model} on {result.facts['device']}, {result.facts['dtype']}")
    try:
        figure.savefig(path, format="svg", metadata={"Date": None})
    except OSError as error:
        raise ValueError(f"cannot write the plot {str(path)!r}: {error.strerror}") from error
    finally:
        pyplot.close(figure)


def _speedups(axes: Any, result: Result, shown: Sequence[Prediction]) -> None:
    places = range(len(shown))
    colours = [ORANGE if p is result.best else BLUE if p.basis == "measured" else GREY for p in shown]
    axes.barh(places, [p.speedup for p in shown], color=colours)
    axes.set_yticks(places, [p.candidate.name for p in shown], fontsize=8)
    axes.axvline(1.0, color=INK, linewidth=0.8)
    axes.set_xlabel("speedup (orange: best, blue: S measured, grey: by law)")


def _law(axes: Any, result: Result) -> None:
    """As the paper's Figure 4: one curve per N."""
    law, points = result.laws.paper, result.laws.points
    widths = [2 * 1.15**i for i in range(21)]
    for ngram, colour in zip(
        sorted({3, 5, 7, *(p.ngram for p in points)}), ("#0f7f8c", BLUE, ORANGE, INK), strict=False
    ):
        axes.plot(widths, [law.compression(ngram - 1, w) for w in widths], color=colour, label=f"law, N={ngram}")
        here = [p for p in points if p.ngram == ngram]
        axes.scatter([candidates(p.window, p.guesses) for p in here], [p.compression for p in here], color=colour)
    axes.set_xscale("log", base=2)
    axes.set_xlabel(f"W = G (dots: measured; law: alpha={law.alpha:.3f}, f={law.f:.2f})")
    axes.set_ylabel("S")
    axes.legend()
