"""The configs that `tune` chooses from, and what is expected of each before anything is measured on the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lookahead.config import LookaheadConfig
from lookahead.loading.step_cost import StepCost, suited
from lookahead.tune.scaling_law import PAPER, LogLaw

AUTOREGRESSIVE = "autoregressive"
LOOKUP, PAPERS, FILLED, FITTED = "prompt lookup", "paper", "default", "fitted"

SHAPES = ((4, 3), (10, 3), (5, 4), (10, 4), (5, 5), (7, 5), (10, 5), (15, 5), (20, 5), (30, 5), (20, 7))
"""(W, N) of the paper's method, G = W. The paper uses N = 5 with W = 15, 10 and 7 for 7B, 13B and 34B."""
BUDGETS = (8, 16, 32, 64, 128, 256, 512)
FITTED_BUDGETS = (128, 512)
HALF_BUDGET = 128
"""In half precision a step of more tokens is not the same text as token by token, on any backend: none is offered."""

DEFAULT_S = LogLaw((8, 16, 32, 64, 128, 256), (1.40, 1.57, 1.86, 2.17, 2.53, 2.94))
DEFAULT_FILL = {8: 0.57, 16: 0.59, 32: 0.64, 64: 0.80, 128: 0.76, 256: 0.77}
"""S of the default sources by budget, and how much of the budget their steps hold: the embedded model, three of our
prompts, 96 tokens each. Longer answers give more."""
LOOKUP_S, LOOKUP_K = 1.2, 5.6
"""Prompt lookup in the same run."""
PAPER_FILL = 0.27
"""How much of the G n-grams a step of the paper's method holds (the pool may know fewer, and they share tokens): 0.2 to
0.38 in the same run."""


@dataclass(frozen=True)
class Candidate:
    """A config under a name. `kind` says which law tells about it where it was not run."""

    name: str
    kind: str
    config: LookaheadConfig


@dataclass(frozen=True)
class Estimate:
    """Before measuring, or beside it: S, and tokens per step."""

    compression: float
    step_tokens: float


def all_candidates(cost: StepCost, context: int | None = None, *, half: bool = False) -> list[Candidate]:
    """Autoregressive, prompt lookup, the paper's (W, N, G), and the default sources by budget, whole and fitted.

    *Fitted* is what `load()` makes of the default: each step takes the guesses worth their time. Where steps cost
    nearly nothing that is the whole budget.
    """
    most = min(HALF_BUDGET if half else BUDGETS[-1], (context or 1 << 30) // 4)
    table = cost.table(BUDGETS[-1])
    found = [
        Candidate(AUTOREGRESSIVE, AUTOREGRESSIVE, LookaheadConfig.autoregressive()),
        Candidate("prompt lookup", LOOKUP, LookaheadConfig.prompt_lookup()),
    ]
    for window, ngram in SHAPES:
        config = LookaheadConfig.paper(window, ngram, window, prompt=True)
        found.append(Candidate(f"paper W={window} N={ngram} G={window}", PAPERS, config))
    whole = {budget: LookaheadConfig().adapted(budget=budget, shared=True) for budget in BUDGETS}
    found += [Candidate(f"default K={budget}", FILLED, config) for budget, config in whole.items()]
    for budget in FITTED_BUDGETS:
        # A larger budget is another config only where its steps are affordable.
        if budget == FITTED_BUDGETS[0] or table[budget // 2 - 1] <= 2.5 * table[0]:
            config = suited(whole[budget], cost)
            if config.step_cost is not None:
                found.append(Candidate(f"default K<={budget}, fitted", FITTED, config))
    return [one for one in found if one.config.budget <= max(most, 1)]


def prior(candidate: Candidate, table: Sequence[float]) -> Estimate:
    """What is expected of a model that has not been run."""
    config = candidate.config
    if candidate.kind == AUTOREGRESSIVE:
        return Estimate(1.0, 1.0)
    if candidate.kind == LOOKUP:
        return Estimate(LOOKUP_S, LOOKUP_K)
    if candidate.kind == PAPERS:
        window, ngram, guesses = config.window, config.ngram, config.guesses
        return Estimate(PAPER.predict(window, ngram, guesses), paper_tokens(config, PAPER_FILL))
    if candidate.kind == FILLED:
        return Estimate(DEFAULT_S.predict(config.budget), default_tokens(config.budget))
    # Fitted step by step it does at least as well as plain decoding, or as the best one size for all steps.
    sizes = [budget for budget in BUDGETS if budget <= config.budget]
    expected = [Estimate(DEFAULT_S.predict(size), default_tokens(size)) for size in sizes]
    return max([Estimate(1.0, 1.0), *expected], key=lambda one: one.compression / at(table, one.step_tokens))


def follow(prior_of: Callable[[float], float], known: Mapping[Any, float]) -> Callable[[float], float]:
    """The prior, scaled to pass through what is known; between known places the scale is a straight line in log x."""
    ratios = sorted((x, value / prior_of(x)) for x, value in known.items())

    def value(x: float) -> float:
        if not ratios:
            return prior_of(x)
        above = next((i for i, (place, _) in enumerate(ratios) if place >= x), len(ratios))
        if above in (0, len(ratios)):
            return prior_of(x) * ratios[min(above, len(ratios) - 1)][1]
        (a, low), (b, high) = ratios[above - 1], ratios[above]
        return prior_of(x) * (low + (high - low) * math.log(x / a) / math.log(b / a))

    return value


def default_tokens(budget: float) -> float:
    """Tokens per step of the default sources, the whole budget used."""
    return max(1.0, budget * follow(lambda _: 1.0, DEFAULT_FILL)(budget))


def paper_tokens(config: LookaheadConfig, fill: float) -> float:
    """Tokens per step: the window's, and the part of the guesses that is there."""
    return config.window_tokens + fill * config.guesses * (config.ngram - 1)


def at(table: Sequence[float], size: float) -> float:
    """t(K) for a K between whole numbers."""
    low = min(int(size), len(table))
    high = min(low + 1, len(table))
    return table[low - 1] + (size - low) * (table[high - 1] - table[low - 1])
