"""Errors in Anthropic's format, for all answers under `/v1/messages`."""

from __future__ import annotations

import json
from typing import Any

from lookahead.serve.access import App, Receive, Scope, Send

PATH = "/v1/messages"
KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def messages_error(status: int, message: str, code: str | None = None) -> dict[str, Any]:
    """The body of an error. Anthropic has a place for codes such as ours."""
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    details = {} if code is None else {"details": {"error_code": code}}
    return {"type": "error", "error": {"type": kind, "message": message, **details}}


class MessagesErrors:
    """Middleware around the gate and the routes: it rewrites their error objects under one path."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] != "http" or not (path == PATH or path.startswith(f"{PATH}/")):
            await self.app(scope, receive, send)
            return
        start: Any = None
        body = b""

        async def rewritten(message: Any) -> None:
            nonlocal start, body
            if message["type"] == "http.response.start" and message["status"] >= 400:
                start = message
            elif start is None:
                await send(message)
            else:
                body += message.get("body", b"")
                if not message.get("more_body", False):
                    await send_error(start, body, send)

        await self.app(scope, receive, rewritten)


async def send_error(start: Any, body: bytes, send: Send) -> None:
    """Send an error object in Anthropic's format, under the headers of the original."""
    error = json.loads(body)["error"]
    changed = json.dumps(messages_error(start["status"], error["message"], error["code"])).encode()
    headers = [(name, value) for name, value in start["headers"] if name.lower() != b"content-length"]
    await send({**start, "headers": [*headers, (b"content-length", str(len(changed)).encode())]})
    await send({"type": "http.response.body", "body": changed})
