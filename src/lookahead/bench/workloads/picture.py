"""One picture of each workload: where accepted draft tokens come from, how long their chains are, where time goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lookahead.bench.report.canvas import FAINT, Canvas
from lookahead.bench.report.charts import colours_of, columns, legend, stacked
from lookahead.bench.run.results import Record
from lookahead.config import OTHER_SOURCES, SOURCES

LENGTHS = ((0, 0), (1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 32), (33, 64))
"""Accepted draft tokens of a step, first and last of each column."""
TIMES = {"prompt": "prompt_seconds", "verify": "verify_seconds", "host": "host_seconds"}
WIDTH = 780


def picture(name: str, about: str, ways: Mapping[str, Record]) -> str:
    """The SVG of one row. `ways` are the records of `Tally`, by way."""
    drafted = {way: record for way, record in ways.items() if record["accepted_by_source"]}
    canvas = Canvas(WIDTH, 500, f"Workload {name}", f"{about}: accepted tokens by source, chain lengths, time.")
    canvas.text(24, 34, name, bold=True, size=17)
    canvas.text(24, 54, about, size=12, fill=FAINT)

    y = 88
    canvas.text(24, y, "Accepted draft tokens a step, by source", bold=True)
    sources = [*SOURCES, *OTHER_SOURCES, "prediction"]
    colours = colours_of(sources)
    seen = {
        name: colours[name] for name in sources if any(name in one["accepted_by_source"] for one in drafted.values())
    }
    legend(canvas, 320, y, seen)
    rows = {
        way: {source: one["accepted_by_source"].get(source, 0) / one["steps"] for source in seen}
        for way, one in drafted.items()
    }
    y = stacked(canvas, 24, y + 14, WIDTH - 48, rows, seen)

    y += 24
    canvas.text(24, y, "Steps by accepted draft tokens, in percent", bold=True)
    two = colours_of(list(drafted))
    legend(canvas, 340, y, two)
    shares = {way: chain_shares(one) for way, one in drafted.items()}
    labels = [str(first) if first == last else f"{first}-{last}" for first, last in LENGTHS]
    y = columns(canvas, 40, y + 10, WIDTH - 80, 130, labels, shares, two)

    y += 14
    canvas.text(24, y, "Milliseconds of a token", bold=True)
    parts = colours_of(list(TIMES))
    legend(canvas, 320, y, parts)
    times = {
        way: {part: 1e3 * one[field] / max(1, one["generated_tokens"]) for part, field in TIMES.items()}
        for way, one in ways.items()
    }
    stacked(canvas, 24, y + 14, WIDTH - 48, times, parts, unit=" ms")
    return canvas.done()


def chain_shares(record: Record) -> list[float]:
    """The share of steps whose accepted chain has each of LENGTHS, in percent."""
    counts = chain_counts(record["steps"], record["accepted_by_depth"])
    total = max(1, record["steps"])
    shares = [100 * sum(counts[first : last + 1]) / total for first, last in LENGTHS]
    shares[-1] += 100 * sum(counts[LENGTHS[-1][1] + 1 :]) / total
    return shares


def chain_counts(steps: int, by_depth: Sequence[Any]) -> list[int]:
    """How many steps accepted 0, 1, 2, ... draft tokens; `by_depth[d]` of them accepted one at depth d + 1."""
    at_least = [steps, *by_depth, 0]
    return [at_least[length] - at_least[length + 1] for length in range(len(at_least) - 1)]
