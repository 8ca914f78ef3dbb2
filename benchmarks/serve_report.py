"""The table and the plot of `serve_load.py`'s figures. Only the plot needs matplotlib."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HTTP = (
    " HTTP costs: a server with a few clients more than places, so that all places are always taken, against the same "
    "requests handed to the engine in the server's process."
)
Records = Sequence[dict[str, Any]]
PLAIN, OURS = "plain", "lookahead"
COLORS = {PLAIN: "#888888", OURS: "#1f77b4"}


def median(records: Records, kind: str, load: float, way: str, what: str, part: int | None = None) -> float | None:
    """The median of one figure over all runs of a cell; None if it was not measured."""
    name = "rate" if kind == "open" else "streams"
    found = [one for one in records if one["kind"] == kind and one["way"] == way and one.get(name) == load]
    values = [one[what] if part is None else one[what][part] for one in found if what in one]
    return statistics.median(values) if values else None


def loads(records: Records, kind: str) -> list[float]:
    return sorted({one["rate" if kind == "open" else "streams"] for one in records if one["kind"] == kind})


def table(records: Records) -> str:
    """One line per load. Times in ms, p50 / p99; what HTTP costs against the engine alone, where that was measured."""
    costs = ["HTTP costs plain", "HTTP costs lookahead"] if loads(records, "full") else []
    names = ["load", "plain tok/s", "lookahead tok/s", "ratio", "S", "TTFT plain", "TTFT lookahead", "gap plain"]
    names += ["gap lookahead", *costs]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    measured = [(kind, load) for kind in ("closed", "open") for load in loads(records, kind)]
    for kind, load in measured or [("engine", load) for load in loads(records, "engine")]:
        plain, ours = (median(records, kind, load, way, "tokens_per_second") for way in (PLAIN, OURS))
        cells = [f"{load:g} a second" if kind == "open" else f"{load:g} streams", number(plain), number(ours)]
        cells.append(f"{ours / plain:.2f}" if plain and ours else "")
        cells.append(number(median(records, kind, load, OURS, "compression"), 2))
        for what in ("ttft_ms", "gap_ms"):
            for way in (PLAIN, OURS):
                cells.append(" / ".join(number(median(records, kind, load, way, what, part)) for part in (0, 1)))
        for way in (PLAIN, OURS) if costs else ():
            rate, bare = (median(records, which, load, way, "tokens_per_second") for which in ("full", "engine"))
            cells.append(f"{100 * (1 - rate / bare):.1f}%" if kind == "closed" and bare and rate else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def repeated(records: Records) -> str:
    """What is known of prompts that came back, and of captures."""
    closed = [one for one in records if one["kind"] == "closed"]
    if not all("again" in one for one in closed):
        return "The prompts come back, so the prefix cache and the memory of the guesses are warm."
    again, replies = (sum(one[what] for one in closed) for what in ("again", "replies"))
    times = (
        "No prompt was asked twice" if not again else f"Of {replies} requests {again} had a prompt of an earlier one"
    )
    captures = sum(one["captures"] for one in closed)
    return f"{times}. Nothing was warmed up; {captures} steps were captured after the server was ready."


def number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def page(found: dict[str, Any], picture: str | None) -> str:
    """The page of a run: on what it was measured, the table, and what the cross-talk test found."""
    about, records = found["about"], found["records"]
    lines = [
        "# `lookahead serve` under load",
        "",
        f"{about['model']}, {about['dtype']}, on {about['device'].split(': ')[-1]} ({about['backend']}); "
        f"{about['cores']} CPU cores, Python {about['python']}, torch {about['torch']}. Written by "
        "`python benchmarks/serve_load.py`.",
        "",
        f"Clients in a process of their own stream greedy answers of {found['tokens']} tokens from one server, each "
        "asking again when its answer has ended. With guesses and without take turns, by the body's `lookahead`. "
        f"{repeated(records)} Tokens per second are those of a run's last three quarters; all else is counted from the "
        "beginning, when all clients come at once. TTFT (the time to the first token) and gap (the time between two "
        "events of a stream) in ms, p50 / p99." + (HTTP if loads(records, "full") else ""),
        "",
        table(records),
    ]
    if picture:
        lines += [f"![Tokens per second, time to the first token and gaps by the number of streams]({picture})", ""]
    for one in found.get("crosstalk", ()):
        lines += [
            f"Cross-talk: {one['requests']} mixed requests at once (greedy and sampled, stops, penalties, streams, "
            f"clients that leave), in {one['pages']} pages of K/V: {one['equal']} replies equal those of the same "
            f"request alone; {one['preemptions']} times a sequence made room for another, {one['hit_tokens']} prompt "
            f"tokens came from the prefix cache. The largest difference of a log-probability is {one['apart']:.3g}.",
            "",
        ]
    return "\n".join(lines)


def plot(records: Records, path: Path) -> bool:
    """Three panels over the number of streams. False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    panels = figure.subplots(1, 3)
    for axes, (what, title) in zip(
        panels,
        (("tokens_per_second", "tokens per second"), ("ttft_ms", "time to first token, ms"), ("gap_ms", "gap, ms")),
        strict=True,
    ):
        for way in (PLAIN, OURS):
            for part, style in ((None, "-"),) if what == "tokens_per_second" else ((0, "-"), (1, ":")):
                points = [(load, median(records, "closed", load, way, what, part)) for load in loads(records, "closed")]
                label = way if part is None else f"{way} p{(50, 99)[part]}"
                shown = [(load, value) for load, value in points if value is not None]
                axes.plot(*zip(*shown, strict=True), style, marker="o", color=COLORS[way], label=label)
        axes.set(title=title, xlabel="streams", xscale="log")
        axes.set_xticks(loads(records, "closed"), [f"{load:g}" for load in loads(records, "closed")])
        axes.set_ylim(bottom=0)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    return True


def report(source: Path, target: Path) -> str:
    """Write the page, and its plot beside it, from a run's JSON. Returns the page."""
    found = json.loads(source.read_text(encoding="utf-8"))
    target.parent.mkdir(parents=True, exist_ok=True)
    picture = target.with_suffix(".png")
    drawn = bool(loads(found["records"], "closed")) and plot(found["records"], picture)
    text = page(found, picture.name if drawn else None)
    target.write_text(text, encoding="utf-8")
    return text
