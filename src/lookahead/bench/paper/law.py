"""Figure 4: S as measured over (W, N, G = W), beside the paper's law with its numbers and with those that fit here."""

from __future__ import annotations

from lookahead.bench.report.sections import Curves, Points, Section
from lookahead.bench.run.summary import BenchRun
from lookahead.tune.scaling_law import PAPER, Point, ScalingLaw, fit


def show(run: BenchRun) -> list[Section]:
    made = []
    for data in dict.fromkeys(line.data for line in run.lines):
        lines = [line for line in run.lines if line.data == data and line.stats.steps]
        configs = [(line.method.config, line.compression) for line in lines]
        made.append(_section(data, [Point(c.window, c.ngram, c.guesses, s) for c, s in configs if c is not None]))
    return made


def _section(data: str, points: list[Point]) -> Section:
    fitted = fit(points)
    paper = f"law, paper's alpha = {PAPER.alpha}, f = {PAPER.f}"
    section = Section(f"S over (W, N) on {data}", ("N", "W = G", "S measured", paper, "law, fitted"))
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


def _plot(title: str, name: str, points: list[Point], law: ScalingLaw) -> Curves:
    """A curve of each N as measured, and dashed as the law has it."""
    measured: dict[str, Points] = {}
    expected: dict[str, Points] = {}
    for ngram in dict.fromkeys(p.ngram for p in points):
        here = [p for p in points if p.ngram == ngram]
        measured[f"N = {ngram}"] = [(p.window, p.compression) for p in here]
        expected[f"N = {ngram}, {name}"] = [(p.window, law.predict(p.window, ngram, p.guesses)) for p in here]
    return Curves(title, "W = G (log)", "S", {**measured, **expected}, list(expected), log=True)
