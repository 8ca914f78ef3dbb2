"""S over (W, N) with G = W: the best of them for a model size (table 4), and the scaling law (figure 4).

Table 4 is searched for rather than copied: S is measured on real text for every (W, N). S does not depend on the
machine, so with the t(K) of another one (`--step-cost`) the best there can be projected: time per token = t(K) / S.
"""

from __future__ import annotations

from lookahead.algorithm.cost import CostCurve
from lookahead.bench.report.plots import Curves, Points
from lookahead.bench.report.sections import Section, by_data, comparison, times
from lookahead.bench.run import costs
from lookahead.bench.run.summary import BenchRun, Line
from lookahead.loading.timing import WIDE_SIZES
from lookahead.tune.candidates import at
from lookahead.tune.scaling_law import PAPER, Point, ScalingLaw, fit


def measure(run: BenchRun) -> None:
    costs.measured(run)


def projected(line: Line, cost: CostCurve) -> float:
    """Speedup over one token per step, from S and t(K) alone."""
    return cost.table(1)[0] * line.compression / at(cost.table(WIDE_SIZES[-1]), line.stats.tokens_per_step)


def show(run: BenchRun) -> list[Section]:
    grid = [line for line in run.lines if line.method.config is not None and line.stats.steps]
    section = Section("Table 4: the best of the grid", ("set", "W", "N", "S", "K", "speedup", "by"))
    for data, lines in by_data(grid).items():
        timed = [line for line in lines if line.gain]
        if timed:
            best = max(timed, key=lambda line: line.gain or 0.0)
            section.rows.append([data, *_cells(best, best.gain), "measured"])
        if (cost := costs.known(run)) is not None:
            best, speedup = max(((line, projected(line, cost)) for line in lines), key=lambda pair: pair[1])
            section.rows.append([data, *_cells(best, speedup), "t(K) / S"])
        series: dict[str, Points] = {}
        for line in lines:
            window, ngram = _shape(line)
            series[f"N = {ngram}"] = [*series.get(f"N = {ngram}", ()), (float(window), line.compression)]
        section.plots.append(Curves(f"{data}: S over the grid", "W", "S", series))
    section.notes.append(
        "speedup: over our own autoregressive decoding, if it was run. Rows by t(K) / S are projections: S measured on "
        "this model, the time of a step measured here or read from --step-cost. "
        "The paper's (W, N): 7B (15, 5), 13B (10, 5), 34B (7, 5) on an A100."
    )
    return [section, comparison(run.lines, "The grid")]


def _shape(line: Line) -> tuple[int, int]:
    config = line.method.config
    assert config is not None
    return config.window, config.ngram


def _cells(line: Line, speedup: float | None) -> list[str]:
    return [*map(str, _shape(line)), f"{line.compression:.2f}", f"{line.stats.tokens_per_step:.0f}", times(speedup)]


def show_law(run: BenchRun) -> list[Section]:
    """Figure 4: S as measured, beside the paper's law with its numbers and with those that fit here."""
    made = []
    for data, lines in by_data(run.lines).items():
        configs = [(line.method.config, line.compression) for line in lines if line.stats.steps]
        made.append(_law(data, [Point(c.window, c.ngram, c.guesses, s) for c, s in configs if c is not None]))
    return made


def _law(data: str, points: list[Point]) -> Section:
    fitted = fit(points)
    paper = f"law, paper's alpha = {PAPER.alpha}, f = {PAPER.f}"
    section = Section(f"S over (W, N) on {data}", ("N", "W = G", "S measured", paper, "law, fitted"))
    for p in points:
        laws = [law.predict(p.window, p.ngram, p.guesses) for law in (PAPER, fitted)]
        section.rows.append([str(p.ngram), str(p.window), f"{p.compression:.2f}", *(f"{s:.2f}" for s in laws)])
    section.plots += [
        _law_plot(f"{data}: S against W, and the law with the paper's numbers", "paper's law", points, PAPER),
        _law_plot(f"{data}: S against W, and the law as fitted", "fitted law", points, fitted),
    ]
    section.notes = [
        "The law: S grows by a constant for every doubling of W, as long as N is large enough. The paper's alpha and f "
        "are those of LLaMA-2-7B-Chat on MT-Bench.",
        f"Fitted to the S measured here: alpha = {fitted.alpha:.3f}, f = {fitted.f:.3f}. A point of few steps (few "
        "prompts, short answers) is rough, and so is the fit."
        if points
        else "Nothing was measured yet: run the same command again.",
    ]
    return section


def _law_plot(title: str, name: str, points: list[Point], law: ScalingLaw) -> Curves:
    """A curve of each N as measured, and dashed as the law has it."""
    measured: dict[str, Points] = {}
    expected: dict[str, Points] = {}
    for ngram in dict.fromkeys(p.ngram for p in points):
        here = [p for p in points if p.ngram == ngram]
        measured[f"N = {ngram}"] = [(p.window, p.compression) for p in here]
        expected[f"N = {ngram}, {name}"] = [(p.window, law.predict(p.window, ngram, p.guesses)) for p in here]
    return Curves(title, "W = G (log)", "S", {**measured, **expected}, list(expected), log=True)
