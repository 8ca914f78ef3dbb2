"""The page of a GPU run: tables of the JSON files that the parts left in a folder, and the folder's `remarks.md`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lookahead.bench.report.sections import Section, markdown, times

SHAPES = {"7b": "7B shape", "small": "the 135M model itself"}
FACTS = ("gpu", "cpu", "cores", "torch", "transformers", "triton", "python", "lookahead")
Record = dict[str, Any]
TABLES = {
    "step": (
        "A step by K",
        "gap: the part of a step in which the device waits for the host.",
    ),
    "speed": (
        "Tokens per second",
        "From prompt to last token, the prompt included. over AR: against our autoregressive decoding. as AR: texts "
        "equal to its.",
    ),
    "batch": (
        "Batch",
        "Total tokens per second in a steady state: an answer that ends is replaced by the next at once. over AR: "
        "against our own decoding token by token of as many sequences. of bound: against steps that only read the "
        "weights and the K/V of this context, as fast as a copy. guesses: draft tokens per sequence and step. as "
        "first seen: answers equal to what the same prompt gave when it was first answered, at whatever load.",
    ),
}
"""Title and note of every part's table. Files of parts that no longer exist have the part's name as their title."""
HEADS = {
    "tok_s": "tok/s", "over_ar": "over AR", "as_autoregressive": "as AR", "first_ms": "first token ms",
    "gap_percent": "gap %", "batch": "sequences",
}  # fmt: skip
"""Heads of columns that are not the field's name."""
HIDDEN = ("gap_ms", "propose_ms", "absorb_ms")
"""Fields that make no column, as lists do not."""


def write(folder: Path, path: Path) -> str:
    """Write the page; returns the table of speeds, or the first one."""
    found = {one.name: json.loads(one.read_text(encoding="utf-8")) for one in sorted(folder.glob("*.json"))}
    files = {name: one for name, one in found.items() if "records" in one and "part" in one.get("about", {})}
    if not files:
        raise ValueError(f"{folder} holds no JSON of a GPU part; give the folder that was its --out")
    groups: dict[tuple[str, str], list[Record]] = {}
    for one in files.values():
        groups.setdefault((one["about"]["part"], one["about"]["shape"]), []).extend(one["records"])
    parts = dict.fromkeys((*TABLES, *(part for part, _ in groups)))
    tables = [table(*key, groups[key]) for part in parts for key in groups if key[0] == part]
    remarks = folder / "remarks.md"
    written = [Section("Remarks", notes=[remarks.read_text(encoding="utf-8").strip()])] if remarks.exists() else []
    gpu = str(next(iter(files.values()))["about"]["gpu"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(markdown(gpu, [measured_on(files), *written, *tables]), encoding="utf-8")
    short = next((one for one in tables if one.title.startswith(TABLES["speed"][0])), tables[0])
    return f"{markdown(short.title, [short])}\n{path}: the page of {len(files)} files"


def measured_on(files: dict[str, Record]) -> Section:
    section = Section("Measured on", ("file", "command", "dtype", *FACTS))
    for name, found in files.items():
        about = found["about"]
        facts = [str(about.get(fact) or "-") for fact in ("dtype", *FACTS)]
        section.rows.append([f"`{name}`", f"`{about['command']}`", *facts])
    section.notes.append(
        "7B shape: the embedded model in the shape of a 7B Llama (hidden 4096, 32 layers, 64 heads of 64, "
        "intermediate 11008; 13.8 GB of bf16 weights). Batch 1 unless the table has another."
    )
    return section


def table(part: str, shape: str, records: list[Record]) -> Section:
    """The columns are the fields of the records, and the speed over autoregressive decoding where that was measured."""
    title, note = TABLES.get(part, (part.capitalize(), ""))
    plain = {_cell(r): r["tok_s"] for r in records if r.get("method") == "autoregressive"}
    records = [{**r, "over_ar": times(r["tok_s"] / plain[_cell(r)])} if _cell(r) in plain else r for r in records]
    found = {name: value for record in records for name, value in record.items()}
    names = [n for n, value in found.items() if n not in HIDDEN and not isinstance(value, list | dict)]
    head = [HEADS.get(name, name.replace("_", " ")) for name in names]
    section = Section(f"{title}: {SHAPES.get(shape, shape)}", head, notes=[note] if note else [])
    section.rows += [[shown(record.get(name)) for name in names] for record in records]
    return section


def _cell(record: Record) -> tuple[Any, ...]:
    """What two methods must have in common to be compared."""
    return tuple(record.get(name) for name in ("set", "invariant", "batch", "sampling"))


def shown(value: Any) -> str:
    """A figure as it is worth reading: 958, 17.9, 4.37."""
    if value is None or isinstance(value, bool):
        return {None: "", True: "yes", False: "no"}[value]
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
