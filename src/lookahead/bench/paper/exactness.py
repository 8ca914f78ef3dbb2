"""Appendix E: in fp32 every output is that of transformers' greedy search; in half precision some differ, as they do
between transformers' own ways, and where they first differ the two likeliest tokens are nearly tied.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lookahead.bench.report.sections import Section
from lookahead.bench.run.jobs import Job
from lookahead.bench.run.results import Record, key_of
from lookahead.bench.run.runner import prompt_ids
from lookahead.bench.run.summary import BenchRun

PAPER = (
    "The paper (LLaMA-2-7B-Chat, 160 turns of MT-Bench): in fp32 all outputs are the same. In fp16 transformers' "
    "greedy search differs from its own fp32 in 35 of 160 outputs, in 42 with FlashAttention, and lookahead in 35-44."
)


def is_exact(job: Job) -> bool:
    return (job.method.how, job.method.dtype) == ("hf-greedy", "float32")


def is_stock_half(job: Job) -> bool:
    return (job.method.how, job.method.attention) == ("hf-greedy", "sdpa") and not is_exact(job)


def pairs(run: BenchRun, is_reference: Callable[[Job], bool]) -> Iterator[tuple[Job, Record, Record]]:
    references = {(job.data, job.prompt.id): run.record(job) for job in run.jobs if is_reference(job)}
    for job in run.jobs:
        record, reference = run.record(job), references.get((job.data, job.prompt.id))
        if record is not None and reference is not None:
            yield job, record, reference


def first_difference(ours: list[list[int]], theirs: list[list[int]]) -> tuple[int, int] | None:
    """The turn and the token at which two conversations part; None if they are the same."""
    for turn, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a != b:
            shorter = min(len(a), len(b))
            return turn, next((i for i in range(shorter) if a[i] != b[i]), shorter)
    return None


def margins(run: BenchRun) -> None:
    """For every output that differs from the fp32 reference: how far apart fp32 has the two likeliest tokens there."""
    for job, record, reference in pairs(run, is_exact):
        key = _key(record, reference)
        parting = first_difference(record["tokens"], reference["tokens"])
        if parting is None or key in run.results:
            continue
        exact = next(other for other in run.jobs if is_exact(other))
        margin = top_two(run.models.of(exact.method), job, reference, *parting)
        run.results.add({"kind": "margin", "key": key, "turn": parting[0], "token": parting[1], "margin": margin})


def _key(record: Record, reference: Record) -> str:
    return key_of({"kind": "margin", "of": record["key"], "against": reference["key"]})


def top_two(lm: Any, job: Job, reference: Record, turn: int, token: int) -> float:
    """The difference of the two largest fp32 logits after the common beginning."""
    ids = prompt_ids(lm, job.prompt, reference["texts"][:turn]) + reference["tokens"][turn][:token]
    with torch.inference_mode():
        logits = lm.model(torch.tensor([ids], device=lm.device)).logits[0, -1].float()
    first, second = logits.topk(2).values.tolist()
    return float(first - second)


def show(run: BenchRun) -> list[Section]:
    head = ("path", "outputs", "differ from fp32 greedy", "from stock half greedy", "median margin", "largest margin")
    section = Section("Outputs that differ", head)
    exact, half = list(pairs(run, is_exact)), list(pairs(run, is_stock_half))
    for method in dict.fromkeys(job.method for job in run.jobs):
        own = [pair for job, *pair in exact if job.method == method]
        beside = [pair for job, *pair in half if job.method == method]
        found = [run.results.records[key]["margin"] for one, other in own if (key := _key(one, other)) in run.results]
        section.rows.append([
            method.label,
            str(sum(len(record["tokens"]) for record, _ in own)),
            _differing(own),
            _differing(beside) if beside and method.dtype != "float32" else "-",
            f"{statistics.median(found):.4f}" if found else "-",
            f"{max(found):.4f}" if found else "-",
        ])  # fmt: skip
    failed = [(job, run.results.records.get(job.key, {})) for job in run.jobs]
    section.notes = [
        *[f"{job.method.label}: {record['error']}" for job, record in failed if "error" in record][:5],
        "outputs: turns of conversations. A turn after one that differs was asked something else in part, and counts "
        "as it is. margin: the fp32 logits' difference between the likeliest and the second token where a conversation "
        "first differs.",
        PAPER,
    ]
    return [section]


def _differing(found: list[list[Record]]) -> str:
    turns = [pair for one, other in found for pair in zip(one["tokens"], other["tokens"], strict=True)]
    return str(sum(ours != theirs for ours, theirs in turns))
