"""The configs that `tune` chooses from, and what is known of their S and K before any is run on the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lookahead.algorithm.budget import fit_config, for_bigrams, weighing_curve, without_cost
from lookahead.algorithm.cost import CostCurve
from lookahead.config import LookaheadConfig

AUTOREGRESSIVE = "autoregressive"
LOOKUP, PAPERS, FILLED, FITTED = "prompt lookup", "paper", "default", "fitted"

SHAPES = ((4, 3), (10, 3), (5, 4), (10, 4), (5, 5), (7, 5), (10, 5), (15, 5), (20, 5), (30, 5), (20, 7))
"""(W, N) of the paper's method, G = W. The paper uses N = 5 with W = 15, 10 and 7 for 7B, 13B and 34B."""
BUDGETS = (8, 16, 32, 64, 128, 256, 512)
FITTED_BUDGETS = (128, 512)
HALF_BUDGET = 128
"""In half precision no larger step is offered on a backend that states no limit: none of them is exact there."""

DEFAULT_S = {1: 1.0, 8: 1.40, 16: 1.57, 32: 1.86, 64: 2.17, 128: 2.53, 256: 2.94, 512: 3.35}
DEFAULT_FILL = {8: 0.57, 16: 0.59, 32: 0.64, 64: 0.80, 128: 0.76, 256: 0.77}
"""S of the default sources by budget, and how much of the budget their steps hold: the embedded model, three of our
prompts, 96 tokens each. Longer answers give more. S at 512 is what the line from 128 to 256 leads to."""
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


def all_candidates(
    cost: CostCurve,
    context: int | None = None,
    *,
    half: bool = False,
    nodes: int | None = None,
    depth: int | None = None,
    bigrams: bool = False,
) -> list[Candidate]:
    """Autoregressive, prompt lookup, the paper's (W, N, G), and the default sources by budget, whole and fitted.

    *Fitted* is what `load()` makes of the default: each step takes the guesses worth their time. Where steps cost
    nearly nothing that is the whole budget. `nodes` and `depth` are the backend's `exact_nodes` and
    `exact_depth`: larger steps are not offered. With the model's `bigrams` the default has no window.
    """
    most = min(nodes or (HALF_BUDGET if half else BUDGETS[-1]), (context or 1 << 30) // 4, BUDGETS[-1])
    table = cost.table(BUDGETS[-1])
    found = [
        Candidate(AUTOREGRESSIVE, AUTOREGRESSIVE, LookaheadConfig.autoregressive()),
        Candidate("prompt lookup", LOOKUP, LookaheadConfig.prompt_lookup()),
    ]
    for window, ngram in SHAPES:
        config = LookaheadConfig.paper(window, ngram, window, prompt=True)
        found.append(Candidate(f"paper W={window} N={ngram} G={window}", PAPERS, config))
    default = for_bigrams(LookaheadConfig()) if bigrams else LookaheadConfig()
    whole = {budget: without_cost(default.adapted(budget=budget)) for budget in BUDGETS}
    found += [Candidate(f"default K={budget}", FILLED, config) for budget, config in whole.items()]
    fitted = set[int]()
    for budget in FITTED_BUDGETS:
        # A larger budget is another config only where its steps are affordable.
        if budget == FITTED_BUDGETS[0] or table[budget // 2 - 1] <= 2.5 * table[0]:
            largest = min(budget, nodes or budget)
            config = fit_config(default.adapted(budget=largest), cost)
            if weighing_curve(config) is not None and largest not in fitted:
                fitted.add(largest)
                found.append(Candidate(f"default K<={largest}, fitted", FITTED, config))
    return [replace(one, config=one.config.within(None, depth)) for one in found if one.config.budget <= max(most, 1)]


def follow(prior_of: Callable[[float], float], known: Mapping[Any, float]) -> Callable[[float], float]:
    """The prior, scaled to pass through what is known; between known places the scale is a straight line in log x."""
    if not known:
        return prior_of
    places = sorted(known)
    ratios = [known[x] / prior_of(x) for x in places]
    return lambda x: prior_of(x) * float(np.interp(math.log(x), np.log(places), ratios))


default_s = follow(lambda _: 1.0, DEFAULT_S)
"""S of the default sources by their budget, a straight line in log K between the known ones."""


def default_tokens(budget: float) -> float:
    """Tokens per step of the default sources, the whole budget used."""
    return max(1.0, budget * follow(lambda _: 1.0, DEFAULT_FILL)(budget))


def paper_tokens(config: LookaheadConfig, fill: float) -> float:
    """Tokens per step: the window's, and the part of the guesses that is there."""
    return config.window_tokens + fill * config.guesses * (config.ngram - 1)


def at(table: Sequence[float], size: float) -> float:
    """t(K) for a K between whole numbers."""
    return float(np.interp(size, range(1, len(table) + 1), table))
