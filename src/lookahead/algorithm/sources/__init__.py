"""Candidate sources: each a small class that proposes guesses and absorbs what a step showed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lookahead.algorithm.native.drafter import NativeMemory
from lookahead.algorithm.sources.calibration import Calibration, Outcome, Source, source_of
from lookahead.algorithm.sources.fixed_point import FixedPointSource
from lookahead.algorithm.sources.pool import JacobiSource, NGramPool, PoolSource, PromptSource
from lookahead.algorithm.sources.recycle import TOP, Memory, RecycleSource, new_memory
from lookahead.algorithm.sources.suffix import SuffixSource
from lookahead.algorithm.sources.text import TextSource
from lookahead.config import LookaheadConfig


class SharedMemory:
    """What may outlive a request of one loaded model: recycled rows, and how often each kind of guess was right."""

    def __init__(self) -> None:
        self.successors: Memory = new_memory()
        self.calibration = Calibration()


def build(config: LookaheadConfig, memory: SharedMemory) -> list[Source]:
    """The sources a config asks for, surest first."""
    pool = NGramPool(config.guesses)
    shared = memory.successors if config.recycle_scope == "model" else None
    calibration = memory.calibration
    makers: dict[str, Callable[[], Source]] = {
        "suffix": lambda: SuffixSource(
            calibration, config.suffix_key, config.suffix_branches, config.suffix_length, config.suffix_oldest
        ),
        "prompt": lambda: PromptSource(pool, calibration, config.ngram),
        "jacobi": lambda: JacobiSource(pool, calibration, config.ngram),
        "recycle": lambda: RecycleSource(shared, calibration),
        "fixed-point": lambda: FixedPointSource(calibration, config.budget - 1),
    }
    sources = [make() for name, make in makers.items() if name in config.active_sources]
    return in_c(sources) if isinstance(memory.successors, NativeMemory) else sources


def in_c(sources: list[Source]) -> list[Source]:
    """The same, those that follow the text as one, if C has all of what they do."""
    following: list[Any] = [source for source in sources if isinstance(source, SuffixSource | PoolSource)]
    if not following or not all(map(TextSource.stands_for, following)):
        return sources
    return [TextSource(following), *(source for source in sources if source not in following)]


def wants_top(config: LookaheadConfig) -> bool:
    """Whether the backend has to return the top rows."""
    return "recycle" in config.active_sources


__all__ = ["TOP", "Calibration", "Outcome", "SharedMemory", "Source", "build", "source_of", "wants_top"]
