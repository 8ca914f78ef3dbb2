"""The sources of guesses (`source` says what a source is), and what they share between requests."""

from __future__ import annotations

from collections.abc import Callable

from lookahead.algorithm.draft import Drafter
from lookahead.algorithm.native import choose_drafter
from lookahead.algorithm.native.drafter import NativeDrafter
from lookahead.algorithm.sources.calibration import Calibration, Trust, source_of
from lookahead.algorithm.sources.fixed_point import FixedPointSource
from lookahead.algorithm.sources.pool import JacobiSource, NGramPool, PromptSource
from lookahead.algorithm.sources.prediction import PredictionSource
from lookahead.algorithm.sources.recycle import RecycleSource
from lookahead.algorithm.sources.source import Outcome, Source
from lookahead.algorithm.sources.suffix import SuffixSource
from lookahead.algorithm.sources.text import text_in_c
from lookahead.config import LookaheadConfig


class SharedMemory:
    """What may outlive a request of one loaded model: successors, and how often each kind of guess was right."""

    def __init__(self, drafter: Drafter | None = None) -> None:
        self.drafter = drafter or choose_drafter()
        self.successors = self.drafter.new_table()
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
        "recycle": lambda: RecycleSource(memory.drafter.new_table, shared, calibration),
        "fixed-point": lambda: FixedPointSource(calibration, config.budget - 1),
    }
    sources = [make() for name, make in makers.items() if name in config.active_sources]
    return text_in_c(sources, memory.drafter) if isinstance(memory.drafter, NativeDrafter) else sources


def wants_top(config: LookaheadConfig) -> bool:
    """True when the backend has to return the top tokens of the needed nodes."""
    return "recycle" in config.active_sources


__all__ = [
    "Calibration",
    "Outcome",
    "PredictionSource",
    "SharedMemory",
    "Source",
    "Trust",
    "build",
    "source_of",
    "wants_top",
]
