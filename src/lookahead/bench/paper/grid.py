"""Table 4: the (W, N) that pays best for a model size, searched for rather than copied.

S is measured on real text for every (W, N) of the grid, G = W. A shape-inflated model computes the same function, so
its S is the same and only t(K) has to be measured for it: time per token = t(K) / S.
"""

from __future__ import annotations

from lookahead.bench.report.sections import Curves, Points, Section, comparison, times
from lookahead.bench.run import costs
from lookahead.bench.run.summary import BenchRun, Line
from lookahead.loading.step_cost import StepCost
from lookahead.tune.candidates import at

TABLE_4 = {"7b": (15, 5), "13b": (10, 5), "34b": (7, 5)}
"""(W, N) with G = W on an A100."""


def measure(run: BenchRun) -> None:
    for shape in (costs.OWN, *run.shapes):
        costs.measured(run, shape)


def projected(line: Line, cost: StepCost) -> float:
    """Speedup over one token per step, from S and t(K) alone."""
    return cost.table(1)[0] * line.compression / at(cost.table(costs.COST_SIZES[-1]), line.stats.tokens_per_step)


def show(run: BenchRun) -> list[Section]:
    grid = [line for line in run.lines if line.method.config is not None and line.stats.steps]
    section = Section("Table 4: the best of the grid", ("model", "W", "N", "S", "K", "speedup", "by", "paper's (W, N)"))
    for data in dict.fromkeys(line.data for line in grid):
        lines = [line for line in grid if line.data == data]
        timed = [line for line in lines if line.gain]
        if timed:
            best = max(timed, key=lambda line: line.gain or 0.0)
            section.rows.append([f"this one, {data}", *_cells(best, best.gain), "measured", "-"])
        for shape in (costs.OWN, *run.shapes):
            cost = costs.known(run, shape)
            if cost is None:
                continue
            best = max(lines, key=lambda line: projected(line, cost))
            name = f"this one, {data}" if shape == costs.OWN else f"{shape} shape, {data}"
            said = "{}, {}".format(*TABLE_4[shape]) if shape in TABLE_4 else "-"
            section.rows.append([name, *_cells(best, projected(best, cost)), "t(K) / S", said])
        series: dict[str, Points] = {}
        for line in lines:
            window, ngram = _shape(line)
            series[f"N = {ngram}"] = [*series.get(f"N = {ngram}", ()), (float(window), line.compression)]
        section.plots.append(Curves(f"{data}: S over the grid", "W", "S", series))
    section.notes.append(
        "speedup: over our own autoregressive decoding, if it was run. Rows by t(K) / S are projections: S measured on "
        "this model, the time of a step measured for the shape. "
        "The paper: 7B (15, 5), 13B (10, 5), 34B (7, 5) on an A100; --shapes 7b,13b,34b adds those sizes here."
    )
    return [section, comparison(run.lines, "The grid")]


def _shape(line: Line) -> tuple[int, int]:
    config = line.method.config
    assert config is not None
    return config.window, config.ngram


def _cells(line: Line, speedup: float | None) -> list[str]:
    return [*map(str, _shape(line)), f"{line.compression:.2f}", f"{line.stats.tokens_per_step:.0f}", times(speedup)]
