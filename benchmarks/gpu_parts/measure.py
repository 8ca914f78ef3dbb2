"""Timing on the device, a step by itself, and one counter for every method."""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gpu_parts.bench import INVARIANT
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.sources import SharedMemory
from lookahead.algorithm.tree import TokenTree
from lookahead.backends.base import StepInput
from lookahead.backends.graph.backend import GraphBackend
from lookahead.backends.graph.sizes import bucket
from lookahead.config import LookaheadConfig, SamplingParams, StopRules
from lookahead.engine.engine import Engine
from lookahead.loading.step_cost import bush


def median_ms(run: Callable[[], Any], repeats: int = 30) -> float:
    """Median device time of a call, in milliseconds, by events; three warm-up calls. Without a GPU, wall time."""
    if not torch.cuda.is_available():
        return statistics.median(wall_ms(run, 3))
    for _ in range(3):
        run()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for begin, end in marks:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in marks)


def clock_mhz() -> int | None:
    """How fast the multiprocessors run right now: by a kernel that waits so many ticks. Without a GPU, nothing."""
    if not torch.cuda.is_available():
        return None
    ticks = 4_000_000
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    torch.cuda._sleep(ticks)
    end.record()
    end.synchronize()
    return round(ticks / begin.elapsed_time(end) / 1e3)


def wall_ms(run: Callable[[], Any], repeats: int) -> list[float]:
    walls = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        walls.append(1e3 * (time.perf_counter() - begin))
    return walls


def graphed(run: Callable[[], Any]) -> Callable[[], Any]:
    """The call as a captured graph, so that launching costs nothing."""
    if not torch.cuda.is_available():
        return run
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# A step


def tree_of(count: int, vocabulary: int = 1000) -> TokenTree:
    """A tree about as deep and as wide as the default makes them, of random tokens.

    Over 37 steps of 100 tokens and more on two prompts, the default's trees were 12 deep in the mean, and a block of 64
    rows saw 101 places of nodes, counted in fours of one depth; of these trees 16 and 98.
    """
    rng, tree = random.Random(count), bush(count)
    return TokenTree([rng.randrange(vocabulary) for _ in range(count)], tree.parents, tree.depths, tree.needed)


class CountedBackend(GraphBackend):
    """The graph backend, counting the captured sizes that ran and the tokens of context they ran at.

    It, too, is made outside inference mode: the model's weights become views of what it allocates.
    """

    def __init__(self, model: Any, *, invariant: bool = INVARIANT) -> None:
        with torch.inference_mode(False):
            super().__init__(model, invariant=invariant)
        self.forget()

    def forget(self) -> None:
        self.used: Counter[int] = Counter()
        self.contexts: list[int] = []

    def launch(self, inputs: Sequence[StepInput]) -> Any:
        decoding = not any(item.trail for item in inputs)
        launched = super().launch(inputs)
        if decoding:
            self.used[launched.step.count] += 1
            self.contexts += [self.length(item.slot) for item in inputs]
        return launched


def step_of(backend: GraphBackend, slot: int, count: int, context: int) -> tuple[StepInput, Any]:
    """Run a step of this size at this context once: its input, and its shape with the graph captured."""
    item = StepInput(slot, (), tree_of(count, min(1000, backend.vocab_size)), SamplingParams(), (), top=8)
    backend._length[slot] = context
    backend.step([item])
    return item, backend._steps[1, bucket(count), True]


def replay_of(shape: Any) -> Callable[[], Any]:
    """The captured step; on a CPU, where nothing is captured, the step."""
    return shape.run if shape.graph is None else shape.graph.replay


def replay_ms(backend: GraphBackend, count: int, context: int) -> float:
    """Device time of a captured step of this size at this context."""
    slot = backend.open()
    shape = step_of(backend, slot, count, context)[1]
    device = median_ms(replay_of(shape))
    backend.close(slot)
    return device


# One counter for every method


@dataclass
class Decoded:
    """A finished sequence and the wall time of each of its steps, the first one's with the prefill."""

    sequence: DecodingSequence
    steps: list[float]


def decode(
    backend: Any,
    prompt: Sequence[int],
    config: LookaheadConfig,
    rules: StopRules,
    memory: SharedMemory,
    sampling: SamplingParams | None = None,
) -> Decoded:
    """One prompt by itself, from prompt to last token."""
    sequence = DecodingSequence(prompt, config, sampling, rules, memory=memory)
    engine, steps = Engine(backend), []
    begin = last = time.perf_counter()
    engine.add(sequence)
    while engine.running:
        engine.step()
        now = time.perf_counter()
        steps.append(now - last)
        last = now
    sequence.stats.seconds = last - begin
    sequence.stats.first_token_seconds = steps[0]
    return Decoded(sequence, steps)


def warm_up(backend: GraphBackend, config: LookaheadConfig, prompts: Sequence[Sequence[int]], stop: StopRules) -> None:
    """Capture every size the method can use, and run a few tokens of each prompt: nothing is compiled while timed."""
    longest = max(map(len, prompts)) + stop.max_tokens
    backend.prepare(min(longest, backend.max_length or longest), config.budget)
    for prompt in prompts:
        decode(backend, prompt, config, StopRules(min(8, stop.max_tokens), stop.eos_ids), SharedMemory())


def summary(done: Sequence[Decoded]) -> dict[str, Any]:
    """Totals over the prompts; tokens per second from prompt to last token, prefill included."""
    stats = [one.sequence.stats for one in done]
    tokens, steps = sum(s.generated_tokens for s in stats), sum(s.steps for s in stats)
    later = [seconds for one in done for seconds in one.steps[1:]]
    return {
        "prompts": len(done), "tokens": tokens, "steps": steps, "S": round(tokens / steps, 3),
        "tok_s": round(tokens / sum(s.seconds for s in stats), 1),
        "median_tok_s": round(statistics.median(s.tokens_per_second for s in stats), 1),
        "first_ms": round(1e3 * statistics.median(s.first_token_seconds for s in stats), 2),
        "ms_per_step": round(1e3 * sum(later) / max(1, len(later)), 3),
        "median_step_ms": round(1e3 * statistics.median(later), 3) if later else None,
        "K": round(sum(s.step_tokens for s in stats) / steps, 1),
        "propose_ms": round(1e3 * sum(s.propose_seconds for s in stats) / steps, 3),
        "absorb_ms": round(1e3 * sum(s.absorb_seconds for s in stats) / steps, 3),
        "forward_ms": round(1e3 * sum(s.forward_seconds for s in stats) / steps, 3),
    }  # fmt: skip
