"""Keys: who may ask, and that one key's requests leave no trace for another's."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from http_server import Running, running

import lookahead
from lookahead.algorithm.sources import SharedMemory
from lookahead.serve.errors import ApiError
from lookahead.serve.keys import KeyRing, read_keys
from lookahead.serve.settings import ServeSettings

KEYS = ("first-secret", "second-secret")
WATCHER = "third-secret name=watcher rights=metrics"
PROMPT = "the quick brown fox jumps over the lazy dog " * 8


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def make_paged(model: Any, tokenizer: Any, settings: Any) -> Callable[[], Any]:
    return lambda: lookahead.load((model, tokenizer), config=settings, backend="graph")


@pytest.fixture(scope="module")
def guarded(make_paged: Callable[[], Any]) -> Iterator[Running]:
    with running(make_paged(), keys=(*KEYS, WATCHER)) as server:
        yield server


def test_everything_but_health_needs_a_key(guarded: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    assert guarded.client.get("/health").status_code == 200
    assert guarded.client.head("/health").status_code == 200
    assert guarded.client.head("/ready").status_code == 401
    for path in ("/v1/models", "/ready", "/metrics", "/openapi.json", "/nothing"):
        for headers in ({}, bearer("wrong-secret"), {"Authorization": KEYS[0]}, {"Authorization": "Bearer"}):
            answer = guarded.client.get(path, headers=headers)
            assert answer.status_code == 401, path
            assert answer.json()["error"]["type"] == "authentication_error"
            assert answer.headers["www-authenticate"].startswith('Bearer realm="lookahead"')
            wrong = headers.get("Authorization", "").endswith("wrong-secret")
            assert ('error="invalid_token"' in answer.headers["www-authenticate"]) == wrong
        expected = 404 if path == "/nothing" else 200
        assert guarded.client.get(path, headers=bearer(WATCHER.split()[0])).status_code == expected
    answer = guarded.client.post("/v1/completions", content=b"x" * 1000)
    assert answer.status_code == 401  # the body is not even read
    assert not any(secret in caplog.text for secret in (*KEYS, "wrong-secret"))


def ask(server: Running, key: str) -> dict[str, Any]:
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 30, "temperature": 0}
    body["lookahead"] = {"window": 0, "budget": 24, "sources": ["recycle"]}
    answer = server.client.post("/v1/completions", json=body, headers=bearer(key))
    assert answer.status_code == 200
    return answer.json()


def test_a_second_key_finds_nothing_of_the_first(guarded: Running) -> None:
    pool = guarded.model.backend.pool
    first, again = ask(guarded, KEYS[0]), ask(guarded, KEYS[0])
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64
    assert again["usage"]["lookahead"]["steps"] < first["usage"]["lookahead"]["steps"]
    hits = pool.hit_tokens
    other = ask(guarded, KEYS[1])
    assert pool.hit_tokens == hits
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert other["choices"] == first["choices"]
    # The same steps as the first key's first request: nothing that it taught is used.
    assert other["usage"]["lookahead"] == first["usage"]["lookahead"]
    owners = guarded.service.keys.owners
    assert owners[0].memory is not owners[1].memory
    assert len({owner.salt for owner in owners}) == 3


def test_metrics_tell_no_key_of_anothers_hits(guarded: Running) -> None:
    """They are sums over all keys, cache hits among them, so that they are for keys with the right alone."""
    for _ in range(2):
        ask(guarded, KEYS[0])  # the second time it hits
    for key in KEYS:
        answer = guarded.client.get("/metrics", headers=bearer(key))
        assert answer.status_code == 403
        assert "rights=metrics" in answer.json()["error"]["message"]
        assert "prefix_cache" not in answer.text
    (right,) = re.findall(r"prefix_cache_hits_total{\S*} (\S+)", metrics(guarded, WATCHER).text)
    assert float(right) >= 64


def metrics(server: Running, key: str) -> Any:
    return server.client.get("/metrics", headers=bearer(key.split()[0]))


def test_rights_belong_to_keys(loaded: Any) -> None:
    with running(loaded, keys=("lonely-secret",)) as server:
        assert metrics(server, "lonely-secret").status_code == 200
    with running(loaded, keys=("lonely-secret rights=trace",)) as server:
        assert metrics(server, "lonely-secret").status_code == 403
    with running(loaded, keys=(KEYS[0], WATCHER), share_memory=True) as server:
        assert metrics(server, KEYS[0]).status_code == 403
        assert metrics(server, WATCHER).status_code == 200
    ring = KeyRing((KEYS[0], "other-secret name=web rights=metrics+trace"), SharedMemory())
    assert [(owner.name, owner.rights) for owner in ring.owners] == [("key-1", set()), ("web", {"metrics", "trace"})]
    assert KeyRing((), SharedMemory()).owners[0].rights == {"metrics", "trace"}
    assert KeyRing((), SharedMemory(), public=True).owners[0].rights == {"metrics"}
    assert KeyRing(KEYS[:1], SharedMemory(), public=True).owners[0].rights == {"metrics", "trace"}


def test_share_memory_shares(make_paged: Callable[[], Any]) -> None:
    with running(make_paged(), keys=KEYS, share_memory=True) as server:
        ask(server, KEYS[0])
        assert ask(server, KEYS[1])["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64


def test_cors_is_off_unless_configured(guarded: Running, loaded: Any) -> None:
    page = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in guarded.client.get("/health", headers=page).headers
    with running(loaded, cors_origins=("https://page.example",), keys=KEYS) as server:
        assert server.client.options("/v1/completions", headers=page).status_code == 200
        answer = server.client.get("/v1/models", headers={**page, **bearer(KEYS[0])})
        assert answer.headers["access-control-allow-origin"] == "https://page.example"
        other = {**page, "Origin": "https://other.example"}
        assert server.client.options("/v1/completions", headers=other).status_code == 400


def test_keys_come_from_a_file_or_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\nfirst-secret\n\nsecond-secret\n")
    assert read_keys(path, {}) == KEYS
    assert read_keys(None, {"LOOKAHEAD_API_KEYS": "first-secret, second-secret"}) == KEYS
    assert read_keys(None, {}) == ()
    assert read_keys(None, {"LOOKAHEAD_API_KEYS": f"first-secret,{WATCHER}"}) == ("first-secret", WATCHER)
    for text, says in (
        ("", "has no key"),
        ("short", "at least 8"),
        ("with a space", "no spaces"),
        ("some-secret trace", "no spaces, and only name=NAME"),
        ("same-same\nsame-same name=x", "a duplicate key"),
        ("some-secret rights=metric", "unknown rights; there are metrics, trace"),
        ("some-secret rights=", "unknown rights"),
        ("some-secret rights=trace rights=metrics", "no spaces, and only name=NAME"),
        ("some-secret name=a/b", "a name that is not"),
        ("some-secret name=a\nother-secret name=a", "a duplicate name"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=says) as raised:
            read_keys(path, {})
        assert not text or text.split()[0] not in str(raised.value).replace("a duplicate key", "")
    with pytest.raises(ValueError, match="cannot be read"):
        read_keys(tmp_path / "nothing", {})


def test_a_ring_keeps_no_key_in_plain() -> None:
    ring = KeyRing(KEYS, SharedMemory())
    assert ring.owner(f"bearer {KEYS[1]}") is ring.owners[1]
    assert not any(key in repr(vars(ring)) + repr([vars(owner) for owner in ring.owners]) for key in KEYS)
    with pytest.raises(ApiError):
        ring.owner("Basic Zmlyc3Q6c2VjcmV0")
    assert "secret" not in repr(ServeSettings(keys=KEYS))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"host": "0.0.0.0"}, "there is no API key; give --api-key-file, or --allow-public"),
        ({"host": "example.org"}, "is reachable from other machines"),
        ({"port": 70000}, "port=70000"),
        ({"max_concurrency": 0}, "max_concurrency=0 must be at least 1"),
        ({"request_timeout": 0.0}, "request_timeout=0.0"),
        ({"drain_seconds": float("nan")}, "drain_seconds=nan"),
    ],
)
def test_settings_are_checked(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ServeSettings(**changes)


def test_public_addresses_are_allowed_with_a_key_or_a_flag() -> None:
    assert ServeSettings(host="0.0.0.0", keys=KEYS).keys == KEYS
    assert ServeSettings(host="0.0.0.0", public=True).public
    assert ServeSettings(host="::1").host == "::1"
