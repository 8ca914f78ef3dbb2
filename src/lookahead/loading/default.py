"""The default config of a model on this machine: a tuned profile, or the default fitted to the measured cost of a step;
and the cost of a pass shared by several sequences."""

from __future__ import annotations

from collections.abc import Callable

from lookahead.algorithm.budget import weighing_curve
from lookahead.algorithm.choice import DraftBudget
from lookahead.algorithm.cost import CostCurve, PassCost
from lookahead.backends.base import Backend
from lookahead.backends.exact import default_within, exact_config
from lookahead.cache import cache_dir
from lookahead.config import LookaheadConfig
from lookahead.loading import profiles
from lookahead.loading.fitting import fitted, pass_cost


def tuned_config(name: str, backend: Backend, log: Callable[[str], None] | None = None) -> LookaheadConfig | None:
    """The config that `lookahead tune --save` chose for the model of this name, or None."""
    tuned = profiles.find(name, backend, cache_dir(), log)
    if tuned is not None:
        try:
            return exact_config(tuned, backend, log)
        except ValueError as error:
            if log is not None:
                log(f"note: the tuned profile is not used: {error}")
    return None


def fitted_default(backend: Backend, log: Callable[[str], None] | None = None) -> LookaheadConfig:
    """The default config, fitted to what a step costs."""
    return fitted(default_within(backend), backend, cache_dir(), log)


def fit_budget(
    budget: DraftBudget, backend: Backend, config: LookaheadConfig, log: Callable[[str], None] | None = None
) -> None:
    """Let an engine's budget know what passes cost, for requests with the default config.

    It is guarded where steps are chains. Their curve does not know everything: a refused chain runs again, in front of
    a chain that would otherwise be longer, and what is copied before every chain grows with the text.
    """
    budget.cost = batch_cost(backend, config, log)
    budget.guarded = budget.cost is not None and not backend.capabilities.branches


def batch_cost(backend: Backend, config: LookaheadConfig, log: Callable[[str], None] | None = None) -> PassCost | None:
    """What a pass costs by its total number of rows, for the engine's `DraftBudget`.

    None where a pass is padded to its longest input, and for the graph backend on a CPU, where it is only tested. On
    the CPU backend a pass takes as long as a step of one sequence with as many tokens, which is in the default config.
    So it does where steps are chains, which are those of one sequence.
    """
    sizes = backend.capabilities.row_sizes
    if not backend.capabilities.branches:
        return None if config.step_cost is None else PassCost(config.step_cost)
    if backend.capabilities.pads:
        return None
    if not sizes:
        times = weighing_curve(config)
        if times is None:
            return None
        return PassCost(CostCurve(tuple(range(1, len(times) + 1)), times).table(backend.most_rows))
    if backend.device.type == "cpu":
        return None
    return pass_cost(backend, cache_dir(), log)
