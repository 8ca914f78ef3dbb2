"""What comes over a connection besides good requests: a flood of headers, no HTTP at all, requests one behind another.

The server answers in OpenAI's form where it can, ends that connection alone, and serves the others.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable
from itertools import repeat

import pytest
from http_server import Running, soon

from lookahead.serve.connection import MOST_HEADERS

GET = b"GET /health HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
BODY = b'{"prompt": "the", "max_tokens": 2, "temperature": 0}'
FLOOD = 16 << 20
"""Bytes after which a server that still reads counts as one that reads on for ever."""


def talk(server: Running, parts: Iterable[bytes]) -> tuple[int, bytes]:
    """Send the parts until the server ends the connection or they are over. The bytes sent, and the answer."""
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
        except OSError:
            pass
        try:
            while more := line.recv(1 << 16):
                answer += more
        except OSError:  # what was sent after the end of the connection resets it
            pass
    return sent, answer


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
        b"GET /" + b"y" * MOST_HEADERS + b" HTTP/1.1\r\nHost: x\r\n\r\n",
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
        (GET + b"X-A: ", b"y" * 1000),
        (GET, b"X-A: yyyy\r\n" * 100),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n", b"X-A: yyyy\r\n" * 100),  # behind the body
        (POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nX-A: ", b"y" * 1000),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n1;a=", b"y" * 1000),
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


def test_requests_one_behind_another(server: Running) -> None:
    one = POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
    _, answer = talk(server, [one * 3 + GET + b"Connection: close\r\n\r\n"])
    assert answer.count(b"HTTP/1.1 200 OK") == 4
    assert answer.count(b'"text_completion"') == 3


def test_a_body_in_many_small_chunks(server: Running) -> None:
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY)
    _, answer = talk(
        server, [POST + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"]
    )
    assert status(answer) == 200
    text = server.complete(**json.loads(BODY))["choices"][0]["text"]
    assert json.dumps(text).encode() in answer
