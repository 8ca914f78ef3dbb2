"""Preset `speed`: lookahead against autoregressive decoding, prompt by prompt."""

from __future__ import annotations

import statistics

from lookahead.bench.report.sections import Section, times
from lookahead.bench.run.summary import BenchRun


def show(run: BenchRun) -> list[Section]:
    head = ("set", "prompt", "tokens", "autoregressive s", "lookahead s", "ratio", "S", "K", "identical")
    section = Section("Prompt by prompt", head)
    answers = {(job.data, job.prompt.id, job.method.how): run.record(job) for job in run.jobs if not job.repeat}
    ratios: dict[str, list[float]] = {}
    for (data, prompt, how), ours in answers.items():
        plain = answers.get((data, prompt, "autoregressive"))
        if how != "lookahead" or ours is None or plain is None:
            continue
        ratios.setdefault(data, []).append(plain["seconds"] / ours["seconds"])
        section.rows.append([
            data, prompt, str(plain["generated_tokens"]), f"{plain['seconds']:.2f}", f"{ours['seconds']:.2f}",
            times(ratios[data][-1]), f"{ours['compression']:.2f}", f"{ours['step_tokens'] / ours['steps']:.1f}",
            "yes" if ours["tokens"] == plain["tokens"] else "no",
        ])  # fmt: skip
    section.notes += [f"{data}: the median of the ratios is {statistics.median(r):.2f}x." for data, r in ratios.items()]
    return [section]
