"""What crosses between the process that answers HTTP and the one that runs the engine. All of it can be pickled."""

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
    """What a process without the model needs to know about it: its tokenizer and limits, but no weights.

    `version` identifies the model. Only the model that started a stream may resume it.
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
    """A sequence for another process to generate. `spec.output` is what other replicas have generated already.

    `owner` is the index of its key. `ingress` names the sender, and `number` the request there: see `channels`.
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
        without: Any = None  # an owner has memories, which are not sent
        return cls(replace(spec, owner=without, output=list(output)), owner, version, ingress, number)


@dataclass
class Chunk:
    """New output of a sequence: the events of one step, or of several if the reader was slow.

    `at` is the length of the output before it, and `replica` the name of its replica. The last chunk of a sequence has
    `stats` or an `error`.
    """

    at: int
    events: list[Event]
    replica: str = ""
    cached: int = 0
    predicted: int = 0
    stats: Stats | None = None
    error: dict[str, Any] | None = None


def as_fields(error: ApiError) -> dict[str, Any]:
    """A picklable form of an error; `ApiError(**fields)` restores it."""
    return {
        "status": error.status,
        "message": error.message,
        "param": error.param,
        "code": error.code,
        "headers": error.headers,
    }
