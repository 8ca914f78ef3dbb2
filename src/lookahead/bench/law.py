"""Figure 4: S as measured over (W, N, G = W), the paper's formula with its numbers, and a fit where there is one."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from lookahead.bench.context import Context
from lookahead.bench.sections import Curves, Points, Section
from lookahead.bench.summary import Line

ALPHA, F = 0.425, 3.106
"""The paper's figure 4 (b)."""


def formula(alpha: float, f: float, guesses: int, depth: int) -> float:
    """S = (f - 1 + E) / f with E = (gamma + 1) - sum over i of (1 - alpha^i)^b: the paper's equations 2 and 4."""
    expected = depth + 1 - sum((1 - alpha**i) ** guesses for i in range(1, depth + 1))
    return (f - 1 + expected) / f


def show(run: Context) -> list[Section]:
    made = []
    for data in dict.fromkeys(line.data for line in run.lines):
        lines = [line for line in run.lines if line.data == data and line.steps and line.method.config is not None]
        made.append(_section(data, lines))
    return made


def _section(data: str, lines: list[Line]) -> Section:
    fitted = fit(lines)
    head = ("N", "W = G", "S measured", f"formula, alpha = {ALPHA}, f = {F}")
    section = Section(f"S over (W, N) on {data}", (*head, "fitted") if fitted else head)
    curves: dict[str, list[tuple[float, float]]] = {}
    for line in lines:
        config = line.method.config
        assert config is not None
        law = formula(ALPHA, F, config.guesses, config.ngram - 1)
        shown = [str(config.ngram), str(config.window), f"{line.compression:.2f}", f"{law:.2f}"]
        pairs = {f"N = {config.ngram}": line.compression, f"N = {config.ngram}, paper's formula": law}
        if fitted:
            predicted = fitted.predict(config.window, config.ngram, config.guesses)
            shown.append(f"{predicted:.2f}")
        section.rows.append(shown)
        for name, value in pairs.items():
            curves.setdefault(name, []).append((float(config.window), value))
    dashed = [name for name in curves if "formula" in name]
    series: dict[str, Points] = dict(curves)
    section.plots.append(Curves(f"{data}: S against W", "W = G (log)", "S", series, dashed, log=True))
    section.notes.append(
        "The law: S grows by a constant for every doubling of W, as long as N is large enough. The dashed curves have "
        "the paper's alpha and f, of LLaMA-2-7B-Chat on MT-Bench."
    )
    if fitted:
        section.notes.append(f"Fitted to the measured S: alpha = {fitted.alpha:.3f}, f = {fitted.f:.3f}.")
    return section


def fit(lines: list[Line]) -> Any:
    """The fit of `lookahead.tune.scaling_law`; None where there is none, or too little to fit."""
    try:
        law = import_module("lookahead.tune.scaling_law")
    except ImportError:
        return None
    points = []
    for line in lines:
        config = line.method.config
        assert config is not None
        points.append(law.Point(config.window, config.ngram, config.guesses, line.compression))
    try:
        found: Any = law.fit(points)
    except ValueError:
        return None
    return found
