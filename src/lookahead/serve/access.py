"""The outermost middleware: every request gets an id, a line in the log when it ends, and perhaps a span."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from lookahead.serve.errors import internal
from lookahead.serve.records import REQUEST_ID, RequestRecord, current
from lookahead.serve.tracing import Tracing

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

DIRECT_SEND = "lookahead.send"
"""Key of a request's scope with the server's own `send`. Middleware wraps `send` for the beginning of a response, which
the many chunks of a stream do not need."""


class RequestLog:
    """Middleware around all others. An exception that nothing else has handled becomes a 500 here.

    With `tags` the response has the request's id in its headers.
    """

    def __init__(self, app: App, refused: Counter[str], tracing: Tracing | None, tags: bool = True) -> None:
        self.app, self.refused, self.tracing, self.tags = app, refused, tracing, tags

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        record = RequestRecord(scope["method"], scope["path"], scope["headers"])
        state = scope.setdefault("state", {})

        async def tagged_send(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                if self.tags:
                    message["headers"] = [*message.get("headers", ()), (REQUEST_ID, record.id.encode("ascii"))]
            await send(message)

        scope[DIRECT_SEND] = send
        token = current.set(record)
        try:
            await self.app(scope, receive, tagged_send)
        except asyncio.CancelledError:
            record.status = record.status or 503  # the server has stopped
            raise
        except Exception as error:
            if record.status:
                raise
            self.refused["500"] += 1
            await internal(error).response()(scope, receive, tagged_send)
        finally:
            current.reset(token)
            owner = state.get("owner")
            record.owner = None if owner is None else owner.name
            record.end()
            record.write()
            if self.tracing is not None:
                self.tracing.export(record)
