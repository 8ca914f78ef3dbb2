"""What comes over a connection besides good requests: a flood of headers, no HTTP at all, requests one behind another.

The server answers in OpenAI's form where it can, ends that connection alone, and serves the others.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Any

import pytest
from http_server import Running, soon

from lookahead.serve.connection import MOST_HEADERS

GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = b'{"prompt": "the", "max_tokens": 2, "temperature": 0}'
FLOOD = 64 << 20
"""Bytes after which a server that still reads counts as one that reads on for ever."""


def talk(server: Running, parts: Iterable[bytes]) -> tuple[int, bytes]:
    """Send the parts until the server ends the connection or they are over. The bytes sent, and the answer.

    TimeoutError if the server does not end it.
    """
    host, port = server.url.removeprefix("http://").split(":")
    sent, answer = 0, b""
    with socket.create_connection((host, int(port))) as line:
        line.settimeout(10)
        try:
            for part in parts:
                line.sendall(part)
                sent += len(part)
                if sent > FLOOD:
                    break
        except TimeoutError:
            raise
        except OSError:
            pass
        try:
            while more := line.recv(1 << 16):
                answer += more
        except TimeoutError:
            raise
        except OSError:  # what was sent after the end of the connection resets it
            pass
    return sent, answer


def post(**body: object) -> bytes:
    """A request for a completion."""
    content = json.dumps({"prompt": "the", "temperature": 0, **body}).encode()
    return POST + b"Content-Length: %d\r\n\r\n" % len(content) + content


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def test_headers_up_to_the_limit(server: Running) -> None:
    for size in (100, MOST_HEADERS - 100):
        assert status(talk(server, [GET + b"Connection: close\r\nX-A: " + b"y" * size + b"\r\n\r\n"])[1]) == 200


@pytest.mark.parametrize(
    "request_bytes",
    [
        GET + b"X-A: " + b"y" * MOST_HEADERS + b"\r\n\r\n",
        GET + b"X-A: yyyy\r\n" * (MOST_HEADERS // 7 + 1) + b"\r\n",
        b"GET /" + b"y" * MOST_HEADERS + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        GET + b"X-A: " + b"y" * (MOST_HEADERS + 1000),  # it has no end
    ],
    ids=["one", "many", "line", "endless"],
)
def test_more_headers_than_that(server: Running, request_bytes: bytes) -> None:
    _, answer = talk(server, [request_bytes])
    assert status(answer) == 431
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert error["code"] == "headers"
    assert str(MOST_HEADERS) in error["message"]
    assert server.client.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("first", "part"),
    [
        (GET + b"X-A: ", b"y" * 4000),
        (GET, b"X-A: yyyy\r\n" * 400),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n", b"X-A: yyyy\r\n" * 400),  # behind the body
        (POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nX-A: ", b"y" * 4000),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n1;a=", b"y" * 4000),
    ],
    ids=["a header", "headers", "trailers", "a trailer", "a chunk"],
)
def test_a_flood_in_small_pieces_ends_that_connection_alone(server: Running, first: bytes, part: bytes) -> None:
    sent, _ = talk(server, (piece for group in ([first], repeat(part)) for piece in group))
    assert sent < FLOOD
    assert server.client.get("/health").status_code == 200
    assert soon(lambda: not server.service.replies, 2)


def test_what_is_not_http(server: Running) -> None:
    for words in (b"hello there, this is no HTTP\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 10):
        _, answer = talk(server, [words])
        assert status(answer) == 400
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"
    assert server.client.get("/health").status_code == 200


def test_requests_one_after_the_other(server: Running) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as line:
        line.settimeout(10)
        for _ in range(3):
            line.sendall(post(max_tokens=2))
            answer = b""
            while not answer.endswith(b"}}}"):
                answer += line.recv(1 << 16)
            assert status(answer) == 200


@pytest.mark.parametrize(
    "more",
    [GET + b"\r\n", GET + b"\r\nno HTTP\r\n\r\n", b"no HTTP\r\n\r\n", (GET + b"\r\n") * 50_000],
    ids=["request", "request and more", "no request", "flood"],
)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.thinned(1, most=4)
def test_a_connection_ends_after_the_answer_to_the_first_of_several_requests(
    server: Running, more: bytes, stream: bool
) -> None:
    _, answer = talk(server, [post(max_tokens=40, stream=stream) + more])
    assert status(answer) == 200
    assert answer.count(b"HTTP/1.1") == 1
    assert (b"data: [DONE]" in answer) == stream
    assert soon(lambda: not server.service.replies, 2)


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_first_request(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stream: bool, later: bool
) -> None:
    step = server.model.engine.step

    def slower() -> Any:
        time.sleep(0.01)
        return step()

    monkeypatch.setattr(server.model.engine, "step", slower)
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as line:
        line.sendall(post(max_tokens=400, ignore_eos=True, lookahead=False, stream=stream))
        assert not later or soon(lambda: bool(server.model.engine.running))
        line.sendall(GET + b"\r\n")
        assert soon(lambda: bool(server.model.engine.running))
        time.sleep(0.1)
    assert soon(lambda: not server.service.replies, 2)
    assert soon(lambda: not server.model.engine.running, 2)
    assert not caplog.records


def test_a_body_that_cannot_be_read(server: Running) -> None:
    _, answer = talk(server, [POST + b"Transfer-Encoding: chunked\r\n\r\nno number\r\n"])
    assert status(answer) == 400
    assert answer.count(b"HTTP/1.1") == 2  # the error says that this is not HTTP/1.1
    assert soon(lambda: not server.service.replies, 2)


def in_pieces(whole: bytes, count: int) -> Iterator[bytes]:
    size = -(-len(whole) // count)
    for begin in range(0, len(whole), size):
        yield whole[begin : begin + size]
        time.sleep(0.005)


UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"


@pytest.mark.parametrize("pieces", [1, 2, 40])
def test_a_request_that_offers_another_protocol_is_answered_in_this_one(server: Running, pieces: int) -> None:
    """As Java's client does, and `curl --http2`."""
    size = b"Content-Length: %d\r\n\r\n" % len(BODY)
    chunks = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    for whole, has in (
        (POST + UPGRADE + size + BODY, b'"text_completion"'),
        (POST + UPGRADE + chunks, b'"text_completion"'),
        (GET + UPGRADE.replace(b"h2c", b"websocket") + b"\r\n", b'{"status":"alive"}'),
    ):
        _, answer = talk(server, in_pieces(whole.replace(b"Upgrade,", b"close, Upgrade,"), pieces))
        assert status(answer) == 200
        assert has in answer


def test_a_tunnel_is_refused(server: Running) -> None:
    for place in (b"x:80", b"http://x/health", b"/health"):
        assert status(talk(server, [b"CONNECT %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % place])[1]) == 400


def test_trailers_are_no_headers(server: Running) -> None:
    body = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n" % (len(BODY), BODY)
    trailers = b"Content-Type: text/plain\r\nX-A: y\r\n\r\n"
    assert status(talk(server, [POST + b"Connection: close\r\n" + body + trailers])[1]) == 200


def test_space_behind_a_header_is_no_part_of_it(server: Running) -> None:
    tag = server.client.get("/").headers["etag"].encode()
    head = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nIf-None-Match: "
    assert status(talk(server, [head + tag + b" \t\r\n\r\n"])[1]) == 304


def test_a_stream_without_chunks_for_the_old_http(server: Running) -> None:
    request = post(max_tokens=20, stream=True).replace(b"HTTP/1.1", b"HTTP/1.0")
    head, _, body = talk(server, [request])[1].partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    events = body.split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    assert all(event.startswith(b"data: {") for event in events[:-2])
    for method, size in ((b"GET", 18), (b"HEAD", 0)):
        answer = talk(server, [method + b" /health HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"])[1]
        assert len(answer.partition(b"\r\n\r\n")[2]) == size


def test_a_body_in_many_small_chunks(server: Running) -> None:
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY)
    _, answer = talk(
        server, [POST + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"]
    )
    assert status(answer) == 200
    text = server.complete(**json.loads(BODY))["choices"][0]["text"]
    assert json.dumps(text).encode() in answer
