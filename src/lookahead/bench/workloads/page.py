"""The report of the workloads: a table of all rows, what carries over to other models, and the pictures."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lookahead.bench.report.sections import Section, markdown
from lookahead.bench.run.results import Record
from lookahead.bench.workloads.measure import COLD, PLAIN, STOCK, WARM
from lookahead.bench.workloads.picture import picture
from lookahead.bench.workloads.tasks import WORKLOADS

HEAD = (
    "workload", "answers", "prompt", "new", "plain tok/s", "cold S", "cold tok/s", "ratio", "warm S", "warm tok/s",
    "ratio", "equal",
)  # fmt: skip
OVERLAP_HEAD = ("workload", "context, 4", "context, 12", "earlier, 4", "earlier, 12")
NOTES = (
    "prompt and new: mean tokens of a prompt, with the turns before it, and of an answer. plain: token by token on the "
    "same engine. cold: an empty memory for each task. warm: what the tasks before have left in it. Each task is "
    "answered in all ways before the next is begun; no way finds the keys and values of another. tok/s: new tokens "
    "over the time from the prompt to the last token, one answer at a time; of rollouts, all samples of a prompt at "
    "once. ratio: over plain. equal: answers of cold and warm that are those of plain, token for token.",
    "An answer's text is the model's own, good or poor, and speed depends on it: a small model repeats itself more "
    "than a large one, and follows instructions less. What carries over is how much of an answer stood somewhere "
    "before:",
)
OVERLAP_NOTES = (
    "Shares of the answers' n-grams of 4 and of 12 tokens. context: they stand in the prompt, in earlier turns, or "
    "earlier in the answer. earlier: not there, but in the answers to the tasks before (and in earlier epochs), which "
    "a warm memory has seen.",
)


def sections(records: Sequence[Record]) -> list[Section]:
    """The tables. Records of the same workload are repeats: medians, with the least and the greatest ratio."""
    speed, overlap = Section("Workloads", HEAD), Section("What the answers repeat", OVERLAP_HEAD)
    stock = Section("Beside transformers", ("workload", "hf-greedy tok/s", "plain", "cold", "warm", "equal"))
    for workload, repeats in grouped(records).items():
        for row in repeats[0]["rows"]:
            speed.rows.append([row, *cells([one["rows"][row] for one in repeats], repeats, row)])
            shares = repeats[0]["overlap"][row]
            overlap.rows.append(
                [row, *(percent(shares[size][where]) for where in ("context", "earlier") for size in shares)]
            )
            if STOCK in repeats[0]["rows"][row]:
                stock.rows.append([row, *stock_cells([one["rows"][row] for one in repeats], repeats, row)])
        for error in repeats[0]["errors"]:
            speed.notes.append(f"{workload}: left out: {error}")
    speed.notes += NOTES
    overlap.notes += OVERLAP_NOTES
    made = [speed, overlap]
    if stock.rows:
        stock.notes = ["transformers' greedy search with a cache that grows; ratios are ours over its tok/s."]
        made.append(stock)
    return made


def grouped(records: Sequence[Record]) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    for record in sorted(records, key=lambda record: (list(WORKLOADS).index(record["workload"]), record["repeat"])):
        found.setdefault(record["workload"], []).append(record)
    return found


def cells(rows: Sequence[Mapping[str, Record]], repeats: Sequence[Record], row: str) -> list[str]:
    plain = rows[0][PLAIN]
    count = max(1, repeats[0]["answers"][row])
    found = [str(count), f"{plain['prompt_tokens'] / count:.0f}", f"{plain['generated_tokens'] / count:.0f}"]
    found.append(f"{median(rows, PLAIN):.1f}")
    for way in (COLD, WARM):
        found += [f"{rows[0][way]['compression']:.2f}", f"{median(rows, way):.1f}", ratio(rows, way, PLAIN)]
    return [*found, equal(repeats, row, COLD, WARM)]


def stock_cells(rows: Sequence[Mapping[str, Record]], repeats: Sequence[Record], row: str) -> list[str]:
    ratios = [ratio(rows, way, STOCK) for way in (PLAIN, COLD, WARM)]
    return [f"{median(rows, STOCK):.1f}", *ratios, equal(repeats, row, STOCK)]


def equal(repeats: Sequence[Record], row: str, *ways: str) -> str:
    """How many answers of all repeats are those of token by token."""
    same = sum(one["equal"][row][way] for one in repeats for way in ways)
    return f"{same}/{len(ways) * sum(one['answers'][row] for one in repeats)}"


def median(rows: Sequence[Mapping[str, Record]], way: str) -> float:
    return statistics.median(one[way]["tokens_per_second"] for one in rows)


def ratio(rows: Sequence[Mapping[str, Record]], way: str, base: str) -> str:
    """The median of the repeats' ratios; where they are several, with the least and the greatest."""
    found = [one[way]["tokens_per_second"] / max(1e-9, one[base]["tokens_per_second"]) for one in rows]
    shown = f"{statistics.median(found):.2f}x"
    return shown if len(found) == 1 else f"{shown} ({min(found):.2f} to {max(found):.2f})"


def percent(share: float) -> str:
    return f"{100 * share:.0f}%"


def write(records: Sequence[Record], about: Mapping[str, Any], facts: Mapping[str, Any], out: Path) -> Path:
    """Write `workloads.md` and a picture of each row into `out`. Returns the path of the page."""
    measured = Section("Measured on", ("what", "value"))
    measured.rows = [[name, str(value)] for name, value in {**about, **facts}.items() if value is not None]
    pictures = Section("Where the time goes")
    for workload, repeats in grouped(records).items():
        for row, ways in repeats[0]["rows"].items():
            file = out / f"workload-{re.sub('[^a-z0-9]+', '-', row)}.svg"
            file.write_text(picture(row, WORKLOADS[workload].about, ways), encoding="utf-8")
            pictures.notes.append(f"![{row}]({file.name})")
    path = out / "workloads.md"
    path.write_text(markdown("Workloads", [*sections(records), measured, pictures]), encoding="utf-8")
    return path
