"""The sources of draft tokens (`source` defines what a source is), and the memory they share between requests."""

from __future__ import annotations

from lookahead.algorithm.sources.calibration import Calibration, Trust, source_of
from lookahead.algorithm.sources.memory import SharedMemory
from lookahead.algorithm.sources.prediction import PredictionSource
from lookahead.algorithm.sources.source import Outcome, Source
from lookahead.algorithm.sources.table import build_sources, wants_top

__all__ = [
    "Calibration",
    "Outcome",
    "PredictionSource",
    "SharedMemory",
    "Source",
    "Trust",
    "build_sources",
    "source_of",
    "wants_top",
]
