"""A reply on its way to the client: as server-sent events, or whole. A client that has gone cancels its jobs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from lookahead.serve.errors import ApiError, internal
from lookahead.serve.jobs import Piece
from lookahead.serve.reply import Reply

DONE = b"data: [DONE]\n\n"
COMMENT = b": waiting\n\n"
"""Sent while nothing happens, so that nobody in between closes the connection."""


as_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
"""One encoder for all events: `json.dumps` would make a new one for each."""


def event(data: Any, name: str | None = None) -> bytes:
    """One server-sent event."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {as_json(data)}\n\n".encode("utf-8", "replace")


class EventStream(StreamingResponse):
    """Streams events. However it ends, the reply's jobs end with it, even if not one event was asked for."""

    def __init__(self, reply: Reply, events: AsyncIterator[bytes]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self.reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.reply.leave(self.reply)


async def guarded(events: AsyncIterator[bytes], done: bool = True) -> AsyncIterator[bytes]:
    """These events, and an error as the last one if there is one. The status was sent already, so it cannot tell."""
    try:
        async for one in events:
            yield one
    except ApiError as error:
        yield event(error.body())
    except Exception as error:
        yield event(internal(error).body())
    if done:
        yield DONE


async def whole(reply: Reply, request: Request) -> list[list[Piece]]:
    """All pieces of a reply that is not streamed. If the client goes away, its jobs are cancelled."""
    async with reply:
        finish = asyncio.ensure_future(reply.finish())
        gone = asyncio.ensure_future(_gone(request))
        try:
            await asyncio.wait((finish, gone), return_when=asyncio.FIRST_COMPLETED)
            if not finish.done():
                raise ApiError(499, "the client has gone")
            return finish.result()
        finally:
            for task in (finish, gone):
                task.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
