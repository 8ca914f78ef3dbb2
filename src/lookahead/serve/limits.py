"""Admission: the queue, and the middleware that checks every request's key, body size and content type."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, MutableMapping
from time import perf_counter
from typing import Any

from lookahead.serve.access import App, Receive, Scope, Send
from lookahead.serve.errors import ApiError, client_gone
from lookahead.serve.keys import KeyRing
from lookahead.serve.nesting import MOST_DEPTH, too_deep
from lookahead.serve.surrogates import check_surrogates

OPEN_PATHS = ("/health", "/")
OPEN_FOLDER = "/web/"
"""Paths that need no key: the web page and its files contain no secrets."""
CUT = "lookahead.cut"
"""Key of a request's scope with the error that ended the connection before the whole body was there."""
PATIENCE = 600
"""The largest Retry-After, in seconds."""
RECENT = 64
"""How many sequences the estimate of the queue's rate is from."""


class Queue:
    """Counts running and waiting sequences, and refuses more than `most`.

    `clock` gives the time in seconds.
    """

    def __init__(self, running: int, waiting: int, clock: Callable[[], float] = perf_counter) -> None:
        self.taken = 0
        self._clock = clock
        self._seconds: deque[float] = deque([1.0], maxlen=RECENT)  # durations of recent sequences
        self._left: deque[float] = deque(maxlen=RECENT)  # when recent sequences left, while all slots were taken
        self._full_since = 0.0  # since when all slots are taken
        self.resize(running, waiting)

    def resize(self, running: int, waiting: int) -> None:
        """Set how many sequences may run at once, and how many more may wait."""
        self.most, self._running = running + waiting, running

    def enter(self, count: int) -> None:
        """Add `count` sequences. Raises a 429 if the queue is full."""
        self.check_room(count)
        if self.taken < self._running <= self.taken + count:
            self._full_since = self._clock()
            self._left.clear()
        self.taken += count

    def check_room(self, count: int) -> None:
        """Raise a 429 if the queue has no room for `count` more sequences."""
        if count > self.most:
            raise ApiError(400, f"{count} sequences in one request, and the server takes {self.most} in all", param="n")
        if self.taken + count > self.most:
            wait = self.wait(count)
            raise ApiError(
                429,
                f"the server's queue is full: {self.taken} sequences run or wait, and it takes {self.most}; try again "
                f"in {wait} s",
                code="queue_full",
                headers={"Retry-After": str(wait)},
            )

    def leave(self, seconds: float | None = None) -> None:
        """Remove one sequence, which took `seconds` if it finished."""
        if self.taken >= self._running:
            self._left.append(self._clock())
        self.taken -= 1
        if seconds is not None:
            self._seconds.append(seconds)

    def wait(self, count: int) -> int:
        """Estimated seconds until there is room for `count` sequences, at the rate at which others leave.

        That is the rate since all slots are taken. Until one has left since then, it is estimated from the durations of
        earlier ones.
        """
        needed = max(1, self.taken + count - self.most)
        if self._left:
            begin = self._full_since if len(self._left) < RECENT else self._left[0]
            each = (self._clock() - begin) / (len(self._left) - (len(self._left) == RECENT))
        else:
            each = sum(self._seconds) / len(self._seconds) / self._running
        return max(1, min(PATIENCE, math.ceil(round(needed * each, 3))))


def is_open(method: str, path: str) -> bool:
    """Whether a path needs no key."""
    return method == "OPTIONS" or (method in ("GET", "HEAD") and (path in OPEN_PATHS or path.startswith(OPEN_FOLDER)))


class Gate:
    """Middleware in front of all routes: the host, authentication, and limits on the body. HEAD is GET for the routes.

    `hosts` are the names in a `Host` header that are answered; None for any.
    """

    def __init__(
        self, app: App, keys: KeyRing, max_body: int, refused: Counter[str], hosts: frozenset[str] | None = None
    ) -> None:
        self.app, self.keys, self.max_body, self.refused, self.hosts = app, keys, max_body, refused, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        try:
            if self.hosts is not None:
                check_host(scope["headers"], self.hosts)
            if not is_open(scope["method"], scope["path"]):
                authorization = headers.get(b"authorization")
                if authorization is None and b"x-api-key" in headers:  # Anthropic's clients
                    authorization = b"Bearer " + headers[b"x-api-key"]
                owner = self.keys.owner(None if authorization is None else authorization.decode("latin-1"))
                scope.setdefault("state", {})["owner"] = owner
            if scope["method"] == "POST":
                self._check_headers(headers)
                receive = await self._read_body(scope, receive)
        except ApiError as error:
            self.refused[str(error.status)] += 1
            error.headers.setdefault("Connection", "close")  # the rest of the body is not read
            await error.response()(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # the server leaves the body out
            scope = {**scope, "method": "GET"}
        await self.app(scope, receive, send)

    def _check_headers(self, headers: dict[bytes, bytes]) -> None:
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if kind != b"application/json":
            shown = kind.decode("latin-1") or "no content type"
            raise ApiError(415, f"the body must be application/json, not {shown}", code="content_type")
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self.max_body:
            raise self._too_long(f"{int(length)} bytes")

    async def _read_body(self, scope: Scope, receive: Receive) -> Receive:
        """Read the body up to the limit. Returns a `receive` that replays it."""
        chunks, size, more = [], 0, True
        while more:
            message = await receive()
            if CUT in scope:
                raise scope[CUT]
            if message["type"] != "http.request":
                raise client_gone()
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            more = message.get("more_body", False)
            if size > self.max_body:
                raise self._too_long(f"more than {self.max_body} bytes")
        body = {"type": "http.request", "body": check_json(b"".join(chunks)), "more_body": False}
        given = False

        async def replay() -> MutableMapping[str, Any]:
            nonlocal given
            if given:
                return await receive()
            given = True
            return body

        return replay

    def _too_long(self, size: str) -> ApiError:
        return ApiError(413, f"the body has {size}, and the server takes {self.max_body}; shorten it", code="too_long")


def check_host(headers: Iterable[tuple[bytes, bytes]], hosts: frozenset[str]) -> None:
    """Raise a 403 if the `Host` header has another name than these. Only old clients, no browsers, have no header."""
    for name, value in headers:
        if name.lower() == b"host" and (given := host_name(value.decode("latin-1"))) not in hosts:
            known = ", ".join(sorted(hosts))
            raise ApiError(
                403,
                f"the host {given!r:.80} is not one of {known}; use one of these, or start the server with an API key "
                "or --allow-public",
                code="host",
            )


def host_name(value: str) -> str:
    """The name in a `Host` header, without its port."""
    value = value.strip().lower()
    if value.startswith("["):
        name, _, port = value[1:].partition("]")
        return name if not port or port.removeprefix(":").isdigit() else value
    name, _, port = value.rpartition(":")
    return (name if name and port.isdigit() else value).removesuffix(".")


def check_json(body: bytes) -> bytes:
    """Return the body. Raises a 400 if it is not UTF-8, has a lone surrogate, or is nested too deeply to parse."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ApiError(
            400, f"the body is not UTF-8: {error.reason} at byte {error.start}", code="invalid_utf8"
        ) from None
    if b"\0" in body:  # a parser would detect UTF-16
        raise ApiError(400, "the body is not UTF-8: it has zero bytes; send UTF-8", code="invalid_utf8")
    if too_deep(text):
        raise ApiError(400, f"the body is nested more than {MOST_DEPTH} levels deep; flatten it", code="too_deep")
    check_surrogates(body)
    return body
