"""One client connection: uvicorn's httptools protocol with limits and OpenAI-style errors.

With httptools a reply takes a quarter less of the event loop's time than with h11. But httptools accepts headers of any
length, and uvicorn queues pipelined requests without bound. This class limits the headers, and closes the connection
after the response to the first of several pipelined requests, as HTTP allows: clients of a model send one at a time.
"""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from lookahead.serve.errors import ApiError, bad_request

MOST_HEADERS = 64 << 10
"""The most bytes of the request line and headers together, and of the trailers after a chunked body."""


class Connection(HttpToolsProtocol):
    """Limits both complete headers and unparsed bytes: a single header may never end.

    Malformed input closes the connection, after the response to an earlier request has been sent.
    """

    _headers = 0  # bytes of the request line and of the complete headers
    _unread = 0  # bytes received since the last header block, body chunk, or end of a request
    _trailers = False  # the body has ended: further headers are trailers
    _over = False  # stop reading

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._unread += len(data)
        try:
            while data and not self._over:
                data = self._feed(data)
            if self._unread > MOST_HEADERS and not self._over:
                self._end(too_many_headers())
        except HttpParserError as error:  # an ApiError raised by a callback below is its context
            cause = error.__context__
            self._end(
                cause if isinstance(cause, ApiError) else bad_request("this is not HTTP/1.1", code="invalid_http")
            )

    def _feed(self, data: bytes) -> bytes:
        """Feed the parser. Returns data to parse again: after an `Upgrade` header the parser expects another protocol,
        so the request is parsed a second time without that header.

        Java's HTTP client sends that header with its first request to any server without TLS.
        """
        try:
            self.parser.feed_data(data)
        except HttpParserUpgrade as upgrade:
            method, version = self.parser.get_method(), self.parser.get_http_version().encode()
            headers = [b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade"]
            self.parser = HttpRequestParser(self)
            return b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version, b"".join(headers)) + data[upgrade.args[0] :]
        return b""

    # Parser callbacks.

    def on_message_begin(self) -> None:
        self._headers, self._trailers = 0, False
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Trailers are dropped: proxies that check or set headers do not see them."""
        self._count(len(name) + len(value))
        if not self._trailers:
            super().on_header(name, value.rstrip(b" \t"))

    def on_headers_complete(self) -> None:
        self._unread, self._trailers = 0, True
        if self._answering:
            raise bad_request("one request at a time: send the next one after the answer")  # not sent to anyone
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
        """Whether a response is still being sent."""
        return self.cycle is not None and not self.cycle.response_complete

    # Closing.

    def _end(self, error: ApiError) -> None:
        """Stop reading. A complete request still gets its response; otherwise send the error."""
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
            self.cycle.disconnected = True  # uvloop raises on writes to a closed transport
        self.transport.close()


def too_many_headers() -> ApiError:
    return ApiError(431, f"the headers have more than {MOST_HEADERS} bytes; send fewer", code="headers")


def send_without_chunks(cycle: RequestResponseCycle) -> None:
    """HTTP/1.0 has no chunked encoding: a response of unknown length ends with the connection."""
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
