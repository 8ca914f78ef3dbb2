"""The plots of the GPU page. Each returns the rows it was drawn from, in words, or None without rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from gpu_parts.results import Results, show

BLUE, ORANGE, GREEN, RED, TEAL, PURPLE, GREY = (
    "#2563c9", "#b85c00", "#2b8149", "#c8323f", "#0f7f8c", "#7446bd", "#8a94a3",
)  # fmt: skip
INK, FAINT, LINE = "#1f2733", "#5a6575", "#d4dae2"
STYLE = {
    "font.family": "sans-serif", "font.sans-serif": ["Helvetica", "Arial", "DejaVu Sans"], "font.size": 11,
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": LINE, "axes.titleweight": "bold",
    "axes.titlesize": 12, "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "grid.color": LINE, "grid.linewidth": 0.7,
    "xtick.color": FAINT, "ytick.color": FAINT, "legend.frameon": False, "lines.linewidth": 2, "lines.markersize": 5,
    "svg.hashsalt": "lookahead", "figure.facecolor": "white",
}  # fmt: skip
COLOURS = {
    "transformers eager": GREY, "transformers prompt lookup": PURPLE, "transformers static + compile": TEAL,
    "autoregressive": BLUE, "paper (5,15,15) + prompt": ORANGE, "default": GREEN,
}  # fmt: skip


def step_plot(results: Results, figure: Any) -> str | None:
    rows = {r["K"]: r for r in results.all("step", "7b", invariant=results.invariant)}
    if not rows:
        return None
    axes = figure.subplots()
    for name, label, colour in (
        ("step_wall_ms", "with the host", GREY),
        ("device_ms", "device", BLUE),
        ("products_ms", "matrix products alone", GREEN),
    ):
        axes.plot(list(rows), [r[name] for r in rows.values()], "o-", color=colour, label=label)
    axes.set(title="Time of a step, 7B shape, context 1024", xlabel="K, tokens in the step", ylabel="ms")
    axes.set_ylim(bottom=0)
    axes.legend(loc="lower right")
    return f"`step` of step-7b.json, invariant {str(results.invariant).lower()}."


def speed_plot(results: Results, figure: Any) -> str | None:
    sets = ("mt-bench", "humaneval")
    found = {method: [results.speed("7b", method, data) for data in sets] for method in COLOURS}
    found = {method: rows for method, rows in found.items() if any(rows)}
    if not found:
        return None
    axes, width = figure.subplots(), 0.8 / len(found)
    for place, (method, rows) in enumerate(found.items()):
        for group, row in enumerate(rows):
            if row:
                x = group + (place - (len(found) - 1) / 2) * width
                bar = axes.bar(x, row["tok_s"], width * 0.92, color=COLOURS[method], label=None if group else method)
                axes.bar_label(bar, [show(row["tok_s"])], fontsize=9, color=FAINT, padding=2)
    axes.set_xticks(range(len(sets)), ["MT-Bench", "HumanEval"])
    axes.set_ylim(top=1.1 * axes.get_ylim()[1])
    axes.set(title="Tokens per second, 7B shape, bf16, batch 1", ylabel="tok/s")
    axes.legend(loc="upper left", fontsize=9)
    return f"tok_s of speed-7b.json, invariant {str(results.invariant).lower()}, and of baselines-7b*.json."


def context_plot(results: Results, figure: Any) -> str | None:
    rows = results.all("context", "7b")
    if not rows:
        return None
    left, right = figure.subplots(1, 2)
    for count, colour in ((1, BLUE), (128, GREEN)):
        chosen = {r["context"]: r for r in rows if r["K"] == count}
        thousands = [c / 1024 for c in chosen]
        left.plot(thousands, [r["device_ms"] for r in chosen.values()], "o-", color=colour, label=f"K = {count}")
        total = [(r["kv_mb"] + r["all_steps_mb"]) / 1e3 if "kv_mb" in r else r["kv_gb"] for r in chosen.values()]
        right.plot(thousands, total, "o-" if count == 1 else "s--", color=colour, label=f"K = {count}")
    left.set(title="Device time of a step", xlabel="context, thousands of tokens", ylabel="ms")
    right.set(title="Memory beside the weights", xlabel="context, thousands of tokens", ylabel="GB")
    for axes in (left, right):
        axes.set_ylim(bottom=0)
        axes.legend()
    whole = all("kv_mb" in r for r in rows)
    return "context-7b.json: device_ms; " + ("kv_mb + all_steps_mb." if whole else "kv_gb, the K/V buffer alone.")


def batch_plot(results: Results, figure: Any) -> str | None:
    rows = results.all("batch", "7b")
    if not rows:
        return None
    axes = figure.subplots()
    for method, colour in zip(dict.fromkeys(r["method"] for r in rows), (BLUE, GREEN, ORANGE), strict=False):
        chosen = {r["batch"]: r["tok_s"] for r in rows if r["method"] == method}
        axes.plot(list(chosen), list(chosen.values()), "o-", color=colour, label=method)
    axes.set_xscale("log", base=2)
    ticks = sorted({r["batch"] for r in rows})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set(title="Total tokens per second by batch, 7B shape", xlabel="sequences", ylabel="tok/s")
    axes.set_ylim(bottom=0)
    axes.legend()
    return "tok_s of batch-7b.json."


DRAWN: dict[str, tuple[Callable[[Results, Any], str | None], tuple[float, float]]] = {
    "gpu-step.svg": (step_plot, (6.4, 3.8)),
    "gpu-speed.svg": (speed_plot, (8.4, 4.2)),
    "gpu-context.svg": (context_plot, (8.4, 3.6)),
    "gpu-batch.svg": (batch_plot, (6.4, 3.8)),
}


def draw(results: Results, folder: Path) -> dict[str, str]:
    """The plots that have rows: file -> the rows."""
    drawn = {}
    with plt.rc_context(STYLE):
        for name, (plot, size) in DRAWN.items():
            figure = plt.figure(figsize=size, layout="constrained")
            words = plot(results, figure)
            if words:
                figure.savefig(folder / name, metadata={"Date": None})
                drawn[name] = f"From {words}"
            plt.close(figure)
    return drawn
