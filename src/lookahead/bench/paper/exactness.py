"""Appendix E: in fp32 every output is that of transformers' greedy search; in half precision some differ, as they do
between transformers' own ways.
"""

from __future__ import annotations

from collections.abc import Callable

from lookahead.bench.report.sections import Section, errors
from lookahead.bench.run.jobs import Job
from lookahead.bench.run.methods import Method
from lookahead.bench.run.summary import BenchRun

PAPER = (
    "The paper (LLaMA-2-7B-Chat, 160 turns of MT-Bench): in fp32 all outputs are the same. In fp16 transformers' "
    "greedy search differs from its own fp32 in 35 of 160 outputs, in 42 with FlashAttention, and lookahead in 35-44."
)
Outputs = tuple[list[int], list[int]]


def is_exact(job: Job) -> bool:
    return (job.method.how, job.method.dtype) == ("hf-greedy", "float32")


def is_stock_half(job: Job) -> bool:
    return (job.method.how, job.method.attention) == ("hf-greedy", "sdpa") and not is_exact(job)


def pairs(run: BenchRun, is_reference: Callable[[Job], bool]) -> dict[Method, list[Outputs]]:
    """Every turn's output beside the reference's, by method."""
    references = {(job.data, job.prompt.id): run.record(job) for job in run.jobs if is_reference(job)}
    found: dict[Method, list[Outputs]] = {}
    for job in run.jobs:
        record, reference = run.record(job), references.get((job.data, job.prompt.id))
        if record is not None and reference is not None:
            found.setdefault(job.method, []).extend(zip(record["tokens"], reference["tokens"], strict=True))
    return found


def show(run: BenchRun) -> list[Section]:
    head = ("path", "outputs", "differ from fp32 greedy", "from stock half greedy")
    section = Section("Outputs that differ", head, notes=errors(run.lines))
    exact, half = pairs(run, is_exact), pairs(run, is_stock_half)
    for method in dict.fromkeys(job.method for job in run.jobs):
        own, beside = exact.get(method, []), half.get(method, [])
        stock = str(_differing(beside)) if beside and method.dtype != "float32" else "-"
        section.rows.append([method.label, str(len(own)), str(_differing(own)), stock])
    section.notes += [
        "outputs: turns of conversations. A turn after one that differs was asked something else in part, and counts "
        "as it is.",
        PAPER,
    ]
    return [section]


def _differing(outputs: list[Outputs]) -> int:
    return sum(ours != theirs for ours, theirs in outputs)
