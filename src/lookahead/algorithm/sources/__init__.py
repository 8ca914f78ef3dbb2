"""The sources of guesses (`source` says what a source is), and what they share between requests."""

from __future__ import annotations

from lookahead.algorithm.sources.calibration import Calibration, Trust, source_of
from lookahead.algorithm.sources.memory import SharedMemory
from lookahead.algorithm.sources.prediction import PredictionSource
from lookahead.algorithm.sources.source import Outcome, Source
from lookahead.algorithm.sources.table import build, wants_top

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
