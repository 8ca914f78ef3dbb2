"""`--ranks R`: what the ranks computed and exchanged, and whether it is what one rank does."""

from __future__ import annotations

from typing import Any

from lookahead.bench.context import Context
from lookahead.bench.jobs import Job
from lookahead.bench.methods import Method
from lookahead.bench.results import Row
from lookahead.bench.sections import Section

HEAD = ("set", "method", "ranks", "S", "tokens of the tree", "tokens per rank", "of them again", "collectives", "bytes",
        "exchange ms", "as one rank")  # fmt: skip


def show(run: Context) -> Section:
    """Per step, over all answers of a method; `as one rank` compares tokens and steps."""
    section = Section("Ranks", HEAD)
    for method in dict.fromkeys(job.method for job in run.jobs if job.method.ranks > 1):
        for data in run.prompts:
            jobs = [job for job in run.jobs if (job.method, job.data) == (method, data)]
            found = [(job, row) for job in jobs if "ranks" in (row := run.results.rows.get(job.key) or {})]
            if found:
                section.rows.append(_row(run, data, method, found))
    section.notes.append(
        "Per step: tokens that a rank ran, those among them that it ran again because another rank had accepted them, "
        "collectives, and bytes that a rank sends. `as one rank`: answers with the tokens and the steps of one rank."
    )
    return section


def _row(run: Context, data: str, method: Method, found: list[tuple[Job, Row]]) -> list[str]:
    counters = [row["ranks"] for _, row in found]
    steps = max(1, sum(counter["steps"] for counter in counters))

    def mean(name: str, digits: int) -> str:
        return f"{sum(counter[name] for counter in counters) / steps:.{digits}f}"

    def each(name: str) -> str:
        return " ".join(f"{sum(column) / steps:.1f}" for column in zip(*(c[name] for c in counters), strict=True))

    alone = _alone(run, method)
    pairs = [(row, alone.get((job.data, job.prompt.id, job.temperature, job.repeat))) for job, row in found]
    compared = [(row, other) for row, other in pairs if other is not None]
    same = sum((row["tokens"], row["steps"]) == (other["tokens"], other["steps"]) for row, other in compared)
    tokens = sum(row["generated_tokens"] for _, row in found)
    exchange = 1e3 * sum(counter["exchange_seconds"] for counter in counters) / steps
    return [
        data, method.label, str(method.ranks), f"{tokens / steps:.2f}", mean("tree_tokens", 1), each("tokens"),
        each("caught_up"), mean("collectives", 2), mean("sent_bytes", 0), f"{exchange:.2f}",
        f"{same}/{len(compared)}",
    ]  # fmt: skip


def _alone(run: Context, method: Method) -> dict[tuple[Any, ...], Row]:
    """The rows of the same method on one rank."""
    found = {}
    for job in run.jobs:
        other = job.method
        if (other.how, other.config, other.ranks) == (method.how, method.config, 1) and not other.stock:
            row = run.results.rows.get(job.key)
            if row is not None and "error" not in row:
                found[job.data, job.prompt.id, job.temperature, job.repeat] = row
    return found
