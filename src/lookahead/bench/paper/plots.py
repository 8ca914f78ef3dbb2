"""The paper's figures, and its tables as bars, from a run's lines: one canvas for each preset that has one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from lookahead.bench.paper.presets import OURS, PAPER, TABLE_2, TABLE_3
from lookahead.bench.report.canvas import Canvas
from lookahead.bench.report.charts import colours_of, columns, legend
from lookahead.bench.report.charts import lines as draw_lines
from lookahead.bench.run.summary import BenchRun, Line
from lookahead.tune.scaling_law import Point, fit

WIDTH, HEIGHT = 860, 330
Series = dict[str, list[float | None]]
BASELINES = ("hf-greedy", "autoregressive")


def plot(name: str, run: BenchRun, title: str) -> str | None:
    """The preset's figure as SVG; None where it has none, or nothing was measured."""
    lines = [line for line in run.lines if line.prompts]
    return PLOTS[name](lines, title) if lines and name in PLOTS else None


def bars(title: str, about: str, labels: Sequence[str], series: Mapping[str, Sequence[float | None]]) -> str:
    canvas, colours = _begun(title, about, series)
    columns(
        canvas, 24, 76, WIDTH - 48, HEIGHT - 120, labels, {k: [x or 0.0 for x in v] for k, v in series.items()}, colours
    )
    return canvas.done()


def curves(title: str, about: str, labels: Sequence[str], series: Mapping[str, Sequence[float | None]]) -> str:
    canvas, colours = _begun(title, about, series)
    draw_lines(canvas, 24, 80, WIDTH - 48, HEIGHT - 126, labels, series, colours)
    return canvas.done()


def _begun(title: str, about: str, series: Mapping[str, object]) -> tuple[Canvas, dict[str, str]]:
    canvas, colours = Canvas(WIDTH, HEIGHT, title, about), colours_of(list(series))
    canvas.text(24, 30, title, bold=True)
    legend(canvas, 24, 54, colours)
    return canvas, colours


def ablation(lines: Sequence[Line], title: str) -> str:
    """Table 3: speedups, ours over our own autoregressive decoding and the paper's over its own."""
    rows = [(line, TABLE_3[line.method]) for line in lines if line.method in TABLE_3 and line.method.how == "lookahead"]
    labels = [line.method.label.replace(" + prompt", "+p") for line, _ in rows]
    theirs: list[float | None] = [float(reported.partition("x")[0]) for _, reported in rows]
    series = {"ours, over AR": [line.own.speedup for line, _ in rows], "the paper's": theirs}
    return bars(title, "speedup by (N,W,G); +p: prompt as reference", labels, series)


def by_set(wanted: Sequence[str], about: str) -> Callable[[Sequence[Line], str], str]:
    """Tokens per second by set, a bar for each of these methods that was run."""

    def made(lines: Sequence[Line], title: str) -> str:
        found = {(line.data, line.method.label): line.stats.tokens_per_second for line in lines}
        sets = list(dict.fromkeys(line.data for line in lines))
        labels = [label for label in wanted if any((data, label) in found for data in sets)]
        return bars(title, about, sets, {label: [found.get((data, label)) for data in sets] for label in labels})

    return made


def sampling(lines: Sequence[Line], title: str) -> str:
    """Table 2: speedups by set and temperature."""
    rows = [line for line in lines if line.method == PAPER]
    theirs: list[float | None] = []
    for line in rows:
        reported = TABLE_2.get((line.data, PAPER.label, line.temperature))
        theirs.append(None if reported is None else float(reported.partition("x")[0]))
    ours = {(line.data, line.temperature): line.own.speedup for line in lines if line.method == OURS}
    series = {
        f"{PAPER.label}, over AR": [line.own.speedup for line in rows],
        "lookahead, over AR": [ours.get((line.data, line.temperature)) for line in rows],
        "the paper's": theirs,
    }
    return bars(title, "speedup by temperature", [f"{line.data}, T = {line.temperature:g}" for line in rows], series)


def by_window(lines: Sequence[Line], title: str) -> str:
    """Table 4: the speedup over W, a line for each N."""
    cells = {(c.ngram, c.window): line.gain for line in lines if (c := line.method.config) is not None}
    windows = sorted({window for _, window in cells})
    series = {f"N = {n}": [cells.get((n, w)) for w in windows] for n in sorted({n for n, _ in cells})}
    return curves(title, "speedup over W = G", [f"W = {window}" for window in windows], series)


def overhead(lines: Sequence[Line], title: str) -> str:
    """Figure 8: S and the speedup over W."""
    rows = [line for line in lines if line.method.config is not None]
    labels = [f"W = {line.method.config.window}" for line in rows if line.method.config is not None]
    series: Series = {"S": [line.compression for line in rows], "speedup over AR": [line.own.speedup for line in rows]}
    return curves(title, "S and speedup over W = G, N = 5", labels, series)


def law(lines: Sequence[Line], title: str) -> str:
    """Figure 4: S over W, as measured and by the fitted law."""
    found = [(c, line.compression) for line in lines if (c := line.method.config) is not None]
    fitted = fit([Point(c.window, c.ngram, c.guesses, s) for c, s in found])
    cells = {(c.ngram, c.window): s for c, s in found}
    windows = sorted({window for _, window in cells})
    series: Series = {}
    for n in sorted({n for n, _ in cells}):
        series[f"N = {n}"] = [cells.get((n, w)) for w in windows]
        series[f"N = {n}, law"] = [fitted.predict(w, n, w) for w in windows]
    return curves(title, "S over W = G", [f"W = {window}" for window in windows], series)


KERNEL = tuple(
    f"{name}, {kernel}" for name in ("autoregressive", PAPER.label, "lookahead") for kernel in ("no kernel", "kernel")
)
PLOTS: dict[str, Callable[[Sequence[Line], str], str]] = {
    "scaling-law": law,
    "end-to-end": by_set((*BASELINES, PAPER.label, OURS.label), "tokens per second by set"),
    "flash": by_set(("hf-greedy", *KERNEL), "tokens per second by set, without and with the kernel"),
    "sampling": sampling,
    "ablation": ablation,
    "configs": by_window,
    "overhead": overhead,
}
