"""The `Host` header on loopback: a page whose name resolves to this machine reads nothing here. And HEAD."""

from __future__ import annotations

from typing import Any

import pytest
from http_server import Running, running

from lookahead.serve.limits import host_name
from lookahead.serve.settings import ServeSettings


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("localhost", "localhost"),
        ("LocalHost:8000", "localhost"),
        ("localhost.:80", "localhost"),
        ("127.0.0.1:8000", "127.0.0.1"),
        ("[::1]:8000", "::1"),
        ("[::1]", "::1"),
        ("[::1].evil.example", "[::1].evil.example"),
        ("localhost:80@evil.example", "localhost:80@evil.example"),
        ("localhost.evil.example:80", "localhost.evil.example"),
        ("", ""),
    ],
)
def test_names_in_a_header(value: str, name: str) -> None:
    assert host_name(value) == name


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:1", "[::1]:8000", "LOCALHOST"])
def test_names_of_this_machine_are_answered(server: Running, host: str) -> None:
    assert server.client.get("/v1/models", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/nothing"])
def test_other_names_are_refused(server: Running, path: str) -> None:
    answer = server.client.get(path, headers={"Host": "evil.example:8000"})
    assert answer.status_code == 403
    error = answer.json()["error"]
    assert error["code"] == "host"
    assert "'evil.example' is not one of 127.0.0.1, ::1, localhost" in error["message"]
    assert "\n" not in error["message"]
    assert server.client.post("/v1/completions", json={}, headers={"Host": "evil.example"}).status_code == 403


def test_where_any_name_is_answered(loaded: Any) -> None:
    for settings in ({"keys": ("first-secret",)}, {"public": True}):
        with running(loaded, **settings) as one:
            assert one.client.get("/health", headers={"Host": "proxy.example"}).status_code == 200
    assert ServeSettings(host="0.0.0.0", public=True).allowed_hosts is None
    assert ServeSettings(host="0.0.0.0", keys=("first-secret",)).allowed_hosts is None
    assert ServeSettings(host="127.0.0.5").allowed_hosts == {"127.0.0.1", "127.0.0.5", "::1", "localhost"}


@pytest.mark.parametrize(
    "path", ["/", "/health", "/ready", "/metrics", "/v1/models", "/web/style.css", "/openapi.json"]
)
@pytest.mark.thinned(1, most=3)
def test_head_is_get_without_its_body(server: Running, path: str) -> None:
    head, get = server.client.head(path), server.client.get(path)
    assert head.status_code == get.status_code
    assert head.headers["content-type"] == get.headers["content-type"]
    assert head.content == b""
    assert server.client.head("/v1/completions").status_code == 405
