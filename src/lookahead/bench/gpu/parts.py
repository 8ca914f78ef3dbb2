"""The parts step and speed, each over a `GpuBench`."""

from __future__ import annotations

from functools import partial
from itertools import groupby
from typing import Any

from lookahead.bench.gpu.bench import GpuBench
from lookahead.bench.gpu.timing import step_ms
from lookahead.bench.run.methods import Method, named
from lookahead.bench.run.models import Models
from lookahead.bench.run.results import Record
from lookahead.bench.run.runner import Job, Runner
from lookahead.bench.run.summary import lines
from lookahead.config import LookaheadConfig

STEP_COUNTS = (1, 16, 32, 64, 121, 128)
METHODS = (
    named("autoregressive"),
    named("paper+prompt:15,5,15", "paper (5,15,15) + prompt"),
    Method("default", "lookahead", LookaheadConfig()),
)


def step(bench: GpuBench) -> None:
    """A step by K at one context: the device, and the host around it."""
    backend: Any = bench.model.backend
    context = bench.options.context
    for count in STEP_COUNTS:
        device, wall = bench.model.client.call(partial(step_ms, backend, count, context))
        record = {"K": count, "context": context, "device_ms": round(device, 3), "step_wall_ms": round(wall, 3)}
        bench.add(record | {"gap_percent": round(100 * (wall - device) / wall, 1)})


def speed(bench: GpuBench) -> None:
    """Our methods on real text, one prompt after another, keeping what they learn, as a server would."""
    runner = Runner(Models(bench.model), None, warm=True)
    jobs = [
        Job(data, number, prompt, method, bench.options.max_tokens, warm=True)
        for method in METHODS
        for data, prompts in bench.prompts.items()
        for number, prompt in enumerate(prompts)
    ]
    done: list[Job] = []
    records: dict[str, Record] = {}
    for (method, data), answers in groupby(runner.run(jobs), key=lambda pair: (pair[0].method, pair[0].data)):
        for job, record in answers:
            done.append(job)
            records[job.key] = record
            if "error" in record:
                raise ValueError(f"{data}, {job.prompt.id}: {record['error']}")
        line = lines(done, records)[-1]
        stats, first = line.stats, sum(records[job.key]["first_token_seconds"] for job in done[-line.prompts :])
        bench.add({
            "method": method.label, "set": data, "prompts": line.prompts, "tokens": stats.generated_tokens,
            "steps": stats.steps, "S": round(stats.compression, 3), "K": round(stats.tokens_per_step, 1),
            "tok_s": round(stats.tokens_per_second, 1), "first_ms": round(line.first_ms, 2),
            "ms_per_step": round(1e3 * (stats.seconds - first) / max(1, stats.steps - line.prompts), 3),
            "as_autoregressive": line.own.same,
        })  # fmt: skip
