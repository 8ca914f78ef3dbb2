"""Requests that are made up from `/openapi.json`, valid and not: none may be answered with a 5xx."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
import schemathesis
from http_server import Running, running
from marks import examples, slow_but

EXAMPLES = examples(12)


OPERATIONS = (
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "POST /v1/responses",
    "POST /v1/messages",
    "POST /v1/messages/count_tokens",
    "POST /tokenize",
    "POST /detokenize",
    "GET /v1/models",
    "GET /v1/models/{name}",
    "GET /health",
    "GET /ready",
    "GET /metrics",
    "GET /version",
)
LONG = (
    "POST /v1/chat/completions",
    "POST /v1/responses",
    "POST /v1/messages",
    "POST /v1/messages/count_tokens",
)
QUICK = [operation for operation in OPERATIONS if operation not in LONG]
"""Without those whose requests take long to make up, and whose fields are mostly those of others."""
LENGTHS = {"messages": "max_tokens", "prompt": "max_tokens", "input": "max_output_tokens"}


@pytest.mark.parametrize("operation", slow_but(OPERATIONS, *QUICK))
def test_no_request_is_answered_with_a_5xx_or_an_undocumented_status(server: Running, operation: str) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    method, path = operation.split(" ")
    found = schema[path][method]
    statuses: set[int] = set()
    documented = server.client.get("/openapi.json").json()["paths"][path][method.lower()]["responses"]

    for mode in schemathesis.GenerationMode if method == "POST" else [schemathesis.GenerationMode.POSITIVE]:

        @hypothesis.settings(
            max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
        )
        @hypothesis.given(case=found.as_strategy(generation_mode=mode))
        def ask(case: Any) -> None:
            if isinstance(case.body, dict):
                shorten(case.body)
            answer = case.call()
            statuses.add(answer.status_code)
            assert answer.status_code < 500, answer.text
            assert str(answer.status_code) in documented, answer.text
            if answer.status_code >= 400:
                assert answer.json()["error"]["message"]

        ask()
    assert 200 in statuses or path in MOSTLY_REFUSED


MOSTLY_REFUSED = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/models/{name}",
    "/tokenize",
    "/detokenize",
)
"""What a few made-up requests cannot be expected to get right."""


def shorten(body: dict[str, Any]) -> None:
    """A long answer tells no more than a short one."""
    for content, name in LENGTHS.items():
        if content in body and type(body.get(name, 9)) in (int, type(None)) and (body.get(name) or 9) > 3:
            body[name] = 3
            body.pop("max_completion_tokens", None)
    if isinstance(body.get("n"), int) and body["n"] > 2:
        body["n"] = 2


def test_the_schema_has_the_statuses_that_occur(server: Running) -> None:
    def statuses(found: Any, path: str, method: str = "post") -> set[int]:
        return {int(status) for status in found["paths"][path][method]["responses"]}

    found = server.client.get("/openapi.json").json()
    assert "HTTPValidationError" not in found["components"]["schemas"]
    body = {200, 400, 403, 404, 408, 413, 415, 431, 500}
    assert statuses(found, "/tokenize") == body
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
        assert statuses(found, path) == body | {429, 503, 504}
        assert "text/event-stream" in found["paths"][path]["post"]["responses"]["200"]["content"]
    assert statuses(found, "/health", "get") == {200, 403, 408, 431, 500, 503}
    with running(server.model, keys=("first-secret",)) as guarded:
        guarded.client.headers["Authorization"] = "Bearer first-secret"
        found = guarded.client.get("/openapi.json").json()
    assert statuses(found, "/tokenize") == body - {403} | {401}
    assert statuses(found, "/health", "get") == {200, 408, 431, 500, 503}


def test_every_operation_is_tried(server: Running) -> None:
    paths = server.client.get("/openapi.json").json()["paths"]
    assert {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods} == set(OPERATIONS)
