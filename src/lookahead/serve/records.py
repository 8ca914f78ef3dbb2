"""What the log says of one HTTP request: a record that is filled while the request runs, and written when it ends."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from time import perf_counter, time_ns
from typing import Any
from urllib.parse import quote

from lookahead.serve.errors import log
from lookahead.serve.logs import FIELDS
from lookahead.serve.reply import Reply
from lookahead.serve.requests import RequestState

REQUEST_ID = b"x-request-id"
SANE_ID = re.compile(rb"[!-~]{1,128}")
"""A client's request id that is taken over: printable ASCII without spaces."""
LONGEST_PATH = 200
GONE = 499
"""The status of a request whose client has left, as nginx logs it. Nobody receives it."""


class RequestRecord:
    """One HTTP request. `status` is 0 until the response has begun.

    `id` is the client's own X-Request-Id if it is sane. `owner` is the name of its key. `replies` are those of the
    engine that it opened.
    """

    def __init__(self, method: str, path: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self.method, self.path = method, path
        given: dict[bytes, bytes] = {}
        for name, value in headers:
            given.setdefault(name.lower(), value)
        self.id = request_id(given.get(REQUEST_ID, b""))
        self.parent = {name: given[name.encode()].decode("latin-1") for name in PARENT if name.encode() in given}
        self.owner: str | None = None
        self.status = 0
        self.replies: list[Reply] = []
        self.begin, self.begin_ns = perf_counter(), time_ns()
        self.seconds = 0.0

    def end(self) -> None:
        """The request has ended. A stream that ended with an error has that error's status."""
        self.seconds = perf_counter() - self.begin
        errors = [reply.error for reply in self.replies if reply.error is not None]
        if errors:
            self.status = errors[-1].status
        self.status = self.status or GONE

    @property
    def states(self) -> Sequence[RequestState]:
        """The sequences that were generated for the client: those that score prompts only if there are no others."""
        found = [state for reply in self.replies for state in reply.states]
        return [state for state in found if not state.spec.scores] or found

    @property
    def first_token_seconds(self) -> float | None:
        """From the beginning of the request to its first token."""
        times = [state.first_token_time for state in self.states if state.first_token_time]
        return min(times) - self.begin if times else None

    @property
    def prompt_tokens(self) -> int | None:
        """Choices of one prompt count it once. A prompt that is only scored is a continuation of its first token."""
        states = self.states
        prompts = {id(state.spec.prompt): state.spec for state in states}.values()
        return sum(len(spec.prompt) + spec.scores * spec.rules.max_tokens for spec in prompts) if states else None

    @property
    def output_tokens(self) -> int | None:
        states = self.states
        return (
            sum(state.sequence.stats.generated_tokens for state in states if not state.spec.scores) if states else None
        )

    @property
    def steps(self) -> int | None:
        found = [state.sequence.stats.steps for reply in self.replies for state in reply.states]
        return sum(found) if found else None

    def fields(self) -> dict[str, Any]:
        """The fields of its line. A field without a value is None."""
        first = self.first_token_seconds
        return {
            "method": self.method,
            "path": shown_path(self.path),
            "status": self.status,
            "ms": round(1000 * self.seconds, 1),
            "ttft_ms": None if first is None else round(1000 * first, 1),
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "steps": self.steps,
            "key": self.owner,
            "request_id": self.id,
        }

    def write(self) -> None:
        log.info("request", extra={FIELDS: self.fields()})


PARENT = ("traceparent", "tracestate")
"""The headers that name the parent of a request's span."""

current: ContextVar[RequestRecord | None] = ContextVar("current", default=None)
"""The record of the request that is being answered."""


def request_id(given: bytes) -> str:
    """The client's id if it is sane, or else a new one."""
    return given.decode("ascii") if SANE_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"


def shown_path(path: str) -> str:
    """A path for the log: quoted as in a URL, and not too long. Queries are left out, as they may hold secrets."""
    found = quote(path[:LONGEST_PATH], safe="/:@!$&'()*+,;=~-._")
    return found if len(path) <= LONGEST_PATH else f"{found}..."
