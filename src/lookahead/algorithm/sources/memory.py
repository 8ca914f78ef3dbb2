"""`SharedMemory`: what the sources share between the requests of one loaded model."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lookahead.algorithm.draft import Drafter
from lookahead.algorithm.native import choose_drafter
from lookahead.algorithm.sources.calibration import Calibration
from lookahead.algorithm.successors import SuccessorTable


class SharedMemory:
    """The state of one loaded model that may outlive a request: successors, and the calibration of draft tokens.

    `bigrams` are what the model predicts after each token of its vocabulary alone, if that is known. They contain
    nothing of any request, so every memory of a model may refer to the same table.
    """

    def __init__(self, drafter: Drafter | None = None, bigrams: SuccessorTable | None = None) -> None:
        self.drafter = drafter or choose_drafter()
        self.successors = self.drafter.new_table()
        self.calibration = Calibration()
        self.bigrams = bigrams

    def set_bigrams(self, top: npt.NDArray[np.int32] | None) -> None:
        """Row i of top [V, 2 n] has the successors of token i and their levels. None: they are not known."""
        if top is not None:
            self.bigrams = self.drafter.new_table()
            self.bigrams.put_tokens(top)

    def new(self) -> SharedMemory:
        """An empty memory of the same model."""
        return SharedMemory(self.drafter, self.bigrams)
