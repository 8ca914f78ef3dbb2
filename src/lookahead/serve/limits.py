"""Admission: the queue, and the middleware that checks every request's key, body size and content type."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from lookahead.serve.errors import ApiError, unavailable
from lookahead.serve.keys import KeyRing
from lookahead.serve.nesting import MOST_DEPTH, too_deep
from lookahead.serve.surrogates import check_surrogates

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = ("/health", "/")
OPEN_FOLDER = "/web/"
"""Paths that need no key: the web page and its files contain no secrets."""
DIRECT_SEND = "lookahead.send"
"""Key of a request's scope with the gate's own `send`. Middleware between the gate and the routes wraps `send` to see
whether a response has started, which a stream needs only once."""
PATIENCE = 60
"""The largest Retry-After, in seconds."""


class Queue:
    """Counts running and waiting sequences, and refuses more than `most`."""

    def __init__(self, running: int, waiting: int) -> None:
        self.taken = 0
        self._seconds: deque[float] = deque([1.0], maxlen=64)  # durations of recent sequences
        self.resize(running, waiting)

    def resize(self, running: int, waiting: int) -> None:
        """Set how many sequences may run at once, and how many more may wait."""
        self.most, self._running = running + waiting, running

    def enter(self, count: int) -> None:
        """Add `count` sequences. Raises a 429 if the queue is full."""
        self.check_room(count)
        self.taken += count

    def check_room(self, count: int) -> None:
        """Raise a 429 if the queue has no room for `count` more sequences."""
        if count > self.most:
            raise ApiError(400, f"{count} sequences in one request, and the server takes {self.most} in all", param="n")
        if self.taken + count > self.most:
            raise ApiError(
                429,
                f"the server's queue is full: {self.taken} sequences run or wait, and it takes {self.most}; try again",
                code="queue_full",
                headers={"Retry-After": str(self._wait())},
            )

    def leave(self, seconds: float | None = None) -> None:
        """Remove one sequence, which took `seconds` if it finished."""
        self.taken -= 1
        if seconds is not None:
            self._seconds.append(seconds)

    def _wait(self) -> int:
        """Estimated seconds until a sequence can enter: mean duration over the number that run at once."""
        mean = sum(self._seconds) / len(self._seconds)
        return max(1, min(PATIENCE, math.ceil(mean / self._running)))


def is_open(method: str, path: str) -> bool:
    """Whether a path needs no key."""
    return method == "OPTIONS" or (method == "GET" and (path in OPEN_PATHS or path.startswith(OPEN_FOLDER)))


class Gate:
    """Middleware in front of all routes: authentication, and limits on the body."""

    def __init__(self, app: App, keys: KeyRing, max_body: int, refused: Counter[str]) -> None:
        self.app, self.keys, self.max_body, self.refused = app, keys, max_body, refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        try:
            if not is_open(scope["method"], scope["path"]):
                authorization = headers.get(b"authorization")
                if authorization is None and b"x-api-key" in headers:  # Anthropic's clients
                    authorization = b"Bearer " + headers[b"x-api-key"]
                owner = self.keys.owner(None if authorization is None else authorization.decode("latin-1"))
                scope.setdefault("state", {})["owner"] = owner
            if scope["method"] == "POST":
                self._check_headers(headers)
                receive = await self._read_body(receive)
        except ApiError as error:
            self.refused[str(error.status)] += 1
            error.headers.setdefault("Connection", "close")  # the rest of the body is not read
            await error.response()(scope, receive, send)
            return
        scope[DIRECT_SEND] = send
        await self.app(scope, receive, send)

    def _check_headers(self, headers: dict[bytes, bytes]) -> None:
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if kind != b"application/json":
            shown = kind.decode("latin-1") or "no content type"
            raise ApiError(415, f"the body must be application/json, not {shown}", code="content_type")
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self.max_body:
            raise self._too_long(f"{int(length)} bytes")

    async def _read_body(self, receive: Receive) -> Receive:
        """Read the body up to the limit. Returns a `receive` that replays it."""
        chunks, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                raise unavailable("the client went away before its body was read")
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
