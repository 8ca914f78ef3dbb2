"""`recycle`: the top-8 of rows computed anyway, kept per token and grown best-first into the rest of the budget."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from lookahead.algorithm.draft import Draft, Successors, Table
from lookahead.algorithm.native import build as native
from lookahead.algorithm.native.drafter import Key, NativeMemory, Row
from lookahead.algorithm.sampling import LEVELS
from lookahead.algorithm.sources.calibration import Calibration, Outcome
from lookahead.algorithm.tree import TokenTree

TOP = 8
"""Successors kept per row."""

LIMIT = 300_000
"""Keys kept, for a request and for a model, before the oldest go: 32 MB in C, 102 MB in a dict, each."""


class DictMemory(dict[Key, Row]):
    """The last token, or the last two or three -> what the model found likely after them; oldest key first.

    `NativeMemory` is the same in C.
    """

    def keep(
        self,
        tree: TokenTree,
        before: tuple[int, int],
        top: Sequence[Row] | npt.NDArray[np.int32],
    ) -> None:
        """Keep the `top` of a tree's needed rows under their nodes' last three, two and one tokens; newest wins.

        `before` are the two tokens before the root, -1 where there is none.
        """
        top = list(map(tuple, top.tolist())) if isinstance(top, np.ndarray) else top
        tokens, parents = tree.tokens, tree.parents
        for node, row in zip(tree.needed, top, strict=True):
            token, parent = tokens[node], parents[node]
            if parent > 0:
                one, two = tokens[parent], tokens[parents[parent]]
            elif parent == 0:
                one, two = tokens[0], before[1]
            else:
                two, one = before
            self[two, one, token] = self[one, token] = self[token] = row

    def forget(self, limit: int) -> None:
        """Let the oldest keys go beyond the limit."""
        for key in list(islice(self, max(0, len(self) - limit))):
            del self[key]


Memory = DictMemory | NativeMemory


def new_memory() -> Memory:
    """An empty one; in C where that can be had."""
    return DictMemory() if native.library() is None else NativeMemory()


class RecycleSource:
    """Each computed row tells what the model finds likely after its token; that is a draft model for free.

    A row is kept under its last three, its last two and its last token, newest wins. Keys of three and two tokens are
    asked first, in the request's own rows and then in `shared`, what earlier requests of the model left there; one
    token alone is the last resort. (Own pairs before shared triples: S 3.94 on MT-Bench, the other way round 3.78.)
    With no `shared` memory (scope 'request') nothing outlives the request.

    `last` holds the rows of the last step, in a small memory that is soon filled. They go into the large ones, where it
    takes longer, while the next step runs.

    Privacy: shared rows hold likely continuations of other requests' text. They can never reach an output, but they
    change how *fast* a text that resembles them is generated, and whoever can measure that can guess at them. A server
    that mixes users should keep the scope at 'request'.
    """

    # By probability level of the kept row, for keys of three, two and one tokens. The last two are the rates reached
    # after 20 MT-Bench and 20 HumanEval answers of the embedded model; the first is a guess somewhat above the second.
    PRIORS = (
        (0.80, 0.50, 0.38, 0.28, 0.18, 0.12, 0.10, 0.08, 0.05, 0.03, 0.025, 0.02, 0.015, 0.01, 0.005, 0.003),
        (0.70, 0.36, 0.27, 0.17, 0.10, 0.08, 0.07, 0.06, 0.03, 0.02, 0.015, 0.01, 0.007, 0.006, 0.003, 0.002),
        (0.34, 0.24, 0.15, 0.12, 0.09, 0.07, 0.06, 0.05, 0.05, 0.01, 0.015, 0.01, 0.005, 0.004, 0.003, 0.002),
    )

    def __init__(self, shared: Memory | None, calibration: Calibration) -> None:
        # All of a kind: a draft asks them in C, or in Python.
        self.memory: Any = new_memory() if shared is None else type(shared)()
        self.shared: Any = shared
        self.last: Any = type(self.memory)()
        self._kept: tuple[Any, ...] | None = None  # what the large memories do not have yet
        self.calibration = calibration
        own = [rate for rates in self.PRIORS for rate in rates]
        self.origin = calibration.prior("recycle", own + own)
        starts = range(self.origin, self.origin + 6 * LEVELS, LEVELS)
        self.origins = [list(range(start, start + LEVELS)) for start in starts]

    def start(self, prompt: Sequence[int]) -> None:
        pass

    def propose(self, text: list[int], draft: Draft) -> None:
        if isinstance(self.memory, NativeMemory):
            draft.memories = self.last, self.memory, self.shared, self.origin
        else:
            draft.successors = self.successors()

    def successors(self) -> Successors:
        """Which row answers: longer keys first, the request's own rows before what others left (`look_up` in C)."""
        rates = self.calibration.rates
        own3, own2, own1, shared3, shared2, shared1 = [
            (rates[origins[0] : origins[-1] + 1].tolist(), origins) for origins in self.origins
        ]
        last, before_last = self.last, self.memory
        shared = (self.shared if self.shared is not None else {}).get

        def own(key: Key) -> Row | None:
            return last.get(key) or before_last.get(key)

        def successors(before2: int, before: int, token: int) -> tuple[Row, Table] | None:
            if row := own((before2, before, token)):
                return row, own3
            if row := own((before, token)):
                return row, own2
            if row := shared((before2, before, token)):
                return row, shared3
            if row := shared((before, token)):
                return row, shared2
            if row := own(token):
                return row, own1
            if row := shared(token):
                return row, shared1
            return None

        return successors

    def absorb(self, outcome: Outcome) -> None:
        text = outcome.text
        root = len(text) - len(outcome.accepted) - 1
        before = text[root - 2] if root > 1 else -1, text[root - 1] if root else -1
        self.learn_while_running()  # had it not been done, the rows before these would be lost
        self._kept = outcome.tree, before, outcome.top
        self.last.clear()
        self.last.keep(*self._kept)

    def learn_while_running(self) -> None:
        """The last step's rows into the large memories; `last` is asked before them, so it need not be sooner."""
        if self._kept is None:
            return
        for memory in (self.memory, self.shared):
            if memory is not None:
                memory.keep(*self._kept)
                memory.forget(LIMIT)
        self._kept = None
