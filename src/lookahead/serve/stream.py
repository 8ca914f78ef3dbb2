"""Sends a reply, as server-sent events or at once. A client that disconnects cancels its requests."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable
from json.encoder import encode_basestring
from typing import Any, Protocol

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lookahead.serve.access import DIRECT_SEND
from lookahead.serve.errors import ApiError, client_gone, failed
from lookahead.serve.reply import Reply
from lookahead.serve.requests import Piece

DONE = b"data: [DONE]\n\n"
COMMENT = b": waiting\n\n"
"""Keep-alive, so that proxies do not close an idle connection."""


as_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
"""One encoder for all events: `json.dumps` would create one per call."""


def event(data: Any, name: str | None = None) -> bytes:
    """One server-sent event."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {as_json(data)}\n\n".encode("utf-8", "replace")


class Events(Protocol):
    """An endpoint's stream format. Each method returns the bytes of zero or more events."""

    def first(self) -> bytes:
        """Before any output."""
        ...

    def delta(self, piece: Piece) -> bytes:
        """For one piece."""
        ...

    def last(self) -> bytes:
        """After the end."""
        ...

    def failed(self, error: ApiError) -> bytes:
        """Instead of `last` if the reply fails: the status has been sent already, so the error is an event."""
        ...


class EventStream(Response):
    """Streams a reply's events, and cancels its requests however the stream ends.

    A chunk passes only through `Reply.next`, `Events.delta` and the server's own `send`, because thousands are sent
    every second.
    """

    media_type = "text/event-stream"

    def __init__(self, reply: Reply, events: Events, keep_alive: float) -> None:
        self.reply, self.events, self.keep_alive = reply, events, keep_alive
        self._open = False  # the response has begun and not ended
        self.status_code, self.background = 200, None
        self.init_headers({"Cache-Control": "no-store"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.reply:
            direct = scope.get(DIRECT_SEND, send)
            watch = asyncio.ensure_future(self._watch(receive, direct))
            try:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await self._send_all(direct)
            finally:
                watch.cancel()

    async def _send_all(self, send: Send) -> None:
        reply, events = self.reply, self.events
        self._open = True
        try:
            if begin := events.first():
                await send(_body(begin))
            while (pieces := await reply.next(self.keep_alive)) is not None:
                chunk = b"".join([events.delta(piece) for piece in pieces])
                if chunk or not pieces:
                    await send(_body(chunk or COMMENT))
            end = events.last()
        except ApiError as error:
            end = events.failed(error)
        except Exception as error:
            reply.error = failed(error)
            end = events.failed(reply.error)
        self._open = False
        await send(_body(end, more=False))

    async def _watch(self, receive: Receive, send: Send) -> None:
        """Fail the reply when its client disconnects. An empty message says that the client has closed its side: only a
        write shows whether it has left."""
        while (await receive())["type"] != "http.disconnect":
            if self._open:
                await send(_body(COMMENT))
        self.reply.fail(client_gone())


def _body(data: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


class Template:
    """An event of which only one string changes from chunk to chunk: the rest is encoded once.

    `make(text)` is the event's data. The bytes are those of `event(make(text))`.
    """

    def __init__(self, make: Callable[[str], Any]) -> None:
        mark = uuid.uuid4().hex
        self._before, self._after = event(make(mark)).split(f'"{mark}"'.encode())

    def __call__(self, text: str) -> bytes:
        return self._before + encode_basestring(text).encode("utf-8", "replace") + self._after


async def collect_outputs(reply: Reply, request: Request) -> list[list[Piece]]:
    """All pieces of a reply that is not streamed. Its requests are cancelled if the client disconnects."""
    async with reply:
        finish = asyncio.ensure_future(reply.finish())
        gone = asyncio.ensure_future(_gone(request))
        try:
            await asyncio.wait((finish, gone), return_when=asyncio.FIRST_COMPLETED)
            if not finish.done():
                raise client_gone()
            return finish.result()
        finally:
            for task in (finish, gone):
                task.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
