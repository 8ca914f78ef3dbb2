"""Short real runs of candidates: how large their steps were, what they took and what they gave.

A shared machine is slower in one second than in the next. So the candidates of a round take turns step by step, plain
decoding among them, and each one's steps are compared with the plain ones of the same moments.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

from lookahead.algorithm.sources import SharedMemory
from lookahead.config import LookaheadConfig
from lookahead.engine.settings import RequestSettings

STALL = 3.0
"""A step this many times as slow as the run's median, for its size, was held up by something else and is left out."""


@dataclass
class Run:
    """One answer. The first step, which carries the prompt, stands apart."""

    sizes: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    first_seconds: float = 0.0
    tokens: int = 0
    steps: int = 0

    def factor(self, table: Sequence[float], steps: int | None = None) -> float:
        """Seconds of its (first) steps over those of the curve, for the very sizes it had; NaN without steps."""
        sizes, seconds = self.sizes[:steps], self.seconds[:steps]
        ratios = [taken / table[size - 1] for size, taken in zip(sizes, seconds, strict=True)]
        if not ratios:
            return math.nan
        limit = STALL * median(ratios)
        kept = [(s, t) for s, t, r in zip(sizes, seconds, ratios, strict=True) if r <= limit]
        return sum(t for _, t in kept) / sum(table[s - 1] for s, _ in kept)


def weave(
    model: Any, prompt: Any, asked: Sequence[tuple[LookaheadConfig, SharedMemory]], settings: RequestSettings
) -> list[Run]:
    """One answer by each config, a step of each in turn, through the model's own path, text and all."""
    runs = [Run() for _ in asked]
    kept = model.memory
    streams: list[Generator[None, None, None]] = []
    try:
        for run, (config, memory) in zip(runs, asked, strict=True):
            model.memory = memory  # taken at the first step
            streams.append(_watched(run, model.steps(prompt, replace(settings, config=config))))
            next(streams[-1], None)
        live = list(streams)
        while live:
            live = [stream for stream in live if next(stream, stream) is None]
    finally:
        model.memory = kept
        for stream in streams:
            stream.close()
    return runs


def _watched(run: Run, steps: Iterator[Any]) -> Generator[None, None, None]:
    """Note each step of an answer. The others' steps come between, so its own parts are added up, not the clock's."""
    size, seconds = 0, 0.0
    for stats in steps:
        taken = stats.propose_seconds + stats.forward_seconds + stats.absorb_seconds
        if run.steps:
            run.sizes.append(stats.step_tokens - size)
            run.seconds.append(taken - seconds)
        else:
            run.first_seconds = taken
        size, seconds = stats.step_tokens, taken
        run.steps, run.tokens = stats.steps, stats.generated_tokens
        yield


@dataclass
class Trial:
    """A candidate's runs, one per round. `relative` are its factors over those of plain decoding, round by round."""

    memory: SharedMemory
    runs: list[Run] = field(default_factory=list)
    relative: list[float] = field(default_factory=list)

    def add(self, one: Run, table: Sequence[float], plain: Run) -> None:
        self.runs.append(one)
        factor = one.factor(table) / plain.factor(table, len(one.sizes))
        if math.isfinite(factor):
            self.relative.append(factor)

    @property
    def compression(self) -> float:
        return sum(r.tokens for r in self.runs) / sum(r.steps for r in self.runs)

    @property
    def step_tokens(self) -> float:
        """Mean K of the steps after the first."""
        sizes = [size for r in self.runs for size in r.sizes]
        return fmean(sizes) if sizes else 1.0

    @property
    def tokens(self) -> float:
        return fmean(r.tokens for r in self.runs)

    @property
    def first_seconds(self) -> float:
        return fmean(r.first_seconds for r in self.runs)

    def curve_seconds(self, table: Sequence[float]) -> float:
        """The mean of t over the steps' sizes, which is not t of the mean size."""
        times = [table[size - 1] for r in self.runs for size in r.sizes]
        return fmean(times) if times else table[0]

    @property
    def factor(self) -> float:
        return median(self.relative) if self.relative else 1.0
