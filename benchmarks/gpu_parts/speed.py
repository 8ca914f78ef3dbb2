"""speed, batch: tokens per second of our own methods, and where the time of a step goes."""

from __future__ import annotations

import gc
import statistics
from typing import Any

import torch
from batch import decode as decode_batch

from gpu_parts.bench import METHODS, Bench
from gpu_parts.measure import CountedBackend, clock_mhz, decode, replay_ms, summary, warm_up
from lookahead.algorithm.sources import SharedMemory
from lookahead.config import LookaheadConfig, StopRules

BATCHES = (1, 2, 4, 8, 16)


def speed_part(bench: Bench) -> None:
    everything = [prompt for prompts in bench.prompts.values() for prompt in prompts]
    for invariant in bench.args.invariant:
        backend = CountedBackend(bench.large, invariant=invariant)
        backend._reserve(1, max(map(len, everything)) + bench.args.new_tokens + 256)
        for name, config in METHODS.items():
            warm_up(backend, config, everything, bench.stop)
            for data, prompts in bench.prompts.items():
                memory = SharedMemory()
                backend.forget()
                done = [decode(backend, prompt, config, bench.stop, memory) for prompt in prompts]
                clock, sequences = clock_mhz(), [one.sequence for one in done]
                bench.keep(name, data, invariant, [s.output for s in sequences], [s.stats.seconds for s in sequences])
                row = {"method": name, "set": data, "invariant": invariant, **summary(done), "sm_mhz": clock}
                bench.add(row | gap(backend, row["ms_per_step"]))
        del backend
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def gap(backend: CountedBackend, ms_per_step: float) -> dict[str, Any]:
    """What of a step the device does not work: the host, the launch, and waiting for each other.

    `device_ms` is the mean time of the captured steps that ran, each size as often as it ran, replayed at about the
    mean context. The steps that carried a prompt are left out, as they are of `ms_per_step`.
    """
    used = dict(sorted(backend.used.items()))
    if not used:
        return {}
    context = round(statistics.mean(backend.contexts))
    device = sum(replay_ms(backend, size, context) * times for size, times in used.items()) / sum(used.values())
    return {
        "sizes": {str(size): times for size, times in used.items()}, "mean_context": context,
        "device_ms": round(device, 3), "gap_ms": round(ms_per_step - device, 3),
        "gap_percent": round(100 * (ms_per_step - device) / ms_per_step, 1),
    }  # fmt: skip


def batch_part(bench: Bench) -> None:
    """Total tokens per second of B prompts at once, from the first prompt in to the last token out."""
    prompts = bench.prompts["mt-bench"]
    rules = StopRules(min(96, bench.args.new_tokens), bench.lm.stop_ids)
    backend = CountedBackend(bench.large)
    longest = max(map(len, prompts)) + rules.max_tokens + 128
    for batch in BATCHES:
        chosen = [prompts[i % len(prompts)] for i in range(batch)]
        # A row for the padding when some have ended: a buffer that grows on the way would drop the captured graphs.
        backend._reserve(batch + 1, longest)
        for name, config in {
            "autoregressive": LookaheadConfig.autoregressive(),
            "default, K=128": LookaheadConfig(),
            "default, K=32": LookaheadConfig().adapted(budget=32),
            "default, K=128 shared": LookaheadConfig(shared=True),
        }.items():
            decode_batch(backend, chosen, config, rules)  # captures the graphs
            run = decode_batch(backend, chosen, config, rules)
            steps = max(stats.steps for stats in run.each)
            row = {"batch": batch, "method": name, "tok_s": round(run.speed, 1)}
            row |= {"ms_per_step": round(1e3 * run.seconds / steps, 2), "S": round(run.stats.compression, 2)}
            bench.add(row)
