"""Appendix E: in fp32 every output is that of transformers' greedy search; in half precision some differ, as they do
between transformers' own ways, and where they first differ the two likeliest tokens are nearly tied.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from lookahead.bench.context import Context
from lookahead.bench.jobs import Job
from lookahead.bench.results import Row, key_of
from lookahead.bench.sections import Section

Pair = tuple[Job, Row, Row]
"""A job, its row, and the row of the reference for the same prompt."""


def is_reference(job: Job) -> bool:
    return job.method.how == "hf-greedy" and job.method.dtype == "float32"


def is_stock_half(job: Job) -> bool:
    return job.method.how == "hf-greedy" and job.method.dtype != "float32" and job.method.attention == "sdpa"


def pairs(run: Context, which: Any = is_reference) -> Iterator[Pair]:
    rows = run.results.rows
    answers = {(job.data, job.prompt.id): rows.get(job.key) for job in run.jobs if which(job) and not job.repeat}
    for job in run.jobs:
        row, reference = rows.get(job.key), answers.get((job.data, job.prompt.id))
        if row is not None and reference is not None and "error" not in row and "error" not in reference:
            yield job, row, reference


def first_difference(ours: list[list[int]], theirs: list[list[int]]) -> tuple[int, int] | None:
    """The turn and the token at which two conversations part; None if they are the same."""
    for turn, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a != b:
            shorter = min(len(a), len(b))
            return turn, next((i for i in range(shorter) if a[i] != b[i]), shorter)
    return None


def counts(found: list[tuple[Row, Row]]) -> tuple[int, int]:
    """Turns, and those among them that differ."""
    turns = [pair for row, reference in found for pair in zip(row["tokens"], reference["tokens"], strict=True)]
    return len(turns), sum(ours != theirs for ours, theirs in turns)


def margins(run: Context) -> None:
    """For every output that differs from the fp32 reference: how far apart fp32 has the two likeliest tokens there."""
    for job, row, reference in pairs(run):
        key = _key(row, reference)
        place = first_difference(row["tokens"], reference["tokens"])
        if place is None or key in run.results:
            continue
        exact = next(other for other in run.jobs if is_reference(other))
        margin = top_two(run.models.of(exact.method), job, reference, *place)
        run.results.add({"kind": "margin", "key": key, "turn": place[0], "token": place[1], "margin": margin})


def _key(row: Row, reference: Row) -> str:
    return key_of({"kind": "margin", "of": row["key"], "against": reference["key"]})


def top_two(lm: Any, job: Job, reference: Row, turn: int, token: int) -> float:
    """The difference of the two largest fp32 logits after the common beginning."""
    import torch

    from lookahead.bench.runner import prompt_ids

    ids = prompt_ids(lm, job.prompt, reference["texts"][:turn]) + reference["tokens"][turn][:token]
    with torch.inference_mode():
        logits = lm.model(torch.tensor([ids], device=lm.device)).logits[0, -1].float()
    first, second = logits.topk(2).values.tolist()
    return float(first - second)


PAPER = (
    "The paper (LLaMA-2-7B-Chat, 160 turns of MT-Bench): in fp32 all outputs are the same. In fp16 transformers' "
    "greedy search differs from its own fp32 in 35 of 160 outputs, in 42 with FlashAttention, and lookahead in 35-44."
)


def show(run: Context) -> list[Section]:
    head = (
        "path",
        "outputs",
        "differ from fp32 greedy",
        "differ from stock half greedy",
        "median margin",
        "largest margin",
    )
    section = Section("Outputs that differ", head)
    exact, half = list(pairs(run)), list(pairs(run, is_stock_half))
    for method in dict.fromkeys(job.method for job in run.jobs):
        own = [(row, reference) for job, row, reference in exact if job.method == method]
        beside = [(row, reference) for job, row, reference in half if job.method == method]
        outputs, differ = counts(own)
        _, others = counts(beside)
        found = [run.results.rows[key]["margin"] for pair in own if (key := _key(*pair)) in run.results]
        section.rows.append([
            method.label,
            str(outputs),
            str(differ),
            str(others) if beside and method.dtype != "float32" else "-",
            f"{statistics.median(found):.4f}" if found else "-",
            f"{max(found):.4f}" if found else "-",
        ])  # fmt: skip
    section.notes += [
        f"{job.method.label}: {row['error']}"
        for job in run.jobs
        if (row := run.results.rows.get(job.key)) is not None and "error" in row
    ][:5]
    section.notes.append(
        "outputs: turns of conversations. A turn after one that differs was asked something else in part, and counts "
        "as it is. margin: the fp32 logits' difference between the likeliest and the second token where a conversation "
        "first differs."
    )
    section.notes.append(PAPER)
    return [section]
