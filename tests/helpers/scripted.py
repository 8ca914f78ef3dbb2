"""A model that is only a script: steps of known sizes that take known times, for tuning with nothing to wait for."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from lookahead.algorithm.cost import CostCurve
from lookahead.algorithm.sources import SharedMemory
from lookahead.backends.base import Capabilities
from lookahead.config import LookaheadConfig
from lookahead.engine.settings import RequestSettings
from lookahead.stats import Stats


@dataclass
class ScriptedBackend:
    max_length: int | None = 8192
    capabilities: Capabilities = field(default_factory=lambda: Capabilities("scripted"))
    captures = 0
    expert_reads = 0
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


@dataclass
class ScriptedModel:
    """Every step of a config has `accepts(config)` tokens in the mean, and takes `takes(size)` seconds.

    `mood` scales the time of the n-th step that the machine takes; `stalls` is how often one takes ten times as long.
    """

    takes: Callable[[int], float]
    accepts: Callable[[LookaheadConfig], float]
    mood: Callable[[int], float] = lambda _: 1.0
    stalls: float = 0.0
    name: str = "scripted"
    backend: ScriptedBackend = field(default_factory=ScriptedBackend)
    memory: SharedMemory = field(default_factory=SharedMemory)
    asked: list[tuple[Any, LookaheadConfig, RequestSettings]] = field(default_factory=list)
    steps_taken: int = 0
    rng: random.Random = field(default_factory=lambda: random.Random(5))

    def size(self, config: LookaheadConfig) -> int:
        """Steps vary in size, so that t of the mean size is not the mean of t."""
        return self.rng.randint(max(1, config.budget // 4), config.budget)

    def steps(self, prompt: Any, settings: RequestSettings) -> Iterator[Stats]:
        config, max_tokens = settings.config, settings.max_tokens
        assert config is not None
        self.asked.append((prompt, config, settings))
        stats, due = Stats(prompt_tokens=20), 0.0
        while stats.generated_tokens < max_tokens:
            size = self.size(config)
            due += self.accepts(config)
            count = min(max(1, round(due)), max_tokens - stats.generated_tokens)
            due -= count
            stats.count_step(size, count, [])
            stats.forward_seconds += self.mood(self.steps_taken) * self.takes(size) * self.stall()
            self.steps_taken += 1
            yield stats

    def stall(self) -> int:
        return 10 if self.rng.random() < self.stalls else 1


def curve(takes: Callable[[int], float]) -> CostCurve:
    sizes = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    return CostCurve(sizes, tuple(map(takes, sizes)))
