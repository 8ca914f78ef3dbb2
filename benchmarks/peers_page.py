"""The page of `peers.py`: a table and a plot of each metric, the servers, and what serving costs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lookahead.bench.report.canvas import FAINT, Canvas
from lookahead.bench.report.charts import colours_of, legend, lines
from lookahead.bench.report.sections import Section, markdown

METRICS: dict[str, tuple[str, int | None, str]] = {
    "tokens-per-second": ("tokens_per_second", None, "Tokens per second, all streams"),
    "ttft-p50": ("ttft_ms", 0, "Time to the first token, p50, ms"),
    "ttft-p99": ("ttft_ms", 1, "Time to the first token, p99, ms"),
    "steady-ttft-p99": ("ttft_steady_ms", 1, "Time to the first token in the steady part, p99, ms"),
    "gap-p50": ("gap_ms", 0, "Time between two events of a stream, p50, ms"),
    "gap-p99": ("gap_ms", 1, "Time between two events of a stream, p99, ms"),
}
"""Field of the records, index in it, and title."""
Record = dict[str, Any]


def values(records: Sequence[Record], kind: str, load: float, way: str, what: str, part: int | None) -> list[float]:
    """One figure in all turns of a cell, where it was measured."""
    name = "rate" if kind == "open" else "streams"
    found = [one for one in records if one["kind"] == kind and one.get("way") == way and one.get(name) == load]
    return [one[what] if part is None else one[what][part] for one in found if one.get(what) is not None]


def shown(found: Sequence[float], digits: int = 1) -> str:
    """The median; of several with the least and the greatest."""
    if not found:
        return ""
    text = f"{statistics.median(found):.{digits}f}"
    return text if len(found) == 1 else f"{text} ({min(found):.{digits}f} to {max(found):.{digits}f})"


def loads_of(records: Sequence[Record]) -> list[tuple[str, float]]:
    kinds = (("closed", "streams"), ("open", "rate"))
    return [(kind, load) for kind, name in kinds for load in sorted({r[name] for r in records if r["kind"] == kind})]


def ways_of(records: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(one["way"] for one in records if one["kind"] in ("closed", "open")))


def table(records: Sequence[Record], metric: str) -> Section:
    """A row for each server, a column for each load."""
    what, part, title = METRICS[metric]
    loads = loads_of(records)
    head = ["server", *(f"{load:g} {'streams' if kind == 'closed' else 'a second'}" for kind, load in loads)]
    section = Section(title, head)
    for way in ways_of(records):
        cells = [shown(values(records, kind, load, way, what, part)) for kind, load in loads]
        section.rows.append([way, *cells])
    if metric == "tokens-per-second":
        for way in ways_of(records):
            steps = [shown(values(records, kind, load, way, "compression", None), 2) for kind, load in loads]
            if any(steps):
                section.rows.append([f"S of {way}", *steps])
    return section


def plot(records: Sequence[Record], metric: str) -> str:
    """The closed loop as a line for each server. SVG."""
    what, part, title = METRICS[metric]
    streams = [load for kind, load in loads_of(records) if kind == "closed"]
    ways = ways_of(records)
    series: dict[str, list[float | None]] = {}
    for way in ways:
        found = [values(records, "closed", load, way, what, part) for load in streams]
        series[way] = [statistics.median(one) if one else None for one in found]
    canvas = Canvas(780, 380, title, f"{title}, by the number of streams: {', '.join(ways)}.")
    canvas.text(24, 34, title, bold=True, size=17)
    colours = colours_of(ways)
    legend(canvas, 28, 62, colours)
    bottom = lines(canvas, 20, 84, 740, 240, [f"{load:g}" for load in streams], series, colours)
    canvas.text(390, bottom + 4, "streams", anchor="middle", size=12, fill=FAINT)
    return canvas.done()


def servers(found: Record) -> Section:
    """Start-up time, memory, equal texts, version and command of each server."""
    head = ("server", "equal", "start s", "first answer s", "host GB", "GPU GB", "version", "command")
    section = Section("Servers", head)
    starts: dict[str, list[Record]] = {}
    for record in found["records"]:
        if record["kind"] == "server":
            starts.setdefault(record["peer"], []).append(record)
    for peer, turns in starts.items():
        equal = []
        for way in turns[0]["equal"]:
            counts = [one["equal"][way] for one in turns if one["equal"][way] is not None]
            if counts:
                equal.append(f"{way} {sum(count for count, _ in counts)} of {sum(of for _, of in counts)}")
        memories = [
            shown([one["memory"][where] / 1e9 for one in turns if one["memory"][where]]) for where in ("host", "gpu")
        ]
        times = [
            shown([one[what] for one in turns if one[what] is not None])
            for what in ("start_seconds", "first_answer_seconds")
        ]
        section.rows.append(
            [peer, ", ".join(equal), *times, *memories, turns[0]["version"], f"`{turns[0]['command']}`"]
        )
    section.notes = [
        "equal: texts that are the same, asked under the largest load and again alone. start: until the first answer "
        "of one token has come, whose own time is beside it. Memory is that of all the server's processes and of all "
        "GPUs, after the cells.",
        *(f"{name} was left out: {why}." for name, why in found.get("left_out", {}).items()),
    ]
    return section


def beside_engine(records: Sequence[Record]) -> Section:
    """What serving costs: tokens per second over HTTP beside the engine's own, and their ratio."""
    ways = [way for way in ways_of(records) if any(r["kind"] == "engine" and r["way"] == way for r in records)]
    section = Section(
        "Over HTTP and by the engine alone",
        ["streams", *(f"{way}, {what}" for way in ways for what in ("HTTP", "engine", "ratio"))],
    )
    for load in sorted({one["streams"] for one in records if one["kind"] == "engine"}):
        cells = [str(load)]
        for way in ways:
            http, own = (values(records, kind, load, way, "tokens_per_second", None) for kind in ("closed", "engine"))
            if not http or not own:
                cells += ["", "", ""]
                continue
            first, second = statistics.median(http), statistics.median(own)
            cells += [f"{first:.0f}", f"{second:.0f}", f"{first / second:.3f}"]
        section.rows.append(cells)
    section.notes = [
        "The engine ran the same cells after the server had ended, in the same run, with prompts of the same sets, "
        "each asked once: no HTTP, no JSON and no text, and the next request waits in its queue."
    ]
    return section


def about(found: Record) -> Section:
    facts, records = found["about"], found["records"]
    section = Section("Measured on", ("what", "value"))
    section.rows = [[name, str(value)] for name, value in facts.items() if value is not None]
    again, captures = (sum(one.get(what) or 0 for one in records) for what in ("again", "captures"))
    turns, runs = (1 + max((one.get(what, 0) for one in records), default=0) for what in ("turn", "run"))
    times = [f"{turns} turns: every server is started in each."] if turns > 1 else []
    times += [f"Every server that has started runs all cells {runs} times."] if runs > 1 else []
    section.notes = [
        " ".join(["Written by `python benchmarks/peers.py`.", *times, "Medians stand with the least and the greatest."])
        if times else "Written by `python benchmarks/peers.py`, one run.",
        f"Clients in one process stream greedy answers of {found['tokens']} tokens, each asking again when its answer "
        "has ended. All servers are asked the same prompts in the same order, ours for both of its ways in turn; "
        f"{again or 'none'} of them had been asked before. Nothing was warmed up; ours captured {captures:g} steps "
        "after it was ready. Tokens per second are those of a run's last three quarters; all else is counted from the "
        "beginning, when all clients come at once, but for the steady part.",
    ]  # fmt: skip
    return section


def write_page(found: Record, out: Path | None) -> str:
    """The page; with `out` written there as `peers.md`, with the plots beside it."""
    records = found["records"]
    sections = [table(records, metric) for metric in METRICS]
    if any(one["kind"] == "engine" for one in records):
        sections.append(beside_engine(records))
    if out is not None and any(one["kind"] == "closed" for one in records):
        out.mkdir(parents=True, exist_ok=True)
        for metric, section in zip(METRICS, sections, strict=False):
            (out / f"peers-{metric}.svg").write_text(plot(records, metric), encoding="utf-8")
            section.notes.append(f"![{section.title}](peers-{metric}.svg)")
    text = markdown("Servers side by side", [*sections, servers(found), about(found)])
    if out is not None:
        (out / "peers.md").write_text(text, encoding="utf-8")
    return text
