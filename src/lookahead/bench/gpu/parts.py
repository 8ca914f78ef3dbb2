"""The parts step and speed, each over a `GpuBench`."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from lookahead.algorithm.sources import SharedMemory
from lookahead.backends.graph.backend import GraphBackend
from lookahead.backends.graph.sizes import bucket
from lookahead.bench.gpu.bench import METHODS, GpuBench
from lookahead.bench.gpu.timing import ROOM, products_ms, step_ms
from lookahead.bench.run.decode import Decoded, decode
from lookahead.config import StopRules
from lookahead.stats import Stats

STEP_COUNTS = (1, 16, 32, 64, 121, 128)


def step(bench: GpuBench) -> None:
    """A step by K at one context: the matrix products alone, the device, and the host around it."""
    backend, context = bench.backend(), bench.options.context
    for count in STEP_COUNTS:
        device, wall = step_ms(backend, count, context)
        record = {"K": count, "context": context, "device_ms": round(device, 3)}
        record |= {"products_ms": round(products_ms(backend, count), 3), "step_wall_ms": round(wall, 3)}
        bench.add(record | {"gap_percent": round(100 * (wall - device) / wall, 1)})


def speed(bench: GpuBench) -> None:
    """Our methods on real text, one prompt after another, keeping what they learn, as a server would."""
    everything = [prompt for prompts in bench.prompts.values() for prompt in prompts]
    longest = max(map(len, everything)) + bench.options.max_tokens
    backend = bench.backend()
    # Everything is captured before it is timed. There is room for `gap`, too: larger pages would drop all graphs.
    backend.check_room(1, longest + ROOM)
    backend.prepare(longest + ROOM, max(config.budget for config in METHODS.values()))
    plain: dict[str, list[list[int]]] = {}
    for name, config in METHODS.items():
        for prompt in everything:  # a few tokens of each prompt warm up
            decode(backend, [prompt], config, StopRules(8, bench.rules.eos_ids))
        for data, prompts in bench.prompts.items():
            memory = SharedMemory()
            done = [decode(backend, [prompt], config, bench.rules, memory) for prompt in prompts]
            outputs = [one.outputs[0] for one in done]
            same = sum(map(list.__eq__, outputs, plain.setdefault(data, outputs)))
            record = {"method": name, "set": data, **summary([one.stats for one in done]), "as_autoregressive": same}
            bench.add(record | gap(backend, prompts, done, record["ms_per_step"]))


def summary(stats: Sequence[Stats]) -> dict[str, Any]:
    """Totals over the prompts; tokens per second from prompt to last token, prefill included."""
    total = Stats.total(stats)
    first = [s.first_token_seconds for s in stats]
    return {
        "prompts": len(stats), "tokens": total.generated_tokens, "steps": total.steps,
        "S": round(total.compression, 3), "K": round(total.tokens_per_step, 1),
        "tok_s": round(total.tokens_per_second, 1),
        "answers": [[s.generated_tokens, round(s.seconds, 5)] for s in stats],
        "first_ms": round(1e3 * statistics.median(first), 2),
        "ms_per_step": round(1e3 * (total.seconds - sum(first)) / max(1, total.steps - len(stats)), 3),
        "propose_ms": round(1e3 * total.propose_seconds / total.steps, 3),
        "absorb_ms": round(1e3 * total.absorb_seconds / total.steps, 3),
    }  # fmt: skip


def gap(
    backend: GraphBackend, prompts: Sequence[Sequence[int]], done: Sequence[Decoded], ms_per_step: float
) -> dict[str, Any]:
    """What of a step the device does not work: the host, the launch, and waiting for each other.

    `device_ms` is the mean time of the captured steps that ran, each size as often as it ran, timed at the mean
    context. The steps that carried a prompt are left out, as they are of `ms_per_step`.
    """
    used = Counter(bucket(size) for one in done for size in one.step_sizes[1:])
    if not used:
        return {}
    pairs = list(zip(prompts, done, strict=True))
    middle = round(statistics.mean(len(prompt) + len(one.outputs[0]) / 2 for prompt, one in pairs))
    device = sum(step_ms(backend, size, middle)[0] * times for size, times in used.items()) / sum(used.values())
    return {
        "sizes": {str(size): times for size, times in sorted(used.items())}, "mean_context": middle,
        "device_ms": round(device, 3), "gap_ms": round(ms_per_step - device, 3),
        "gap_percent": round(100 * (ms_per_step - device) / ms_per_step, 1),
    }  # fmt: skip
