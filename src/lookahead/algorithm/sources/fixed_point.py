"""Jacobi decoding (Algorithm 1) as a source: it proposes the last iterate as one chain."""

from __future__ import annotations

from collections.abc import Sequence

from lookahead.algorithm.draft import Candidates
from lookahead.algorithm.sources.calibration import Calibration
from lookahead.algorithm.sources.source import Outcome


class FixedPointSource:
    """Jacobi iteration on a block of future tokens: y^i = argmax P(y | y^{i-1}). Tokens that no longer change are
    accepted.

    The first iterate, and the end of a block after some of it was accepted, are filled with the prompt's last token.
    """

    proposes_once, learns_early = False, False

    def __init__(self, calibration: Calibration, block: int) -> None:
        self.block = block
        self.origin = calibration.set_prior("fixed-point", (0.5,))
        self.iterate: list[int] = []

    def start(self, prompt: Sequence[int]) -> None:
        self.filler = prompt[-1]
        self.iterate = [self.filler] * self.block

    def learn_while_running(self) -> None:
        pass

    def propose(self, text: list[int], candidates: Candidates) -> None:
        candidates.add_chain(self.iterate, [self.origin] * len(self.iterate))

    def learn_from(self, outcome: Outcome) -> None:
        """The new iterate: the targets after the accepted part, then the filler."""
        beyond = outcome.targets[len(outcome.path) + 1 :]
        self.iterate = beyond + [self.filler] * (self.block - len(beyond))
