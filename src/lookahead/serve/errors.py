"""Errors in OpenAI's format: one JSON object on every path, and never a traceback."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from lookahead.backends.failures import DeviceError, brief, out_of_memory

log = logging.getLogger("lookahead.serve")

KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An error sent to the client. `param` names the field to change, `code` the reason in one word."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, headers=self.headers)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A mistake in the request's body."""
    return ApiError(400, message, param=param, code=code)


def internal(error: BaseException) -> ApiError:
    """The client's error for a failure of the server. The details go to the log."""
    log.error("a request failed: %s: %s", type(error).__name__, error, exc_info=error)
    return ApiError(500, f"the server could not answer ({type(error).__name__}); its log says why", code="internal")


def failed(error: BaseException) -> ApiError:
    """The API error for the exception that a request ended with."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, DeviceError):
        return unavailable(str(error))
    if out_of_memory(error):
        log.error("a request failed: %s", brief(error))
        return ApiError(503, brief(error), code="out_of_memory")
    return internal(error)


def unavailable(message: str, retry: int | None = None) -> ApiError:
    headers = {} if retry is None else {"Retry-After": str(retry)}
    return ApiError(503, message, code="unavailable", headers=headers)


def client_gone() -> ApiError:
    """Nobody receives it, but the log and the metrics count it, with nginx's status."""
    return ApiError(499, "the client has gone")


def explain(problem: Mapping[str, Any]) -> ApiError:
    """A pydantic error as one line that names the field and the fix."""
    where = field_name(problem["loc"])
    kind, given = problem["type"], problem.get("input")
    if kind == "json_invalid":
        why = problem.get("ctx", {}).get("error", "it cannot be parsed")
        return bad_request(f"the body is not valid JSON: {why}", code="invalid_json")
    if kind == "extra_forbidden":
        return bad_request(f"unknown field {where!r}: this server does not support it; leave it out", where, "unknown")
    if kind == "missing":
        return bad_request(f"{where or 'the body'} is missing", where or None, "missing")
    if is_medium(problem):
        item, medium = where.removesuffix(".type"), MEDIA[str(given)]
        return bad_request(
            f"{item} is of type {given!r}, and this model reads no {medium}; send text", where, "no_media"
        )
    message = str(problem["msg"]).removeprefix("Value error, ")
    if kind == "value_error" and isinstance(given, Mapping):  # of an object's fields together
        about = field_in(message, given)
        name = ".".join(part for part in (where, about) if part)
        begins = not where and about is not None and message.startswith(about)
        return bad_request(message if begins else f"{where or 'the body'}: {message}", name or None)
    shown = KIND_NAMES.get(type(given).__name__, f"{given!r:.60}")
    return bad_request(f"{where or 'the body'}: {message[:1].lower() + message[1:]} (got {shown})", where or None)


def is_medium(problem: Mapping[str, Any]) -> bool:
    """Whether a problem is that a part of a message is an image, audio or a file."""
    given, location = problem.get("input"), problem["loc"]
    return problem["type"] == "literal_error" and location[-1:] == ("type",) and str(given) in MEDIA


def field_in(message: str, given: Mapping[str, Any]) -> str | None:
    """The field that a validator's message is about. It begins with its name, or ends with the one that is needed."""
    first = re.match(r"\w+(?:\.\w+)*", message)
    if first is not None and first[0].partition(".")[0] in given:
        return first[0]
    needed = re.search(r"needs '(\w+)'$", message)
    return None if needed is None else needed[1]


def most_telling(problems: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The problem to report. If several types of a union were tried, the best match is the deepest, and its problem is
    not the type."""

    def rank(problem: Mapping[str, Any]) -> tuple[bool, bool, bool, int]:
        kind = problem["type"]
        return not is_medium(problem), kind != "extra_forbidden", kind.endswith("_type"), -len(problem["loc"])

    return min(problems, key=rank)


def field_name(location: Sequence[Any]) -> str:
    """('body', 'messages', 0, 'content', 'str') -> 'messages[0].content'. pydantic's own names are dropped."""
    name = ""
    for part in location[1:] if location and location[0] == "body" else location:
        if isinstance(part, int):
            name += f"[{part}]"
        elif not (part[:1].isupper() or any(mark in part for mark in "[(-") or part in UNION_PARTS):
            name += f".{part}" if name else str(part)
    return name


MEDIA = {
    **dict.fromkeys(("image_url", "input_image", "image"), "images"),
    **dict.fromkeys(("input_audio", "audio"), "audio"),
    **dict.fromkeys(("file", "input_file", "document"), "files"),
}
"""What a part of a message holds, by its type in OpenAI's and similar interfaces."""
KIND_NAMES = {"dict": "an object", "list": "a list"}
UNION_PARTS = {"str", "int", "float", "bool", "none", "constrained-str", "json_or_python"}
"""Names of union members that pydantic adds to an error's location."""


def install(app: FastAPI, refused: Counter[str]) -> None:
    """Return every kind of error in OpenAI's format, and count it by its status."""

    def answer(error: ApiError) -> JSONResponse:
        refused[str(error.status)] += 1
        return error.response()

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> JSONResponse:
        return answer(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return answer(explain(most_telling(error.errors())))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        path = request.url.path
        messages = {
            404: f"there is no {path!r} here; /openapi.json lists what there is",
            405: f"{path!r} does not take {request.method}",
        }
        message = messages.get(error.status_code, str(error.detail))
        return answer(ApiError(error.status_code, message, headers=error.headers or {}))
