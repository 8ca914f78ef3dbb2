"""Table 4: the (W, N) that pays best for a model size, searched for rather than copied.

S is measured on real text for every (W, N) of the grid, G = W. A shape-inflated model computes the same function, so
its S is the same and only t(K) has to be measured for it: time per token = t(K) / S.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lookahead.bench import costs
from lookahead.bench.context import Context
from lookahead.bench.sections import Curves, Points, Section, comparison, times
from lookahead.bench.summary import Line

if TYPE_CHECKING:
    from lookahead.loading.step_cost import StepCost

TABLE_4 = {"7b": (15, 5), "13b": (10, 5), "34b": (7, 5)}
"""(W, N) with G = W on an A100."""


def measure(run: Context) -> None:
    for shape in (costs.OWN, *run.shapes):
        costs.measured(run, shape)


def projected(line: Line, cost: StepCost) -> float:
    """Speedup over one token per step, from S and t(K) alone."""
    size = line.tokens_per_step
    table = cost.table(int(size) + 2)
    below = int(size)
    step = table[below - 1] + (size - below) * (table[below] - table[below - 1])
    return table[0] * line.compression / step


def show(run: Context) -> list[Section]:
    grid = [line for line in run.lines if line.method.config is not None and line.steps]
    section = Section("Table 4: the best of the grid", ("model", "W", "N", "S", "K", "speedup", "by", "paper's (W, N)"))
    plots: list[Curves] = []
    for data in dict.fromkeys(line.data for line in grid):
        lines = [line for line in grid if line.data == data]
        timed = [line for line in lines if line.gain]
        if timed:
            best = max(timed, key=lambda line: line.gain or 0.0)
            section.rows.append(_row(f"this one, {data}", best, best.gain, "measured", "-"))
        for shape in (costs.OWN, *run.shapes):
            cost = costs.known(run, shape)
            if cost is None:
                continue
            best = max(lines, key=lambda line: projected(line, cost))
            name = f"this one, {data}" if shape == costs.OWN else f"{shape} shape, {data}"
            said = "{}, {}".format(*TABLE_4[shape]) if shape in TABLE_4 else "-"
            section.rows.append(_row(name, best, projected(best, cost), "t(K) / S", said))
        plots.append(Curves(f"{data}: S over the grid", "W", "S", _curves(lines)))
    section.plots = list(plots)
    section.notes.append(
        "speedup: over our own autoregressive decoding, if it was run. Rows by t(K) / S are projections: S measured on "
        "this model, the time of a step measured for the shape. "
        "The paper: 7B (15, 5), 13B (10, 5), 34B (7, 5) on an A100; --shapes 7b,13b,34b adds those sizes here."
    )
    return [section, comparison(run.lines, "The grid")]


def _row(name: str, line: Line, speedup: float | None, how: str, paper: str) -> list[str]:
    config = line.method.config
    assert config is not None
    shown = (str(config.window), str(config.ngram), f"{line.compression:.2f}", f"{line.tokens_per_step:.0f}")
    return [name, *shown, times(speedup), how, paper]


def _curves(lines: list[Line]) -> dict[str, Points]:
    found: dict[str, list[tuple[float, float]]] = {}
    for line in lines:
        if line.method.config is not None:
            points = found.setdefault(f"N = {line.method.config.ngram}", [])
            points.append((float(line.method.config.window), line.compression))
    return dict(found)
