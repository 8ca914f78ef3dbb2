"""Short real runs of a candidate: how large its steps were, what they took and what they gave."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from lookahead.config import LookaheadConfig
from lookahead.sources import Warmth

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

    def factor(self, table: Sequence[float]) -> float:
        """Seconds of its steps over those of the curve, for the very sizes it had; NaN without steps."""
        ratios = [taken / table[size - 1] for size, taken in zip(self.sizes, self.seconds, strict=True)]
        if not ratios:
            return math.nan
        limit = STALL * median(ratios)
        kept = [(s, t) for s, t, r in zip(self.sizes, self.seconds, ratios, strict=True) if r <= limit]
        return sum(t for _, t in kept) / sum(table[s - 1] for s, _ in kept)


def run(model: Any, prompt: Any, config: LookaheadConfig, warmth: Warmth, **settings: Any) -> Run:
    """Generate one answer through the model's own path, text and all, and look at each step."""
    found, kept = Run(), model.warmth
    model.warmth = warmth
    size, seconds = 0, 0.0
    try:
        for stats in model.steps(prompt, config=config, **settings):
            if found.steps:
                found.sizes.append(stats.step_tokens - size)
                found.seconds.append(stats.seconds - seconds)
            else:
                found.first_seconds = stats.seconds
            size, seconds = stats.step_tokens, stats.seconds
            found.steps, found.tokens = stats.steps, stats.generated_tokens
    finally:
        model.warmth = kept
    return found


@dataclass
class Trial:
    """A candidate's runs, one per round. `relative` are its factors over those of plain decoding, round by round.

    A shared machine is slower in one minute than in the next; plain decoding in the same round tells by how much.
    """

    warmth: Warmth = field(default_factory=Warmth)
    runs: list[Run] = field(default_factory=list)
    relative: list[float] = field(default_factory=list)

    def add(self, one: Run, table: Sequence[float], plain: float) -> None:
        self.runs.append(one)
        factor = one.factor(table) / plain
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
        """Mean tokens of an answer."""
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
