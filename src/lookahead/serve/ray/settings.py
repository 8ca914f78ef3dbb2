"""The settings of replicas. Each is checked once, and an error says what to change."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lookahead.config import LookaheadConfig
from lookahead.serve.settings import ServeSettings

MOST_REPLICAS = 4096
MOST_RANKS = 64


@dataclass(frozen=True)
class RaySettings:
    """Settings of the replicas, besides the server's own (`serve`).

    `model`, `dtype`, `device`, `backend` and `config` are those of `lookahead.load`, which every replica calls.
    `replicas` is their number; with `max_replicas` it is autoscaled between the two, for about `target_ongoing`
    sequences each. Ray scales up after `upscale_seconds` of sustained load, and down after `downscale_seconds`; it
    checks every few seconds. A replica may be a group of several `ranks` on one machine, which share every step (see
    `lookahead.parallel`); it exits when a rank has not answered for `rank_timeout` seconds. `gpus` and `cpus` are the
    resources of a replica, or of each of its ranks. A fraction of a GPU is allowed: then several share one. `ingresses`
    is the number of HTTP processes.

    `serve.max_concurrency` counts the sequences of one replica. `serve.max_queue` counts those that wait at one
    ingress.
    """

    model: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    backend: str = "auto"
    config: LookaheadConfig | None = None
    replicas: int = 2
    ranks: int = 1
    rank_timeout: float = 60.0
    max_replicas: int | None = None
    target_ongoing: float | None = None
    upscale_seconds: float = 30.0
    downscale_seconds: float = 600.0
    gpus: float = 0.0
    cpus: float = 1.0
    ingresses: int = 1
    serve: ServeSettings = field(default_factory=ServeSettings)

    def __post_init__(self) -> None:
        for name in ("replicas", "ingresses"):
            if not 1 <= getattr(self, name) <= MOST_REPLICAS:
                raise ValueError(f"{name}={getattr(self, name)} must be from 1 to {MOST_REPLICAS}")
        if self.max_replicas is not None and not self.replicas <= self.max_replicas <= MOST_REPLICAS:
            raise ValueError(
                f"max_replicas={self.max_replicas} must be from replicas={self.replicas} to {MOST_REPLICAS}; leave it "
                "out for a fixed number"
            )
        if self.target_ongoing is not None and not 0 < self.target_ongoing <= self.serve.max_concurrency:
            raise ValueError(
                f"target_ongoing={self.target_ongoing} must be above 0, and at most "
                f"max_concurrency={self.serve.max_concurrency}"
            )
        for name in ("upscale_seconds", "downscale_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be a number of seconds from 0 up")
        for name in ("gpus", "cpus"):
            value = getattr(self, name)
            if not (0 <= value < math.inf) or (name == "gpus" and value > 1 and value % 1):
                raise ValueError(f"{name}={value} must be 0 or more, and whole above 1 if it counts GPUs")
        if not 2 <= self.rank_timeout < math.inf:
            raise ValueError(f"rank_timeout={self.rank_timeout} must be at least 2 seconds")
        if not 1 <= self.ranks <= MOST_RANKS:
            raise ValueError(f"ranks={self.ranks} must be from 1 to {MOST_RANKS}")
        if self.ranks > 1 and not (self.gpus or self.cpus):
            raise ValueError(f"ranks={self.ranks} are placed by what they are given; give each some cpus or gpus")

    @property
    def most(self) -> int:
        """The largest number of replicas."""
        return self.replicas if self.max_replicas is None else self.max_replicas

    @property
    def target(self) -> float:
        """Target number of sequences per replica; three quarters of its maximum by default."""
        return self.target_ongoing or max(1.0, 0.75 * self.serve.max_concurrency)

    @classmethod
    def from_options(cls, options: dict[str, Any], keys: tuple[str, ...] = ()) -> RaySettings:
        """The settings in a `serve deploy` file: a flat mapping of the fields of both classes."""
        own = {name for name in cls.__dataclass_fields__ if name not in ("serve", "config")}
        others = {name for name in ServeSettings.__dataclass_fields__ if name not in ("host", "port", "keys")}
        for name in options:
            if name not in own | others:
                raise ValueError(f"unknown setting {name!r}; there are {', '.join(sorted(own | others))}")
        given = {name: value for name, value in options.items() if name in others}
        if given.get("memory_folder") is not None:
            given["memory_folder"] = Path(given["memory_folder"])
        if "cors_origins" in given:
            given["cors_origins"] = tuple(given["cors_origins"])
        return cls(**{name: options[name] for name in own & options.keys()}, serve=ServeSettings(**given, keys=keys))

    def for_replicas(self) -> ServeSettings:
        """The server's settings for a replica. It gets the number of keys but not the keys. Timeouts and queueing are
        the ingress' task."""
        owners = tuple(f"owner-number-{number}" for number in range(len(self.serve.keys)))
        longest = 2 * self.serve.request_timeout + 3600
        return replace(self.serve, host="127.0.0.1", keys=owners, request_timeout=longest, cors_origins=())
