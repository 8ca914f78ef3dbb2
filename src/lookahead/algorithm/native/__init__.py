"""The drafter in C, compiled at first use, and the one place that chooses between it and the Python one.

At batch 1 on a GPU the host's part of a step stands between two runs of the device. In Python the search and the tables
of successors would take a fifth of such a step.
"""

from __future__ import annotations

from lookahead.algorithm.draft import Drafter
from lookahead.algorithm.native.build import library
from lookahead.algorithm.native.drafter import NativeDrafter
from lookahead.algorithm.search import PythonDrafter


def choose_drafter() -> Drafter:
    """The C drafter where the machine can build it, else the Python one, which gives the same guesses in more time."""
    compiled = library()
    return PythonDrafter() if compiled is None else NativeDrafter(compiled)
