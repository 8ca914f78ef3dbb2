"""How good guesses are: per kind of guess, how often such a guess was right when its parent was.

Every guess carries an *origin*, a small int that names its source and a bucket of the source's own choosing (a match
length, a depth, a probability level). `Calibration` keeps one rate per origin. A guess's score is the product of the
rates along its path: the estimated probability that it is accepted.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lookahead.algorithm.tree import TokenTree
from lookahead.config import OTHER_SOURCES, SOURCES

BUCKETS = 128
"""Origins per source: origin = source index * BUCKETS + bucket."""

SOURCE_NAMES = (*SOURCES, *OTHER_SOURCES, "prediction")
"""Those of a config, and the one that a request brings."""


class Trust:
    """How many guesses were accepted for each that the scores expected, over about the last MEMORY steps.

    Rates alone expect too few: on 16 MT-Bench prompts, steps of 64 tokens expected 2.26 tokens and gave 2.54. A guess
    right below the root was accepted 1.13 times as often as its score said, and deeper ones 1.25 times, whatever their
    depth. A factor for each sequence, from its own last 16 steps, made a batch of 8 worse: S fell from 1.75 to 1.71.
    """

    MEMORY = 200
    PRIOR_GUESSES = 20.0
    """Guesses expected and accepted before the first step."""

    def __init__(self) -> None:
        self._accepted = self._expected = 0.0
        self.cell = array("d", (1.0,))  # where the C drafter reads the ratio

    @property
    def ratio(self) -> float:
        return self.cell[0]

    def learn(self, accepted: int, expected: float) -> None:
        """One more step."""
        kept = 1 - 1 / self.MEMORY
        self._accepted = kept * self._accepted + accepted
        self._expected = kept * self._expected + expected
        self._weigh()

    def counts(self) -> tuple[float, float]:
        """The accepted and the expected guesses of the last steps."""
        return self._accepted, self._expected

    def set_counts(self, accepted: float, expected: float) -> None:
        """Go on from the counts of another one."""
        self._accepted, self._expected = accepted, expected
        self._weigh()

    def _weigh(self) -> None:
        self.cell[0] = (self.PRIOR_GUESSES + self._accepted) / (self.PRIOR_GUESSES + self._expected)


class Calibration:
    """Per origin, the estimated probability that such a guess is right, given that its parent is.

    A rate starts from a prior (see each source: some measured, some guessed) and follows the text: an average over
    about the last MEMORY trials of the origin.
    """

    MEMORY = 100
    PRIOR_TRIALS = 8

    def __init__(self) -> None:
        self.rates = array("d", [0.0]) * (BUCKETS * len(SOURCE_NAMES))
        self.trust = Trust()
        self._trials = array("q", [self.PRIOR_TRIALS]) * len(self.rates)

    def prior(self, source: str, rates: Sequence[float]) -> int:
        """Set a source's priors, bucket by bucket, unless they were set before. Returns its first origin.

        There are at most BUCKETS of them, and the first must not be 0, which means that nothing was set.
        """
        base = SOURCE_NAMES.index(source) * BUCKETS
        if self.rates[base] == 0.0:
            self.rates[base : base + len(rates)] = array("d", rates)
        return base

    def numbers(self) -> dict[str, npt.NDArray[Any]]:
        """All that was learnt, as a copy that `set_numbers` takes."""
        counts = {"rates": np.array(self.rates), "trials": np.array(self._trials)}
        return {**counts, "trust": np.array(self.trust.counts())}

    def set_numbers(self, numbers: Mapping[str, npt.NDArray[Any]]) -> None:
        """Take what another calibration has learnt. Raises ValueError if it does not fit this one."""
        rates, trials, trust = numbers["rates"], numbers["trials"], numbers["trust"]
        if rates.shape != (len(self.rates),) or trials.shape != rates.shape or trust.shape != (2,):
            raise ValueError(f"{rates.shape} rates and {trials.shape} trials, not {len(self.rates)} of each")
        if not ((rates >= 0) & (rates <= 1)).all() or not (trials >= 1).all() or not (trust >= 0).all():
            raise ValueError("rates must be between 0 and 1, and trials positive")
        if not np.isfinite(trust).all():
            raise ValueError(f"trust of {trust.tolist()}")
        new_rates, new_trials = array("d", rates.tolist()), array("q", trials.tolist())  # or neither of them
        self.rates[:], self._trials[:] = new_rates, new_trials
        self.trust.set_counts(*trust.tolist())

    def learn(self, tree: TokenTree, path: Sequence[int], accepted: Sequence[int]) -> None:
        """Learn from every guess whose parent was accepted: the root, and the nodes of the `path`.

        `accepted` are the tokens that the model wanted after each of these.
        """
        tokens, origins, branch, below = tree.tokens, tree.origins, tree.branch, tree.guesses_below()
        for parent, target in zip([0, *path], accepted, strict=True):
            for guess in below.get(parent, ()):
                self.count(origins[guess - branch], tokens[guess] == target)

    def count(self, origin: int, right: bool) -> None:
        """One more trial of an origin."""
        trials = self._trials[origin] + 1
        self._trials[origin] = trials
        rate = self.rates[origin]
        self.rates[origin] = rate + (right - rate) * (1 / min(trials, self.MEMORY))


def source_of(origin: int) -> str:
    """The name of the source behind an origin."""
    return SOURCE_NAMES[origin // BUCKETS]
