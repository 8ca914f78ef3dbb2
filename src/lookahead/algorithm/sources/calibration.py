"""What a candidate source is, and how its guesses are scored.

A source *proposes*: it writes guesses into the step's `Draft`. And it *absorbs*: it learns from what a finished step
showed. No source can change the output, only how many tokens a step accepts.

Every guess carries an *origin*, a small int that names its source and a bucket of the source's own choosing (a match
length, a depth, a probability level). `Calibration` keeps, per origin, how often such a guess was right when its parent
was; a guess's score is the product of those along its path: the estimated probability that it is accepted.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from lookahead.algorithm.native import build as native
from lookahead.algorithm.native import drafter as calls
from lookahead.algorithm.tree import TokenTree

if TYPE_CHECKING:
    from lookahead.algorithm.draft import Draft

BUCKETS = 128
"""Origins per source: origin = source index * BUCKETS + bucket."""

SOURCE_NAMES = ("jacobi", "prompt", "suffix", "recycle", "fixed-point")


@dataclass(slots=True)
class Outcome:
    """A finished step as the sources see it.

    `text` is prompt and output, this step's `accepted` tokens included. `targets` and `top` align with `tree.needed`;
    `top` is empty when no source asked for it. `ngrams` come from the window.
    """

    text: list[int]
    accepted: list[int]
    tree: TokenTree
    path: list[int]
    targets: list[int]
    top: list[tuple[int, ...]] | npt.NDArray[np.int32]
    ngrams: list[tuple[int, ...]]


class Source(Protocol):
    """Two verbs, propose and absorb; `start` sees the prompt before the first step.

    What can wait after an `absorb` is done in `meanwhile`, while the next step runs.
    """

    def start(self, prompt: Sequence[int]) -> None: ...

    def propose(self, text: list[int], draft: Draft) -> None: ...

    def absorb(self, outcome: Outcome) -> None: ...

    def learn_while_running(self) -> None: ...


class Calibration:
    """Per origin, the estimated probability that such a guess is right, given that its parent is.

    Starts from priors (see each source: some measured, some guessed) and follows the text: an average whose memory
    is at most the last `1 / FLOOR` trials of the origin.
    """

    FLOOR = 0.01
    PRIOR_TRIALS = 8

    def __init__(self) -> None:
        self.rates = array("d", [0.0]) * (BUCKETS * len(SOURCE_NAMES))
        self._trials = array("q", [self.PRIOR_TRIALS]) * len(self.rates)

    def prior(self, source: str, rates: Sequence[float]) -> int:
        """Set a source's priors, once, bucket by bucket. Returns its first origin."""
        base = SOURCE_NAMES.index(source) * BUCKETS
        if self.rates[base] == 0.0:
            self.rates[base : base + len(rates)] = array("d", rates)
        return base

    def learn(self, origin: int, right: bool) -> None:
        self._trials[origin] += 1
        step = max(1 / self._trials[origin], self.FLOOR)
        self.rates[origin] += (right - self.rates[origin]) * step

    def learn_step(self, tree: TokenTree, path: Sequence[int], accepted: Sequence[int]) -> None:
        """Learn from every guess whose parent was accepted: the root, and the nodes of the `path`.

        `accepted` are the tokens that the model wanted after each of these.
        """
        if tree.branch == len(tree):
            return
        if native.library() is not None:
            calls.learn(self.rates, self._trials, self.FLOOR, tree, path, accepted)
            return
        for parent, target in zip([0, *path], accepted, strict=True):
            for guess in tree.guesses_below(parent):
                self.learn(tree.origins[guess - tree.branch], tree.tokens[guess] == target)


def source_of(origin: int) -> str:
    """The name of the source behind an origin."""
    return SOURCE_NAMES[origin // BUCKETS]
