"""From the cost curve, the trials and the laws to a predicted speed of every candidate.

    time of an answer of T tokens = first step + (T / S - 1) x time of a step

A candidate that was run has its own S, and its time of a step is the mean of t(K) over the sizes of its very steps,
times what such steps took more than the curve says (host time, longer prefixes, a busy machine), relative to plain
decoding in the same rounds. For the others S comes from a law fitted to those that were run, K from how full their
steps were, and the factor from those of the same kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lookahead.tune.candidates import (
    AUTOREGRESSIVE,
    DEFAULT_S,
    FILLED,
    PAPER_FILL,
    PAPERS,
    Candidate,
    Estimate,
    at,
    default_tokens,
    follow,
    paper_tokens,
    prior,
)
from lookahead.tune.scaling_law import PAPER, Point, ScalingLaw, fit
from lookahead.tune.trials import Trial

TRUST = 0.25
"""How far few noisy points may move alpha: as if S were known to 0.05 and alpha to 0.1 beforehand."""


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
    """What the trials say about candidates that were not run."""

    paper: ScalingLaw
    points: tuple[Point, ...]
    paper_fill: float
    default_s: Callable[[float], float]
    default_k: Callable[[float], float]


def learn(trials: Mapping[Candidate, Trial]) -> Laws:
    """Fit the laws to the candidates that were run."""
    papers = [(one.config, trial) for one, trial in trials.items() if one.kind == PAPERS]
    whole = [(one.config.budget, trial) for one, trial in trials.items() if one.kind == FILLED]
    points = tuple(Point(c.window, c.ngram, c.guesses, trial.compression) for c, trial in papers)
    room = sum(paper_tokens(c, 1.0) - c.window_tokens for c, _ in papers)
    held = sum(trial.step_tokens - c.window_tokens for c, trial in papers)
    gain = follow(lambda k: DEFAULT_S.predict(k) - 1, {k: trial.compression - 1 for k, trial in whole})
    return Laws(
        paper=fit(points, PAPER, TRUST),
        points=points,
        paper_fill=held / room if room else PAPER_FILL,
        default_s=lambda k: 1 + gain(k),
        default_k=follow(default_tokens, {k: trial.step_tokens for k, trial in whole}),
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
        trial = trials.get(one)
        if trial is not None:
            basis, guess = "measured", Estimate(trial.compression, trial.step_tokens)
            step = scale * trial.factor * trial.curve_seconds(table)
            start = trial.first_seconds
        else:
            basis, guess = ("law" if _kin(one, trials) else "prior"), _estimate(one, table, trials, laws)
            step = scale * _factor(one, guess, trials) * at(table, guess.step_tokens)
            start = first + max(0.0, step - scale * table[0])
        seconds = start + max(0.0, length / guess.compression - 1) * step
        found.append(
            Prediction(one, basis, guess.step_tokens, guess.compression, step, length / seconds, base / seconds)
        )
    return sorted(found, key=lambda p: -p.speedup)


def plain_scale(plain: Trial | None, table: Sequence[float]) -> float:
    """What a plain step takes here over what the curve says."""
    if plain is None:
        return 1.0
    factors = sorted(f for f in (run.factor(table) for run in plain.runs) if math.isfinite(f))
    return factors[len(factors) // 2] if factors else 1.0


def _kin(one: Candidate, trials: Mapping[Candidate, Trial]) -> list[tuple[Candidate, Trial]]:
    return [(other, trial) for other, trial in trials.items() if other.kind == one.kind]


def _estimate(one: Candidate, table: Sequence[float], trials: Mapping[Candidate, Trial], laws: Laws) -> Estimate:
    """S and K of a candidate that was not run."""
    config = one.config
    if one.kind == PAPERS:
        s = laws.paper.predict(config.window, config.ngram, config.guesses)
        return Estimate(s, paper_tokens(config, laws.paper_fill))
    if one.kind == FILLED:
        return Estimate(laws.default_s(config.budget), laws.default_k(config.budget))
    kin = _kin(one, trials)
    if kin:  # of the fitted default a smaller budget was run: a larger one does as well
        return Estimate(kin[-1][1].compression, kin[-1][1].step_tokens)
    return prior(one, table)


def _factor(one: Candidate, guess: Estimate, trials: Mapping[Candidate, Trial]) -> float:
    """What steps of this kind and size took more than the curve says, as far as some were run."""
    known = {trial.step_tokens: trial.factor for _, trial in _kin(one, trials)}
    if not known:
        known = {trial.step_tokens: trial.factor for trial in trials.values()}
    return follow(lambda _: 1.0, known)(max(guess.step_tokens, 1.0))
