"""What goes from an ingress to a replica, and what comes back. All of it can be pickled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lookahead.backends.base import Capabilities
from lookahead.config import LookaheadConfig
from lookahead.engine.request import Event
from lookahead.generate import LookaheadModel
from lookahead.serve.errors import ApiError
from lookahead.serve.requests import RequestSpec
from lookahead.stats import Stats


@dataclass
class Facts:
    """What an ingress has to know of the model: its tokenizer and its limits, but no weights.

    `version` tells models apart. A stream is continued only by the model that has begun it.
    """

    name: str
    version: str
    tokenizer: Any
    generation_config: Any
    vocab_size: int
    max_length: int | None
    holds: int | None
    dtype: torch.dtype
    capabilities: Capabilities
    stop_ids: frozenset[int]
    default_config: LookaheadConfig

    @classmethod
    def of(cls, model: LookaheadModel, version: str) -> Facts:
        backend = model.backend
        return cls(
            model.name,
            version,
            model.tokenizer,
            getattr(model.model, "generation_config", None),
            backend.vocab_size,
            backend.max_length,
            backend.holds(),
            backend.dtype,
            backend.capabilities,
            model.stop_ids,
            model.default_config,
        )


@dataclass
class DecodeRequest:
    """A sequence that a replica is asked for. `spec.output` is what other replicas have generated of it.

    `owner` is the place of its key in the list of keys. `ingress` is who asks, and `number` the errand's own there: see
    `channels`.
    """

    spec: RequestSpec
    owner: int
    version: str
    ingress: str = ""
    number: int = 0

    @classmethod
    def of(
        cls, spec: RequestSpec, owner: int, version: str, output: Sequence[int], ingress: str = "", number: int = 0
    ) -> DecodeRequest:
        without: Any = None  # an owner has memories, which stay where they are
        return cls(replace(spec, owner=without, output=list(output)), owner, version, ingress, number)


@dataclass
class Chunk:
    """What a sequence got since the chunk before it: the events of one step, or of several if reading was slow.

    `at` is how long the output was before, and `replica` who generated it. The last chunk of a sequence has `stats` or
    an `error`.
    """

    at: int
    events: list[Event]
    replica: str = ""
    cached: int = 0
    predicted: int = 0
    stats: Stats | None = None
    error: dict[str, Any] | None = None


def as_fields(error: ApiError) -> dict[str, Any]:
    """An error in a form that can be pickled; `ApiError(**fields)` makes it again."""
    return {
        "status": error.status,
        "message": error.message,
        "param": error.param,
        "code": error.code,
        "headers": error.headers,
    }
