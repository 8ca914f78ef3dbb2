"""The page of a GPU run: tables and plots of the JSON files that the parts left in a folder.

What a person has to say of the run stands in the folder's `remarks.md`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lookahead.bench.report import plots
from lookahead.bench.report.plots import Bars, Curves, Points
from lookahead.bench.report.sections import Section, markdown, times

SHAPES = {"7b": "7B shape", "small": "the 135M model itself"}
FACTS = ("gpu", "cpu", "cores", "torch", "transformers", "triton", "python", "lookahead")
Record = dict[str, Any]
TABLES = {
    "step": (
        "A step by K, context 1024",
        "gap: the part of a step in which the device waits for the host.",
    ),
    "speed": (
        "Tokens per second",
        "From prompt to last token, the prompt included. over AR: against our autoregressive decoding. as AR: texts "
        "equal to its. gap: the mean wall time of a step less the device's at the mean context.",
    ),
    "batch": (
        "Batch",
        "Total tokens per second in a steady state: an answer that ends is replaced by the next at once. over AR: "
        "against our own decoding token by token of as many sequences. of bound: against steps that only read the "
        "weights and the K/V of this context, as fast as a copy. guesses: draft tokens per sequence and step. gap: the "
        "part of a step in which the device waits for the host. as first seen: answers equal to what the same prompt "
        "gave when it was first answered, at whatever load.",
    ),
    "bound": (
        "Token by token against the bound",
        "Device time alone. The bound: the weights and the K/V of every sequence, read once, as fast as a copy reads "
        "and writes.",
    ),
    "context": (
        "Context and memory",
        "memory: beside the weights, K/V (in whole blocks) and what the captured steps of every size up to K hold.",
    ),
}
"""Title and note of every part's table. The columns are the fields of its records; files of parts that are gone have
the part's name as their title."""
HEADS = {
    "tok_s": "tok/s", "over_ar": "over AR", "as_autoregressive": "as AR", "first_ms": "first token ms",
    "gap_percent": "gap %", "batch": "sequences",
}  # fmt: skip
"""Heads of columns that are not the field's name."""
HIDDEN = ("gap_ms", "propose_ms", "absorb_ms")
"""Fields that make no column, as lists do not."""


class GpuResults:
    def __init__(self, folder: Path) -> None:
        found = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
        self.files = {name: one for name, one in found.items() if "records" in one and "part" in one.get("about", {})}
        if not self.files:
            raise ValueError(f"{folder} holds no JSON of a GPU part; give the folder that was its --out")
        self.shapes = list(dict.fromkeys(one["about"]["shape"] for one in self.files.values()))
        self.parts = [one["about"]["part"] for one in self.files.values()]

    def of(self, part: str, shape: str) -> list[Record]:
        """The records, with their speed over autoregressive decoding where that was measured."""
        files = [one for one in self.files.values() if (one["about"]["part"], one["about"]["shape"]) == (part, shape)]
        records = [record for one in files for record in one["records"]]
        plain = {_cell(r): r["tok_s"] for r in records if r.get("method") == "autoregressive"}
        return [{**r, "over_ar": times(r["tok_s"] / plain[_cell(r)])} if _cell(r) in plain else r for r in records]


def _cell(record: Record) -> tuple[Any, ...]:
    """What two methods must have in common to be compared."""
    return tuple(record.get(name) for name in ("set", "invariant", "batch", "sampling"))


def write(folder: Path, path: Path) -> str:
    """Write the page and its plots; returns the table of speeds, or the first one that there is."""
    results = GpuResults(folder)
    made = {part: sections(results, part) for part in dict.fromkeys((*TABLES, *results.parts))}
    path.parent.mkdir(parents=True, exist_ok=True)
    for part, shown in made.items():
        drawn = [plot for section in shown for plot in section.plots]
        if drawn and plots.available():
            plots.write(drawn, path.parent / f"gpu-{part}.svg")
            shown[-1].notes.append(f"![{shown[-1].title}](gpu-{part}.svg)")
    remarks = folder / "remarks.md"
    said = [Section("Remarks", notes=[remarks.read_text(encoding="utf-8").strip()])] if remarks.exists() else []
    every = [section for shown in made.values() for section in shown]
    about = next(iter(results.files.values()))["about"]
    path.write_text(markdown(str(about["gpu"]), [measured_on(results), *said, *every]), encoding="utf-8")
    short = made["speed"] or every
    note = "" if plots.available() else f"{plots.MISSING}\n"
    return f"{markdown(short[0].title, short[:1])}\n{note}{path}: the page of {len(results.files)} files"


def measured_on(results: GpuResults) -> Section:
    section = Section("Measured on", ("file", "command", "dtype", *FACTS))
    for name, found in results.files.items():
        about = found["about"]
        facts = [str(about.get(fact) or "-") for fact in ("dtype", *FACTS)]
        section.rows.append([f"`{name}`", f"`{about['command']}`", *facts])
    section.notes.append(
        "7B shape: the embedded model in the shape of a 7B Llama (hidden 4096, 32 layers, 64 heads of 64, "
        "intermediate 11008; 13.8 GB of bf16 weights). Batch 1 unless said otherwise. `invariant` yes is the backend's "
        "default: a row's bits do not depend on K."
    )
    return section


def sections(results: GpuResults, part: str) -> list[Section]:
    title, note = TABLES.get(part, (part.capitalize(), ""))
    made = []
    for shape in results.shapes:
        where = SHAPES.get(shape, shape)
        if records := results.of(part, shape):
            found = {name: value for record in records for name, value in record.items()}
            names = [n for n, value in found.items() if n not in HIDDEN and not isinstance(value, list | dict)]
            section = Section(f"{title}: {where}", notes=[note] if note else [])
            section.head = [HEADS.get(name, name.replace("_", " ")) for name in names]
            section.rows = [[shown(record.get(name)) for name in names] for record in records]
            section.plots = drawing(part, where, [r for r in records if r.get("invariant") is not False])
            made.append(section)
    return made


def shown(value: Any) -> str:
    """A figure as it is worth reading: 958, 17.9, 4.37."""
    if value is None or isinstance(value, bool):
        return {None: "", True: "yes", False: "no"}[value]
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def drawing(part: str, where: str, records: Sequence[Record]) -> list[Bars | Curves]:
    def curve(x: str, y: str, **fields: Any) -> Points:
        return [(r[x], r[y]) for r in records if all(r.get(name) == value for name, value in fields.items())]

    if part == "step":
        names = {"with the host": "step_wall_ms", "device": "device_ms", "matrix products alone": "products_ms"}
        lines = {label: curve("K", name) for label, name in names.items()}
        return [Curves(f"Time of a step, {where}, context 1024", "K, tokens in the step", "ms", lines)]
    if part == "speed":
        at = {(r["method"], r["set"]): r["tok_s"] for r in records if "tok_s" in r}
        sets = list(dict.fromkeys(data for _, data in at))
        bars: dict[str, Sequence[float | None]] = {m: [at.get((m, data)) for data in sets] for m, _ in at}
        return [Bars(f"Tokens per second, {where}, batch 1", sets, bars)]
    if part == "batch":
        methods = dict.fromkeys((r["method"], r["sampling"]) for r in records)
        lines = {f"{m}, {s}": curve("batch", "tok_s", method=m, sampling=s) for m, s in methods}
        return [Curves(f"Total tokens per second by batch, {where}", "sequences", "tok/s", lines, log=True)]
    if part == "context":
        lines = {f"K = {k}": curve("context", "device_ms", K=k) for k in (1, 128)}
        return [Curves(f"Device time of a step, {where}", "tokens of context", "ms", lines, log=True)]
    return []
