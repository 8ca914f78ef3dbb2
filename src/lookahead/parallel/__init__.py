"""Lookahead parallelism (the paper's section 3.4): several ranks, each with a full copy of the model, share every
step's tree.

import lookahead.parallel
model = lookahead.parallel.load("some/model")       # on every rank that torchrun started
answer = model.generate("Write a haiku.")           # the same on every rank
if model.rank == 0:
    print(answer.text)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lookahead.parallel.backend import Counters, ParallelBackend
    from lookahead.parallel.group import Group, join
    from lookahead.parallel.model import ParallelModel, load
    from lookahead.parallel.partition import Share, partition_tree
    from lookahead.parallel.watchdog import RankError

__all__ = [
    "Counters",
    "Group",
    "ParallelBackend",
    "ParallelModel",
    "RankError",
    "Share",
    "join",
    "load",
    "partition_tree",
]

_HOMES = {"Counters": "backend", "ParallelBackend": "backend", "Group": "group", "join": "group", "load": "model"}
_HOMES |= {"ParallelModel": "model", "Share": "partition", "partition_tree": "partition", "RankError": "watchdog"}


def __getattr__(name: str) -> Any:
    """Import names lazily, so that the process that only launches ranks never imports torch."""
    if name in _HOMES:
        return getattr(import_module(f"lookahead.parallel.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'lookahead.parallel' has no attribute {name!r}")
