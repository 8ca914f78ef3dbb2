"""One connection to a client: uvicorn's fast parser, with a limit on headers and with our kind of error."""

from __future__ import annotations

import json
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from lookahead.serve.errors import ApiError, bad_request

MOST_HEADERS = 64 << 10
"""How many bytes a request's line and headers may have, and what may follow a body in pieces."""


class Connection(HttpToolsProtocol):
    """httptools reads headers of any length, and keeps them; this ends the connection of who sends too many.

    Headers count when they are whole. What came since the last whole thing counts, too: one header may have no end.
    """

    _headers = 0  # bytes of the request's line and of its headers, as far as they are whole
    _unread = 0  # bytes that came since the last headers, piece of a body, or end of a request
    _refusal: ApiError | None = None

    def data_received(self, data: bytes) -> None:
        self._unread += len(data)
        super().data_received(data)
        if self._unread > MOST_HEADERS and self._refusal is None:
            self._refuse()
            self.send_400_response("")

    def on_message_begin(self) -> None:
        self._headers = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._unread = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unread = 0
        super().on_message_complete()

    def _count(self, size: int) -> None:
        """An error here reaches `send_400_response` by way of the parser."""
        self._headers += size
        if self._headers > MOST_HEADERS:
            raise self._refuse()

    def _refuse(self) -> ApiError:
        self._refusal = ApiError(431, f"the headers have more than {MOST_HEADERS} bytes; send fewer", code="headers")
        return self._refusal

    def send_400_response(self, msg: str) -> None:
        """Tell what is wrong in OpenAI's form, if no reply is being sent, and end the connection."""
        error = self._refusal or bad_request("this is not HTTP/1.1", code="invalid_http")
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            content = json.dumps(error.body()).encode()
            head = (
                f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
                f"content-type: application/json\r\ncontent-length: {len(content)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + content)
        self.transport.close()
