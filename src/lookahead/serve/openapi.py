"""`/openapi.json`: FastAPI's schema of the bodies, with the statuses and errors that this server answers with."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from lookahead.serve.service import Service

ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string", "description": "What is wrong, and what to change."},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "The field to change."},
                "code": {"type": ["string", "null"], "description": "The reason in one word."},
            },
        }
    },
}
WHAT = {
    400: "The request is wrong; the message names the field.",
    401: "The API key is missing or unknown.",
    403: "The key lacks a right, or the host is not this server's.",
    404: "There is no such model.",
    408: "The headers or the body did not arrive in time.",
    413: "The body is too long.",
    415: "The body is not application/json.",
    429: "The queue is full; Retry-After says when to try again.",
    431: "The headers are too long.",
    500: "The server could not answer; its log says why.",
    502: "Two replicas died while they answered.",
    503: "The server drains, has failed, or is out of memory.",
    504: "The answer took too long.",
}
POST = (400, 404, 413, 415)
GENERATES = (403, 429, 503, 504)
OTHERS = {"/v1/models/{name}": (404,), "/health": (503,), "/ready": (503,), "/metrics": (403,)}
NEEDS_NO_KEY = ("/health",)


def install(app: FastAPI, service: Service) -> None:
    """Let the application describe itself with the statuses of this server."""
    describe = app.openapi

    def described() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = with_errors(describe(), service)
        return app.openapi_schema

    app.openapi = described  # type: ignore[method-assign]


def with_errors(schema: dict[str, Any], service: Service) -> dict[str, Any]:
    schemas = schema["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own, which are never sent
        schemas.pop(name, None)
    schemas["Error"] = ERROR
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            answers = operation["responses"]
            answers.pop("422", None)
            for status in statuses(method, path, service):
                content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
                answers[str(status)] = {"description": WHAT[status], "content": content}
            if streams(path, method):
                answers["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
            answers["200"]["headers"] = {"X-Request-Id": {"schema": {"type": "string"}}}
            if "429" in answers:
                answers["429"]["headers"] = {"Retry-After": {"schema": {"type": "integer"}}}
    return schema


def statuses(method: str, path: str, service: Service) -> list[int]:
    """The statuses of errors of one operation."""
    settings, found = service.settings, {500, *service.more_statuses, *OTHERS.get(path, ())}
    if method == "post":
        found |= {*POST}
    if streams(path, method):
        found |= {*GENERATES}
    if settings.keys and path not in NEEDS_NO_KEY:
        found.add(401)
    if settings.allowed_hosts is not None:
        found.add(403)
    return sorted(found)


def streams(path: str, method: str) -> bool:
    """Whether an operation generates text, and can stream it."""
    return method == "post" and path.startswith("/v1/")
