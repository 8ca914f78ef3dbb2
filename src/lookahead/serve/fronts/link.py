"""A link between the engine's process and a front: pickled messages, each after its length.

From the front to the engine:

    Submit, Cancel    a sequence, by the number that the front gave it
    Ready             the front listens
    Refused           how many requests the front has refused so far, by status
    AskMetrics        answered by Metrics

From the engine to the front:

    Start             the first message: what the front needs to know
    Accepted          the engine runs this sequence
    Stepped           what the front's sequences got in one step; or why one does not run
    Status            why no request can run now, or None
    Drain             accept no more requests, finish those that run, and exit
    Metrics           all metrics in Prometheus' text format
"""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lookahead.engine.request import Event, Request
from lookahead.serve.settings import ServeSettings
from lookahead.serve.wire import Chunk, DecodeRequest, Facts

LENGTH = struct.Struct("<I")
Number = int
"""Identifies a sequence on its link."""


@dataclass
class Start:
    """What a front needs to know."""

    facts: Facts
    settings: ServeSettings


class Submit(NamedTuple):
    number: Number
    call: DecodeRequest


class Cancel(NamedTuple):
    number: Number


class Ready(NamedTuple):
    pass


class Refused(NamedTuple):
    counts: dict[str, int]


class AskMetrics(NamedTuple):
    pass


class Accepted(NamedTuple):
    number: Number


class Stepped(NamedTuple):
    """`parts` are `packed` chunks, each with the number of its sequence and whether it is the last one."""

    parts: list[tuple[Number, bool, Any]]


class Status(NamedTuple):
    """`lost`: the engine never works again, and the front must end."""

    failure: str | None
    lost: bool = False


class Drain(NamedTuple):
    pass


class Metrics(NamedTuple):
    """`error` are the fields of an ApiError if there is no text."""

    text: bytes
    error: dict[str, Any] | None = None


def frame(message: Any) -> bytes:
    """A message as it is sent."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(data)) + data


def read(link: socket.socket) -> Any:
    """The next message of a blocking socket. Raises EOFError at its end."""
    (size,) = LENGTH.unpack(_read_exactly(link, LENGTH.size))
    return pickle.loads(_read_exactly(link, size))


def _read_exactly(link: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = link.recv(size - len(data))
        if not part:
            raise EOFError("the other process has closed the link")
        data += part
    return bytes(data)


def packed(chunk: Chunk) -> Any:
    """A chunk as plain tuples where it has nothing but tokens, as most have: these take a tenth of the time."""
    rare = chunk.stats is not None or chunk.error is not None or chunk.cached or chunk.predicted
    events = [_packed_event(event) for event in chunk.events]
    return chunk.at, events, (chunk.cached, chunk.predicted, chunk.stats, chunk.error) if rare else None


def unpacked(data: Any, request: Request) -> Chunk:
    """The chunk, with the events of this request."""
    at, events, rare = data
    cached, predicted, stats, error = rare or (0, 0, None, None)
    return Chunk(at, [_event(event, request) for event in events], "", cached, predicted, stats, error)


def _packed_event(event: Event) -> tuple[Any, ...]:
    plain = event.tokens, event.finish_reason, list(event.path), event.tried
    if event.logprobs is None and event.tree is None and not event.seconds:
        return plain
    return *plain, event.logprobs, event.seconds, list(event.sources), event.tree


def _event(data: Sequence[Any], request: Request) -> Event:
    tokens, reason, path, tried, *details = data
    event = Event(request, tokens, reason, path, tried)
    if details:
        event.logprobs, event.seconds, event.sources, event.tree = details
    return event
