"""From the cost curve, the trials and the laws to a predicted speed of every candidate.

    time of an answer of T tokens = first step + (T / S - 1) x time of a step

docs/tuning.md says where S and the time of a step come from, for candidates that were run and for the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_high
from typing import NamedTuple

from lookahead.tune import candidates as known
from lookahead.tune.candidates import AUTOREGRESSIVE, FILLED, LOOKUP, PAPERS, Candidate, at, follow
from lookahead.tune.scaling_law import PAPER, Point, ScalingLaw, fit
from lookahead.tune.trials import Trial

TRUST = 0.25
"""How far few noisy points may move alpha: as if S were known to 0.05 and alpha to 0.1 beforehand."""


class Estimate(NamedTuple):
    """S, and tokens per step."""

    compression: float
    step_tokens: float


@dataclass(frozen=True)
class Prediction:
    """One row of the table. `basis` is 'measured' (S was), 'law' (fitted to those measured) or 'prior'."""

    candidate: Candidate
    basis: str
    step_tokens: float
    compression: float
    step_seconds: float
    tokens_per_second: float
    speedup: float


@dataclass(frozen=True)
class Laws:
    """What the trials say about candidates that were not run; without trials, what is known beforehand."""

    paper: ScalingLaw
    points: tuple[Point, ...]
    paper_fill: float
    default_s: Callable[[float], float]
    default_k: Callable[[float], float]

    def estimate(self, one: Candidate, table: Sequence[float], kin: Sequence[Trial]) -> Estimate:
        """S and K of a candidate that was not run; `kin` are the trials of its kind."""
        config = one.config
        if one.kind == AUTOREGRESSIVE:
            return Estimate(1.0, 1.0)
        if one.kind == LOOKUP:
            return Estimate(known.LOOKUP_S, known.LOOKUP_K)
        if one.kind == PAPERS:
            s = self.paper.predict(config.window, config.ngram, config.guesses)
            return Estimate(s, known.paper_tokens(config, self.paper_fill))
        if one.kind == FILLED:
            return Estimate(self.default_s(config.budget), self.default_k(config.budget))
        if kin:  # of the fitted default a smaller budget was run: a larger one does as well
            return Estimate(kin[-1].compression, kin[-1].step_tokens)
        # Fitted step by step it does at least as well as plain decoding, or as the best one size for all steps.
        sizes = [size for size in known.BUDGETS if size <= config.budget]
        expected = [Estimate(self.default_s(size), self.default_k(size)) for size in sizes]
        return max([Estimate(1.0, 1.0), *expected], key=lambda one: one.compression / at(table, one.step_tokens))


def learn(trials: Mapping[Candidate, Trial]) -> Laws:
    papers = [(one.config, trial) for one, trial in trials.items() if one.kind == PAPERS]
    whole = [(one.config.budget, trial) for one, trial in trials.items() if one.kind == FILLED]
    points = tuple(Point(c.window, c.ngram, c.guesses, trial.compression) for c, trial in papers)
    room = sum(known.paper_tokens(c, 1.0) - c.window_tokens for c, _ in papers)
    held = sum(trial.step_tokens - c.window_tokens for c, trial in papers)
    gain = follow(lambda k: known.default_s(k) - 1, {k: trial.compression - 1 for k, trial in whole})
    return Laws(
        paper=fit(points, PAPER, TRUST),
        points=points,
        paper_fill=held / room if room else known.PAPER_FILL,
        default_s=lambda k: 1 + gain(k),
        default_k=follow(known.default_tokens, {k: trial.step_tokens for k, trial in whole}),
    )


def predict(
    candidates: Sequence[Candidate], table: Sequence[float], trials: Mapping[Candidate, Trial], tokens: int
) -> list[Prediction]:
    """All candidates, fastest first. `tokens` is an answer's length where none was run."""
    laws = learn(trials)
    plain = next((trial for one, trial in trials.items() if one.kind == AUTOREGRESSIVE), None)
    length = plain.tokens if plain else float(tokens)
    # Seconds of the curve -> seconds here. Without trials the curve itself, and a first step that costs as any other.
    scale = plain_scale(plain, table)
    first = plain.first_seconds if plain else table[0]
    base = first + (length - 1) * scale * table[0]
    found = []
    for one in candidates:
        trial, kin = trials.get(one), [trial for other, trial in trials.items() if other.kind == one.kind]
        if trial is not None:
            basis, guess = "measured", Estimate(trial.compression, trial.step_tokens)
            step = scale * trial.factor * trial.curve_seconds(table)
            start = trial.first_seconds
        else:
            basis, guess = ("law" if kin else "prior"), laws.estimate(one, table, kin)
            # By how much measured steps of this kind and size exceeded the curve.
            factors = {other.step_tokens: other.factor for other in kin or trials.values()}
            factor = follow(lambda _: 1.0, factors)(max(guess.step_tokens, 1.0))
            step = scale * factor * at(table, guess.step_tokens)
            start = first + max(0.0, step - scale * table[0])
        seconds = start + max(0.0, length / guess.compression - 1) * step
        found.append(
            Prediction(one, basis, guess.step_tokens, guess.compression, step, length / seconds, base / seconds)
        )
    return sorted(found, key=lambda p: -p.speedup)


def plain_scale(plain: Trial | None, table: Sequence[float]) -> float:
    factors = [run.factor(table) for run in plain.runs] if plain else []
    return median_high([factor for factor in factors if math.isfinite(factor)] or [1.0])
