"""The config that suits a model on this machine: the tuned one, or the default fitted to what a step costs."""

from __future__ import annotations

from collections.abc import Callable

from lookahead.backends.base import Backend
from lookahead.cache import cache_dir
from lookahead.config import LookaheadConfig
from lookahead.loading import profiles, step_cost


def default_config(name: str, backend: Backend, log: Callable[[str], None] | None = None) -> LookaheadConfig:
    """The config that `lookahead tune --save` chose for the model of this name; else the default, fitted."""
    tuned = profiles.find(name, backend, cache_dir(), log)
    return tuned or step_cost.fitted(LookaheadConfig(), backend, cache_dir(), log)
