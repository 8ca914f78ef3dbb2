"""The ranks of a replica: the replica's own process is rank 0, and each of the others is a Ray actor.

Ray places them together (see `application`). They live and die together: Ray ends the actors with the replica that owns
them, and the replica exits when it loses one. Then Ray replaces it like any dead replica.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any

import ray
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import lookahead.parallel
from lookahead.parallel.launch import free_port, rank_variables
from lookahead.parallel.model import ParallelModel
from lookahead.parallel.rank_info import RankInfo
from lookahead.serve.ranks import run_follower
from lookahead.serve.ray.settings import RaySettings

log = logging.getLogger("ray.serve")

FAILED = 1
"""The exit code of a replica that has lost a rank."""


class Ranks:
    """The group as seen by rank 0. Starts the other ranks."""

    def __init__(self, settings: RaySettings) -> None:
        self._port = free_port()
        group: Any = get_current_placement_group()
        make: Any = ray.remote(num_cpus=settings.cpus, num_gpus=settings.gpus, max_restarts=0)(Rank)
        self._actors, self._ends = [], []
        for rank in range(1, settings.ranks):
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
            actor = make.options(scheduling_strategy=strategy).remote()
            self._actors.append(actor)
            self._ends.append(actor.follow.remote(settings, rank_info_of(settings, rank, self._port)))

    def load(self, settings: RaySettings) -> ParallelModel:
        """Load the model together with the other ranks, and lead the group."""
        model = load_rank(settings, rank_info_of(settings, 0, self._port))
        model.lead()
        return model

    async def exit_with_ranks(self) -> None:
        """Exit this process when any rank exits."""
        ends = [asyncio.ensure_future(_outcome(end)) for end in self._ends]
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        log.error("a rank of this replica has ended (%s); the replica exits, too", done.pop().result())
        os._exit(FAILED)


class Rank:
    """An actor that is one of the follower ranks."""

    def follow(self, settings: RaySettings, rank_info: RankInfo) -> None:
        model = load_rank(settings, rank_info)
        run_follower(model, settings.for_replicas())


def rank_info_of(settings: RaySettings, rank: int, port: int) -> RankInfo:
    """The rank's identity in the group. A rank with GPUs of its own sees no others, so its local rank is 0."""
    sees_own = settings.gpus >= 1
    local, count = (0, 1) if sees_own else (rank, settings.ranks)
    return RankInfo(rank, settings.ranks, local, count, "127.0.0.1", port)


def load_rank(settings: RaySettings, rank_info: RankInfo) -> ParallelModel:
    for name, value in rank_variables().items():
        os.environ.setdefault(name, value)
    return lookahead.parallel.load(
        settings.model,
        dtype=settings.dtype,
        device=settings.device,
        backend=settings.backend,
        config=settings.config,
        rank_info=rank_info,
        timeout=settings.rank_timeout,
    )


async def _outcome(end: Any) -> str:
    """How a rank ended, in one line."""
    try:
        await end
        return "it left"
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return f"{type(error).__name__}: {lines[-1] if lines else ''}"
