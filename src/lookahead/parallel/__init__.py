"""Lookahead parallelism (the paper's section 3.4): several ranks, each with the whole model, share every step's tree.

import lookahead.parallel
model = lookahead.parallel.load("some/model")       # on every rank that torchrun started
answer = model.generate("Write a haiku.")           # together, and the same on each
if model.rank == 0:
    print(answer.text)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lookahead.parallel.backend import Counters, ParallelBackend
    from lookahead.parallel.deal import Share, deal
    from lookahead.parallel.group import Group, join
    from lookahead.parallel.model import ParallelModel, load
    from lookahead.parallel.watch import RankError

__all__ = ["Counters", "Group", "ParallelBackend", "ParallelModel", "RankError", "Share", "deal", "join", "load"]

_HOMES = {"Counters": "backend", "ParallelBackend": "backend", "Share": "deal", "Group": "group", "join": "group"}
_HOMES |= {"ParallelModel": "model", "load": "model", "RankError": "watch"}


def __getattr__(name: str) -> Any:
    """Import a name when it is first used, so that the process that only starts ranks never imports torch."""
    if name in _HOMES:
        return getattr(import_module(f"lookahead.parallel.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'lookahead.parallel' has no attribute {name!r}")
