"""Acceptance rates: how often each kind of draft token was right, given that its parent was.

Every draft token has an *origin*, a small int that encodes its source and a bucket that the source defines (a match
length, a depth, a probability level). `Calibration` has one rate per origin. A draft token's score is the product of
the rates along its path: the estimated probability that it is accepted.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lookahead.algorithm.tree import TokenTree
from lookahead.config import OTHER_SOURCES, SOURCES

BUCKETS = 128
"""Origins per source: origin = source index * BUCKETS + bucket."""

LONG_MATCHES = (16, 24, 32, 48, 64)
"""Matches of 1 to 12 tokens have a bucket for each length; longer ones share a bucket from each of these lengths to the
next. In replayed answers (of the embedded model; reference answers; edited files) the token after the longest match was
right in 95, 85 and 84% of cases for 12 to 15 matched tokens, and in 100, 92 and 99.9% for 64 to 95."""

MIN_SCORE = 0.0005
"""A chain ends before the first token whose score is lower: few steps take it, and adding it to the trie costs host
time. Replayed quotes, where scores are too low at the beginning of a long copy, had an S of 7.8 with 0.002, 8.5 with
0.0005 and 8.8 with 0; other texts did not differ. Drafts for 16 sequences took 157 us with chains of at most 16 tokens,
157 with 0.0005 and 162 with 0.0001."""

SOURCE_NAMES = (*SOURCES, *OTHER_SOURCES, "prediction")
"""The sources of a config, and the one of a request."""


class Trust:
    """The ratio of accepted to expected draft tokens, over about the last MEMORY steps.

    Rates alone expect too few: on 16 MT-Bench prompts, steps of 64 tokens expected 2.26 tokens and gave 2.54. A draft
    token right below the root was accepted 1.13 times as often as its score said, and deeper ones 1.25 times, at any
    depth. A factor for each sequence, from its own last 16 steps, made a batch of 8 worse: S fell from 1.75 to 1.71.
    """

    MEMORY = 200
    PRIOR_TOKENS = 20.0
    """Draft tokens counted as expected and accepted before the first step."""

    def __init__(self) -> None:
        self._accepted = self._expected = 0.0
        self.cell = array("d", (1.0,))  # where the C drafter reads the ratio

    @property
    def ratio(self) -> float:
        return self.cell[0]

    def record_step(self, accepted: int, expected: float) -> None:
        """Record one more step."""
        decay = 1 - 1 / self.MEMORY
        self._accepted = decay * self._accepted + accepted
        self._expected = decay * self._expected + expected
        self._update_ratio()

    def counts(self) -> tuple[float, float]:
        """The accepted and the expected draft tokens of the last steps."""
        return self._accepted, self._expected

    def set_counts(self, accepted: float, expected: float) -> None:
        """Continue from the `counts` of another object."""
        self._accepted, self._expected = accepted, expected
        self._update_ratio()

    def _update_ratio(self) -> None:
        self.cell[0] = (self.PRIOR_TOKENS + self._accepted) / (self.PRIOR_TOKENS + self._expected)


class Calibration:
    """For each origin, the estimated probability that such a draft token is right, given that its parent is.

    A rate starts from a prior (see each source: some are measured, some are rough estimates) and follows the text: an
    average over about the last MEMORY trials of the origin.
    """

    MEMORY = 100
    PRIOR_TRIALS = 8

    def __init__(self) -> None:
        self.rates = array("d", [0.0]) * (BUCKETS * len(SOURCE_NAMES))
        self.trust = Trust()
        self._trials = array("q", [self.PRIOR_TRIALS]) * len(self.rates)

    def set_prior(self, source: str, rates: Sequence[float]) -> int:
        """Set a source's priors, one per bucket, where no rate was set before. Returns its first origin.

        There are at most BUCKETS of them, and none may be 0, which means not set. The state of an earlier release may
        have rates for only the first buckets.
        """
        base = SOURCE_NAMES.index(source) * BUCKETS
        known = self.rates[base : base + len(rates)]
        if 0.0 in known:
            self.rates[base : base + len(rates)] = array(
                "d", [old or prior for old, prior in zip(known, rates, strict=True)]
            )
        return base

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """A copy of everything learned, for `load_state`."""
        counts = {"rates": np.array(self.rates), "trials": np.array(self._trials)}
        return {**counts, "trust": np.array(self.trust.counts())}

    def load_state(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Load the `state` of another calibration. Raises ValueError, and changes nothing, if it does not fit."""
        rates, trials, trust = state["rates"], state["trials"], state["trust"]
        if rates.shape != (len(self.rates),) or trials.shape != rates.shape or trust.shape != (2,):
            raise ValueError(f"{rates.shape} rates and {trials.shape} trials, not {len(self.rates)} of each")
        if not ((rates >= 0) & (rates <= 1)).all() or not (trials >= 1).all() or not (trust >= 0).all():
            raise ValueError("rates must be between 0 and 1, and trials positive")
        if not np.isfinite(trust).all():
            raise ValueError(f"trust of {trust.tolist()}")
        # Convert both before changing either.
        new_rates, new_trials = array("d", rates.tolist()), array("q", trials.tolist())
        self.rates[:], self._trials[:] = new_rates, new_trials
        self.trust.set_counts(*trust.tolist())

    def record_step(self, tree: TokenTree, path: Sequence[int], accepted: Sequence[int]) -> None:
        """Record every draft token below the root or below an accepted node, one of the `path`.

        `accepted` are the targets after each of these parents.
        """
        tokens, origins, branch, children = tree.tokens, tree.origins, tree.branch, tree.draft_children()
        for parent, target in zip([0, *path], accepted, strict=True):
            for node in children.get(parent, ()):
                self.record_trial(origins[node - branch], tokens[node] == target)

    def record_trial(self, origin: int, right: bool) -> None:
        """Record one more trial of an origin."""
        trials = self._trials[origin] + 1
        self._trials[origin] = trials
        rate = self.rates[origin]
        self.rates[origin] = rate + (right - rate) * (1 / min(trials, self.MEMORY))


def match_bucket(matched: int) -> int:
    """The bucket of a draft token that follows this many tokens that match (see LONG_MATCHES)."""
    return min(matched, 12) + bisect_right(LONG_MATCHES, matched)


def chain_length(rates: Sequence[float], origins: Sequence[int]) -> int:
    """How many tokens of a chain with these origins have a score of at least MIN_SCORE; not less than one."""
    score = 1.0
    for length, origin in enumerate(origins):
        score *= rates[origin]
        if score < MIN_SCORE:
            return max(1, length)
    return len(origins)


def source_of(origin: int) -> str:
    """The name of an origin's source."""
    return SOURCE_NAMES[origin // BUCKETS]
