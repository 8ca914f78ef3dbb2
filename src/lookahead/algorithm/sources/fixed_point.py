"""Jacobi decoding (Algorithm 1) as a candidate source: the last iterate is the one guess."""

from __future__ import annotations

from collections.abc import Sequence

from lookahead.algorithm.draft import Draft
from lookahead.algorithm.sources.calibration import Calibration
from lookahead.algorithm.sources.source import Outcome


class FixedPointSource:
    """y^i = argmax P(y | y^{i-1}) on a block of future tokens; the part that did not change is the fixed point.

    The start and what enters at the block's end are the prompt's last token.
    """

    def __init__(self, calibration: Calibration, block: int) -> None:
        self.block = block
        self.origin = calibration.prior("fixed-point", (0.5,))
        self.iterate: list[int] = []

    def start(self, prompt: Sequence[int]) -> None:
        self.filler = prompt[-1]
        self.iterate = [self.filler] * self.block

    def learn_while_running(self) -> None:
        pass

    def propose(self, text: list[int], draft: Draft) -> None:
        draft.add_chain(self.iterate, [self.origin] * len(self.iterate))

    def absorb(self, outcome: Outcome) -> None:
        """Targets of the chain after the accepted part are the new iterate, one position further each."""
        beyond = outcome.targets[len(outcome.path) + 1 :]
        self.iterate = beyond + [self.filler] * (self.block - len(beyond))
