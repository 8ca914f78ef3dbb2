"""`recycle`: stores the top tokens of every needed node as successors, with which the drafter continues any path."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from lookahead.algorithm.draft import Candidates
from lookahead.algorithm.sources.calibration import Calibration
from lookahead.algorithm.sources.source import Outcome
from lookahead.algorithm.successors import BEFORE_TEXT, SuccessorTable, SuccessorTables
from lookahead.algorithm.tree import TokenTree

KEY_LIMIT = 300_000
"""The most keys of a request's table, and of a model's: 32 MB in C, 102 MB in a dict, each. The oldest are evicted."""


class RecycleSource:
    """The top tokens of every needed node are what the model would generate there. They serve as a free draft model.

    Successors are stored under the last three, two and one tokens before them; newer ones replace older ones. The
    request's own are looked up before those of the `shared` table, which earlier requests of the model filled (see
    `SuccessorTables.look_up`). Without a `shared` table (scope 'request') nothing outlives the request. For a token
    that the request has not seen, the model's `bigrams` come before the shared successors of that token alone.

    The table of the last step is filled immediately, because it is small. The large tables take longer and are filled
    while the next step runs.

    Privacy: shared successors contain likely continuations of other requests' text. They can never reach an output, but
    a text that resembles them is generated *faster*, and a client that measures this can infer them. A server with
    several users should keep the scope at 'request'.
    """

    proposes_once = True
    # By probability level of a successor, for keys of three, two and one tokens. The last two are the rates reached
    # after 20 MT-Bench and 20 HumanEval answers of the embedded model; the first is estimated from the second.
    PRIORS = (
        (0.80, 0.50, 0.38, 0.28, 0.18, 0.12, 0.10, 0.08, 0.05, 0.03, 0.025, 0.02, 0.015, 0.01, 0.005, 0.003),
        (0.70, 0.36, 0.27, 0.17, 0.10, 0.08, 0.07, 0.06, 0.03, 0.02, 0.015, 0.01, 0.007, 0.006, 0.003, 0.002),
        (0.34, 0.24, 0.15, 0.12, 0.09, 0.07, 0.06, 0.05, 0.05, 0.01, 0.015, 0.01, 0.005, 0.004, 0.003, 0.002),
    )
    # For bigrams, an estimate. After 8 MT-Bench answers the first four were 0.49, 0.35, 0.20 and 0.13.
    BIGRAM_PRIOR = (0.55, 0.40, 0.28, 0.20, 0.15, 0.10, 0.08, 0.06, 0.04, 0.03, 0.02, 0.015, 0.01, 0.007, 0.005, 0.003)

    def __init__(
        self,
        new_table: Callable[[], SuccessorTable],
        shared: SuccessorTable | None,
        calibration: Calibration,
        bigrams: SuccessorTable | None = None,
    ) -> None:
        own = [rate for rates in self.PRIORS for rate in rates]
        first_origin = calibration.set_prior("recycle", [*own, *own, *self.BIGRAM_PRIOR])
        self.tables = SuccessorTables(new_table(), new_table(), shared, first_origin, bigrams)
        self.learns_early = self.tables.last.learns_early
        self._deferred: tuple[TokenTree, tuple[int, int], npt.NDArray[np.int32]] | None = None

    def start(self, prompt: Sequence[int]) -> None:
        pass

    def propose(self, text: list[int], candidates: Candidates) -> None:
        candidates.tables = self.tables

    def learn_from(self, outcome: Outcome) -> None:
        text, top = outcome.text, outcome.top
        if top is None:
            raise ValueError("the source 'recycle' needs the likeliest tokens of every step")
        root = len(text) - len(outcome.accepted) - 1
        before = text[root - 2] if root > 1 else BEFORE_TEXT, text[root - 1] if root else BEFORE_TEXT
        if self._deferred is not None:
            self.learn_while_running()  # the engine did not call it, and the previous step would be lost
        self._deferred = outcome.tree, before, top
        if not outcome.learned:
            self.tables.last.store_step(outcome.tree, before, top, True)

    def learn_while_running(self) -> None:
        """Store the last step's successors in the large tables; until then they are found in `last`."""
        if self._deferred is None:
            return
        for table in (self.tables.own, self.tables.shared):
            if table is not None:
                table.store_step(*self._deferred)
                table.evict(KEY_LIMIT)
        self._deferred = None
