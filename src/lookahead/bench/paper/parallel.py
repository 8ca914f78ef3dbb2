"""Lookahead parallelism: what ranks compute and send, as counted, and what GPUs would gain by it, as projected."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from lookahead.bench.report.sections import Section, times
from lookahead.bench.run.methods import Method
from lookahead.bench.run.summary import BenchRun

EXCHANGE_MS, GIGABYTES_PER_SECOND = 0.03, 450.0
"""Of an all-gather between GPUs with NVLink, assumed: its latency, and what one GPU sends per second."""


@dataclass
class Share:
    """A method on several ranks: totals over the steps of all its answers."""

    data: str
    method: Method
    steps: int = 0
    tokens: int = 0
    tree: int = 0
    fullest: int = 0
    sent: int = 0

    @property
    def compression(self) -> float:
        return self.tokens / max(1, self.steps)

    def per_step(self, total: int) -> float:
        return total / max(1, self.steps)


def shares(run: BenchRun) -> Iterator[Share]:
    found: dict[tuple[str, Method], Share] = {}
    for job in run.jobs:
        record = run.record(job)
        if record is not None and "ranks" in record and not job.repeat:
            share, counted = found.setdefault((job.data, job.method), Share(job.data, job.method)), record["ranks"]
            share.steps, share.tokens = share.steps + record["steps"], share.tokens + record["generated_tokens"]
            share.tree, share.fullest = share.tree + counted["tree_tokens"], share.fullest + counted["slowest"]
            share.sent += counted["sent_bytes"]
    yield from found.values()


def ranks(run: BenchRun) -> list[Section]:
    """What several ranks compute and send in a step; nothing without `--ranks`."""
    head = ("set", "method", "ranks", "S", "tokens of a tree", "of the fullest rank", "bytes sent")
    section = Section("A step of several ranks", head)
    for one in shares(run):
        counted = (f"{one.per_step(total):.1f}" for total in (one.tree, one.fullest, one.sent))
        section.rows.append([one.data, one.method.label, str(one.method.ranks), f"{one.compression:.2f}", *counted])
    if not section.rows:
        section.notes = ["Nothing ran on several ranks: give --ranks 8."]
    return [section]


def projection(run: BenchRun, step_ms: Mapping[int, float]) -> Section:
    """The same on GPUs of which one takes `step_ms[K]` for a step of K tokens: measured shares, a computed time."""
    head = ("set", "method", "ranks", "S", "step, ms", "exchange, ms", "over one GPU token by token")
    section = Section("Projected", head)
    sizes, times_ms = zip(*sorted(step_ms.items()), strict=True)
    for one in shares(run):
        fullest = one.per_step(one.fullest)
        if fullest > sizes[-1]:
            continue  # no time of such a step was measured
        step = float(np.interp(fullest, sizes, times_ms))
        exchange = EXCHANGE_MS + one.per_step(one.sent) * one.method.ranks / GIGABYTES_PER_SECOND / 1e6
        gain = one.compression * times_ms[0] / (step + exchange)
        section.rows.append([
            one.data, one.method.label, str(one.method.ranks), f"{one.compression:.2f}", f"{step:.2f}",
            f"{exchange:.3f}", times(gain),
        ])  # fmt: skip
    section.notes.append(
        "A projection, not a measurement on several GPUs. Measured: S and the tokens of the fullest rank, on ranks "
        f"that share a machine; the time of a step by its tokens ({sizes[0]} to {sizes[-1]}), on one GPU. Assumed: "
        f"{1e3 * EXCHANGE_MS:.0f} us and {GIGABYTES_PER_SECOND:.0f} GB/s for the exchange, the same time of a step on "
        "every GPU, and a host that does not slow down."
    )
    return section
