"""Decode prompts on a backend, below text and chat: the one loop of benchmarks that count single steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.sources import SharedMemory
from lookahead.backends.base import Backend
from lookahead.config import LookaheadConfig, SamplingParams, StopRules
from lookahead.engine.engine import Engine
from lookahead.engine.request import Request, raise_errors
from lookahead.stats import Stats


@dataclass
class Decoded:
    """Prompts that were decoded together: output and counters of each, and seconds and tokens of every step."""

    outputs: list[list[int]] = field(default_factory=list)
    each: list[Stats] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    step_sizes: list[int] = field(default_factory=list)

    @property
    def stats(self) -> Stats:
        """All of them in one. Its seconds are those from the first prompt in to the last token out."""
        total = Stats.total(self.each)
        total.seconds = sum(self.step_seconds)
        total.first_token_seconds = self.step_seconds[0]
        return total


def decode_steps(
    backend: Backend,
    prompts: Sequence[Sequence[int]],
    config: LookaheadConfig,
    rules: StopRules,
    memory: SharedMemory | None = None,
    sampling: SamplingParams | None = None,
) -> Iterator[Decoded]:
    """Decode prompts (token ids) together; yields the same object after every step."""
    engine, memory = Engine(backend), memory or SharedMemory()
    sequences = [DecodingSequence(prompt, config, sampling, rules, memory=memory) for prompt in prompts]
    for sequence in sequences:
        engine.submit(Request(sequence))
    done = Decoded([s.output for s in sequences], [s.stats for s in sequences])
    before = 0
    while engine.running:
        begin = perf_counter()
        raise_errors(engine.step())
        done.step_seconds.append(perf_counter() - begin)
        size = sum(stats.step_tokens for stats in done.each)
        done.step_sizes.append(size - before)
        before = size
        yield done
    done.outputs = [list(s.output) for s in sequences]


def decode(*args: Any, **options: Any) -> Decoded:
    """Decode prompts together, to their ends; takes what `decode_steps` takes."""
    *_, done = decode_steps(*args, **options)
    return done
