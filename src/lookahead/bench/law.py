"""Figure 4: S as measured over (W, N, G = W), beside the paper's law with its numbers and with those that fit here."""

from __future__ import annotations

from lookahead.bench.context import Context
from lookahead.bench.sections import Curves, Points, Section
from lookahead.bench.summary import Line
from lookahead.tune.scaling_law import PAPER, Point, ScalingLaw, fit


def show(run: Context) -> list[Section]:
    made = []
    for data in dict.fromkeys(line.data for line in run.lines):
        lines = [line for line in run.lines if line.data == data and line.steps and line.method.config is not None]
        made.append(_section(data, lines))
    return made


def _section(data: str, lines: list[Line]) -> Section:
    points = [_point(line) for line in lines]
    fitted = fit(points)
    section = Section(
        f"S over (W, N) on {data}",
        ("N", "W = G", "S measured", f"law, paper's alpha = {PAPER.alpha}, f = {PAPER.f}", "law, fitted"),
    )
    for p in points:
        laws = [law.predict(p.window, p.ngram, p.guesses) for law in (PAPER, fitted)]
        section.rows.append([str(p.ngram), str(p.window), f"{p.compression:.2f}", *(f"{s:.2f}" for s in laws)])
    section.plots += [
        _plot(f"{data}: S against W, and the law with the paper's numbers", "paper's law", points, PAPER),
        _plot(f"{data}: S against W, and the law as fitted", "fitted law", points, fitted),
    ]
    section.notes.append(
        "The law: S grows by a constant for every doubling of W, as long as N is large enough. The paper's alpha and f "
        "are those of LLaMA-2-7B-Chat on MT-Bench."
    )
    section.notes.append(
        f"Fitted to the S measured here: alpha = {fitted.alpha:.3f}, f = {fitted.f:.3f}. A point of few steps (few "
        "prompts, short answers) is rough, and so is the fit."
        if points
        else "Nothing was measured yet: run the same command again."
    )
    return section


def _point(line: Line) -> Point:
    config = line.method.config
    assert config is not None
    return Point(config.window, config.ngram, config.guesses, line.compression)


def _plot(title: str, name: str, points: list[Point], law: ScalingLaw) -> Curves:
    """A curve of each N as measured, and dashed as the law has it."""
    measured: dict[str, list[tuple[float, float]]] = {}
    expected: dict[str, list[tuple[float, float]]] = {}
    for p in points:
        measured.setdefault(f"N = {p.ngram}", []).append((float(p.window), p.compression))
        said = law.predict(p.window, p.ngram, p.guesses)
        expected.setdefault(f"N = {p.ngram}, {name}", []).append((float(p.window), said))
    series: dict[str, Points] = {**measured, **expected}
    return Curves(title, "W = G (log)", "S", series, list(expected), log=True)
