"""Candidate sources: each a small class that proposes guesses and absorbs what a step showed."""

from __future__ import annotations

from collections.abc import Callable

from lookahead.config import LookaheadConfig
from lookahead.sources.base import Calibration, Outcome, Source, source_of
from lookahead.sources.fixed_point import FixedPointSource
from lookahead.sources.pool import JacobiSource, NGramPool, PromptSource
from lookahead.sources.recycle import TOP, Memory, RecycleSource, new_memory
from lookahead.sources.suffix import SuffixSource


class Warmth:
    """What may outlive a request of one loaded model: recycled rows, and how often each kind of guess was right."""

    def __init__(self) -> None:
        self.memory: Memory = new_memory()
        self.calibration = Calibration()


def build(config: LookaheadConfig, warmth: Warmth) -> list[Source]:
    """The sources a config asks for, surest first."""
    pool = NGramPool(config.guesses)
    shared = warmth.memory if config.recycle_scope == "model" else None
    calibration = warmth.calibration
    makers: dict[str, Callable[[], Source]] = {
        "suffix": lambda: SuffixSource(
            calibration, config.suffix_key, config.suffix_branches, config.suffix_length, config.suffix_oldest
        ),
        "prompt": lambda: PromptSource(pool, calibration, config.ngram),
        "jacobi": lambda: JacobiSource(pool, calibration, config.ngram),
        "recycle": lambda: RecycleSource(shared, calibration),
        "fixed-point": lambda: FixedPointSource(calibration, config.budget - 1),
    }
    return [make() for name, make in makers.items() if name in config.active_sources]


def wants_top(config: LookaheadConfig) -> bool:
    """Whether the backend has to return the top rows."""
    return "recycle" in config.active_sources


__all__ = ["TOP", "Calibration", "Outcome", "Source", "Warmth", "build", "source_of", "wants_top"]
