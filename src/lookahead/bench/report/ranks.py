"""`--ranks R`: what the ranks computed and exchanged, and whether it is what one rank does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lookahead.bench.report.sections import Section
from lookahead.bench.run.jobs import Job
from lookahead.bench.run.methods import Method
from lookahead.bench.run.results import Record
from lookahead.bench.run.summary import BenchRun

HEAD = ("set", "method", "ranks", "S", "tokens of the tree", "tokens per rank", "of them again", "collectives", "bytes",
        "exchange ms", "as one rank")  # fmt: skip


def show(run: BenchRun) -> Section:
    """Per step, over all answers of a method; `as one rank` compares tokens and steps."""
    section = Section("Ranks", HEAD)
    for method in dict.fromkeys(job.method for job in run.jobs if job.method.ranks > 1):
        for data in run.prompts:
            jobs = [job for job in run.jobs if (job.method, job.data) == (method, data)]
            found = [(job, record) for job in jobs if (record := run.record(job)) is not None and "ranks" in record]
            if found:
                section.rows.append([data, method.label, str(method.ranks), *_cells(run, method, found)])
    section.notes.append(
        "Per step: tokens that a rank ran, those among them that it ran again because another rank had accepted them, "
        "collectives, and bytes that a rank sends. `as one rank`: answers with the tokens and the steps of one rank."
    )
    return section


def _cells(run: BenchRun, method: Method, found: list[tuple[Job, Record]]) -> list[str]:
    counters = [record["ranks"] for _, record in found]
    steps = max(1, sum(counter["steps"] for counter in counters))

    def mean(name: str, digits: int, scale: float = 1) -> str:
        return f"{scale * sum(counter[name] for counter in counters) / steps:.{digits}f}"

    def each(name: str) -> str:
        return " ".join(f"{sum(column) / steps:.1f}" for column in zip(*(c[name] for c in counters), strict=True))

    alone = _alone(run, method)
    pairs = [(record, alone.get(_asked(job))) for job, record in found]
    compared = [(record, other) for record, other in pairs if other is not None]
    same = sum((record["tokens"], record["steps"]) == (other["tokens"], other["steps"]) for record, other in compared)
    tokens = sum(record["generated_tokens"] for _, record in found)
    return [
        f"{tokens / steps:.2f}", mean("tree_tokens", 1), each("tokens"), each("caught_up"), mean("collectives", 2),
        mean("sent_bytes", 0), mean("exchange_seconds", 2, 1e3), f"{same}/{len(compared)}",
    ]  # fmt: skip


def _alone(run: BenchRun, method: Method) -> dict[tuple[Any, ...], Record]:
    one = replace(method, ranks=1)
    same = [job for job in run.jobs if job.method.facts() == one.facts()]
    return {_asked(job): record for job in same if (record := run.record(job)) is not None}


def _asked(job: Job) -> tuple[Any, ...]:
    return job.data, job.prompt.id, job.temperature, job.repeat
