"""This process's rank, from torchrun's environment variables, and its device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class RankInfo:
    """This process is `rank` of `size`, and `local_rank` of `local_size` on its machine. Rank 0 is at `host`:`port`."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    port: int

    @classmethod
    def from_env(cls, environment: Mapping[str, str]) -> RankInfo | None:
        """Read torchrun's variables. None if they are not set: then the process is a group of one."""
        given = [name for name in VARIABLES if environment.get(name)]
        if not given:
            return None
        missing = [name for name in VARIABLES if name not in given]
        if missing:
            raise ValueError(f"{given[0]} is set and {missing[0]} is not: start the ranks with torchrun, or unset it")
        rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        if not 0 <= rank < size:
            raise ValueError(
                f"RANK={rank} is not one of the {size} ranks that WORLD_SIZE={size} names: 0 to {size - 1}"
            )
        return cls(
            rank,
            size,
            int(environment.get("LOCAL_RANK", rank)),
            int(environment.get("LOCAL_WORLD_SIZE", size)),
            environment["MASTER_ADDR"],
            int(environment["MASTER_PORT"]),
        )


def pick_device(name: str, rank_info: RankInfo | None) -> str:
    """The device for `load`. With GPUs, 'auto' and 'cuda' mean the GPU with this rank's local rank."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if rank_info is None or name not in ("auto", "cuda") or not count:
        return name
    return f"cuda:{rank_info.local_rank % count}"
