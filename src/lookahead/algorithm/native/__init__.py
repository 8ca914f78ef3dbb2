"""The drafter in C, compiled at first use, and the choice between it and the Python one.

At batch size 1 on a GPU the device waits for the host between two steps. In Python the search and the tables of
successors would take a fifth of such a step.
"""

from __future__ import annotations

from lookahead.algorithm.draft import Drafter
from lookahead.algorithm.native.build import library
from lookahead.algorithm.native.drafter import NativeDrafter
from lookahead.algorithm.search import PythonDrafter


def choose_drafter() -> Drafter:
    """The C drafter if it can be built, else the Python one, which is slower and gives the same draft tokens."""
    compiled = library()
    return PythonDrafter() if compiled is None else NativeDrafter(compiled)
