"""`SharedMemory`: what the sources share between the requests of one loaded model."""

from __future__ import annotations

from lookahead.algorithm.draft import Drafter
from lookahead.algorithm.native import choose_drafter
from lookahead.algorithm.sources.calibration import Calibration


class SharedMemory:
    """The state of one loaded model that may outlive a request: successors, and the calibration of draft tokens."""

    def __init__(self, drafter: Drafter | None = None) -> None:
        self.drafter = drafter or choose_drafter()
        self.successors = self.drafter.new_table()
        self.calibration = Calibration()
