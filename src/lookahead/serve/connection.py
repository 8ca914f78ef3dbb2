"""One connection to a client: uvicorn's faster parser, with limits, and with our kind of error.

With httptools a reply takes a quarter less of the event loop's time than with h11. But httptools reads headers of any
length, and uvicorn puts requests that come before the answer to an earlier one into a queue without an end. This class
limits the headers. It ends a connection after the answer to the first of several requests, as HTTP allows: clients of a
model send one at a time.
"""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from lookahead.serve.errors import ApiError, bad_request

MOST_HEADERS = 64 << 10
"""How many bytes a request's line and headers may have, and what may follow a body in pieces."""


class Connection(HttpToolsProtocol):
    """Headers count when they are whole. What came since the last whole thing counts, too: one header may have no end.

    What cannot be read ends the connection, after the answer to a request before it.
    """

    _headers = 0  # bytes of the request's line and of its headers, as far as they are whole
    _unread = 0  # bytes that came since the last headers, piece of a body, or end of a request
    _trailers = False  # headers that come now stand behind the body
    _over = False  # nothing more is read

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._unread += len(data)
        try:
            while data and not self._over:
                data = self._feed(data)
            if self._unread > MOST_HEADERS and not self._over:
                self._end(too_many_headers())
        except HttpParserError as error:  # what one of the methods below has raised is its cause
            cause = error.__context__
            self._end(
                cause if isinstance(cause, ApiError) else bad_request("this is not HTTP/1.1", code="invalid_http")
            )

    def _feed(self, data: bytes) -> bytes:
        """Let the parser read. Returns what is to be read again: after a request with an `Upgrade` header the parser
        expects another protocol, so such a request is read once more without that header, and with its body.

        Java's HTTP client sends that header with every first request to a server without TLS.
        """
        try:
            self.parser.feed_data(data)
        except HttpParserUpgrade as upgrade:
            method, version = self.parser.get_method(), self.parser.get_http_version().encode()
            headers = [b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade"]
            self.parser = HttpRequestParser(self)
            return b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version, b"".join(headers)) + data[upgrade.args[0] :]
        return b""

    # What the parser calls.

    def on_message_begin(self) -> None:
        self._headers, self._trailers = 0, False
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A trailer is no header: it came past whoever checked or set headers on the way, and changes none of them."""
        self._count(len(name) + len(value))
        if not self._trailers:
            super().on_header(name, value.rstrip(b" \t"))

    def on_headers_complete(self) -> None:
        self._unread, self._trailers = 0, True
        if self._answering:
            raise bad_request("one request at a time: send the next one after the answer")  # nobody is told this
        if not self.parser.should_upgrade():
            super().on_headers_complete()
            if self.scope["http_version"] < "1.1":
                send_without_chunks(self.cycle)
        elif self.parser.get_method() == b"CONNECT":
            raise bad_request("this server is no proxy")

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unread = 0
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _count(self, size: int) -> None:
        self._headers += size
        if self._headers > MOST_HEADERS:
            raise too_many_headers()

    @property
    def _answering(self) -> bool:
        """Whether a request has not got all of its answer."""
        return self.cycle is not None and not self.cycle.response_complete

    # The end.

    def _end(self, error: ApiError) -> None:
        """Read nothing more. If a whole request waits for its answer, it gets it. Else tell the error."""
        self._over = True
        if self._answering and not self.cycle.more_body:
            self.cycle.keep_alive = False
            return
        if not (self._answering and self.cycle.response_started):
            content = json.dumps(error.body()).encode()
            head = (
                f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
                f"content-type: application/json\r\ncontent-length: {len(content)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + content)
        if self._answering:
            self.cycle.disconnected = True  # uvloop lets nobody write to what is closed
        self.transport.close()


def too_many_headers() -> ApiError:
    return ApiError(431, f"the headers have more than {MOST_HEADERS} bytes; send fewer", code="headers")


def send_without_chunks(cycle: RequestResponseCycle) -> None:
    """HTTP/1.0 knows no chunks: an answer of unknown length ends with the connection."""
    send, unknown = cycle.send, False

    async def send_plainly(message: Any) -> None:
        nonlocal unknown
        if message["type"] == "http.response.start":
            unknown = all(name.lower() != b"content-length" for name, _ in message.get("headers", []))
            if unknown:
                cycle.chunked_encoding = False
        elif unknown:  # uvicorn allows no more than was announced
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.keep_alive = False
    cycle.send = send_plainly  # type: ignore[method-assign]
