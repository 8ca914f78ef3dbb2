"""Clients that send slowly, close their side, or send more than is read: each gets an answer that it can read."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import pytest
from http_server import Running, running, soon

from lookahead.serve.closing import LINGER_BYTES
from lookahead.serve.connection import MOST_HEADERS
from lookahead.serve.logs import fields_of

GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
SHORT = 0.3


@pytest.fixture(scope="module")
def hasty(loaded: Any) -> Iterator[Running]:
    """A server that does not wait long."""
    with running(loaded, header_timeout=SHORT, body_timeout=2 * SHORT) as one:
        yield one


@pytest.fixture
def slow(server: Running, monkeypatch: pytest.MonkeyPatch) -> Running:
    step = server.model.engine.step
    monkeypatch.setattr(server.model.engine, "step", lambda: (time.sleep(0.01), step())[1])
    return server


def connected(server: Running) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def post(http: bytes = b"1.1", **body: object) -> bytes:
    content = json.dumps({"prompt": "the", "temperature": 0, "ignore_eos": True, **body}).encode()
    return POST.replace(b"1.1", http) + b"Content-Length: %d\r\n\r\n" % len(content) + content


def read_all(line: socket.socket) -> bytes:
    """To the end. A connection that is reset fails the test."""
    answer = b""
    while more := line.recv(1 << 16):
        answer += more
    return answer


def read_health(line: socket.socket) -> bytes:
    """The answer of a connection that stays open."""
    answer = b""
    while not answer.endswith(b'"alive"}'):
        answer += line.recv(1 << 16)
    return answer


def status_and_error(answer: bytes) -> tuple[int, dict[str, Any]]:
    return int(answer.split(b" ", 2)[1]), json.loads(answer.partition(b"\r\n\r\n")[2])["error"]


# Slow clients.


@pytest.mark.parametrize(
    ("begin", "part", "what"),
    [
        (GET + b"X-A: ", b"", "headers"),
        (GET + b"X-A: ", b"y", "headers"),
        (GET, b"X-A: y\r\n", "headers"),
        (POST + b"Content-Length: 1000\r\n\r\n{", b"", "body"),
        (POST + b"Content-Length: 1000\r\n\r\n{", b"1", "body"),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n1\r\n", "body"),
    ],
    ids=["headers", "header by letter", "header by header", "body", "body by letter", "body by chunk"],
)
@pytest.mark.thinned(1, most=3)
def test_a_slow_client_gets_a_408(
    hasty: Running, caplog: pytest.LogCaptureFixture, begin: bytes, part: bytes, what: str
) -> None:
    caplog.set_level(logging.INFO, "lookahead")
    refused, answer, start = hasty.service.metrics.refused["408"], b"", time.monotonic()
    with closing(connected(hasty)) as line:
        line.sendall(begin)
        line.settimeout(0.05)
        while not answer and time.monotonic() < start + 5:
            line.sendall(part)
            try:
                answer = line.recv(1 << 16)
            except TimeoutError:
                continue
        took = time.monotonic() - start
        line.settimeout(10)
        answer += read_all(line)
    assert SHORT * (2 if what == "body" else 1) * 0.9 < took < 2
    status, error = status_and_error(answer)
    assert (status, error["code"]) == (408, "timeout")
    assert f"the {what} did not arrive within" in error["message"]
    assert b"connection: close" in answer.lower()
    assert hasty.service.metrics.refused["408"] == refused + 1
    assert soon(lambda: len(requests(caplog)) == 1, 2)
    (logged,) = requests(caplog)
    assert (logged["status"], logged["path"]) == (408, "/health" if what == "headers" else "/v1/completions")
    assert b"x-request-id: %b" % logged["request_id"].encode() in answer


def requests(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [dict(fields_of(record)) for record in caplog.records if record.getMessage() == "request"]


def test_a_client_that_sends_nothing_is_cut_without_an_answer(hasty: Running) -> None:
    with closing(connected(hasty)) as line:
        assert read_all(line) == b""


def test_a_second_request_has_its_own_time(hasty: Running) -> None:
    with closing(connected(hasty)) as line:
        line.sendall(GET + b"\r\n")
        assert b"200 OK" in read_health(line)
        time.sleep(1.5 * SHORT)
        line.sendall(GET + b"\r\n")
        assert b"200 OK" in read_health(line)
        line.sendall(GET)
        assert b" 408 " in read_all(line)


def test_a_slow_next_request_does_not_end_an_answer(hasty: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    step = hasty.model.engine.step
    monkeypatch.setattr(hasty.model.engine, "step", lambda: (time.sleep(0.01), step())[1])
    with closing(connected(hasty)) as line:
        line.sendall(post(max_tokens=60, lookahead=False) + b"GET /hea")
        answer = read_all(line)
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.count(b"HTTP/1.1") == 1


# Clients that close their side.


@pytest.mark.parametrize("http", [b"1.1", b"1.0"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_closes_its_side_gets_its_answer(server: Running, stream: bool, http: bytes) -> None:
    expected = server.complete(prompt="the", max_tokens=30, temperature=0, ignore_eos=True)["choices"][0]["text"]
    with closing(connected(server)) as line:
        line.sendall(post(http, max_tokens=30, stream=stream))
        line.shutdown(socket.SHUT_WR)
        answer = read_all(line)
    assert answer.startswith(b"HTTP/1.1 200")
    if stream:
        events = [json.loads(part[6:].split(b"\n")[0]) for part in answer.split(b"\n\n") if part[:7] == b"data: {"]
        events += [json.loads(part.split(b"data: ")[1]) for part in answer.split(b"\n\n") if b"\r\ndata: {" in part]
        assert b"data: [DONE]" in answer
        assert sum(len(event["choices"][0]["text"]) for event in events) == len(expected)
    else:
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["text"] == expected


def test_a_long_answer_to_a_closed_side_begins_with_an_interim_one(slow: Running) -> None:
    with closing(connected(slow)) as line:
        line.sendall(post(max_tokens=120, lookahead=False))
        line.shutdown(socket.SHUT_WR)
        answer = read_all(line)
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")
    assert json.loads(answer.split(b"\r\n\r\n", 2)[2])["usage"]["completion_tokens"] == 120


@pytest.mark.parametrize("stream", [False, True])
def test_one_that_leaves_later_is_noticed(slow: Running, stream: bool) -> None:
    with closing(connected(slow)) as line:
        line.sendall(post(max_tokens=450, lookahead=False, stream=stream))
        assert soon(lambda: bool(slow.model.engine.running))
        line.shutdown(socket.SHUT_WR)
        time.sleep(0.3)
        assert slow.service.replies
    assert soon(lambda: not slow.service.replies and not slow.model.engine.running, 3)


def test_a_waiting_stream_that_has_left_frees_its_place(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    step = loaded.engine.step
    monkeypatch.setattr(loaded.engine, "step", lambda: (time.sleep(0.02), step())[1])
    with running(loaded, max_concurrency=1) as server, closing(connected(server)) as first:
        first.sendall(post(max_tokens=400, lookahead=False, stream=True))
        assert soon(lambda: bool(loaded.engine.running))
        with closing(connected(server)) as second:
            second.sendall(post(max_tokens=9, stream=True))
            assert soon(lambda: server.service.queue.taken == 2)
            assert second.recv(1 << 16).startswith(b"HTTP/1.1 200")
        assert soon(lambda: server.service.queue.taken == 1, 3)


@pytest.mark.parametrize("begin", [GET, POST + b"Content-Length: 100\r\n\r\n{"], ids=["headers", "body"])
def test_half_a_request_before_the_end_is_not_answered(server: Running, begin: bytes) -> None:
    with closing(connected(server)) as line:
        line.sendall(begin)
        line.shutdown(socket.SHUT_WR)
        assert b" 200 " not in read_all(line)


# More than the server reads.


@pytest.mark.parametrize(
    ("request_bytes", "expected"),
    [
        (GET + b"X-A: " + b"y" * (8 << 20) + b"\r\n\r\n", 431),
        (POST + b"Content-Length: 8000000\r\n\r\n" + b"y" * 8_000_000, 413),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n" + (b"10000\r\n" + b"y" * 65536 + b"\r\n") * 120, 413),
        (POST.replace(b"/json", b"/text") + b"Content-Length: 8000000\r\n\r\n" + b"y" * 8_000_000, 415),
        (b"no HTTP at all\r\n" * 100_000, 400),
    ],
    ids=["headers", "body", "chunks", "content type", "no HTTP"],
)
def test_the_answer_can_be_read_after_all_was_sent(server: Running, request_bytes: bytes, expected: int) -> None:
    with closing(connected(server)) as line:
        line.sendall(request_bytes)
        time.sleep(0.1)
        status, error = status_and_error(read_all(line))
    assert status == expected
    assert error["message"]


def test_a_client_that_never_stops_is_cut(server: Running) -> None:
    sent = 0
    with closing(connected(server)) as line, suppress(ConnectionError):
        line.sendall(GET + b"X-A: ")
        while sent < 4 * LINGER_BYTES:
            line.sendall(b"y" * MOST_HEADERS)
            sent += MOST_HEADERS
    assert LINGER_BYTES / 2 < sent < 3 * LINGER_BYTES
    assert server.client.get("/health").status_code == 200
