"""Closing a connection: the client can still read the last response. Half-closed clients, and those that have left.

A socket that is closed while bytes of the client are unread resets the connection, and the client may lose a response
that it had not read yet. So after an error in the middle of a request the server closes its own side only, and reads on
for a while.

A client may also close its side: it has sent everything, and waits for the answer. It looks the same as a client that
has left, until something is written to it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

LINGER_SECONDS = 5.0
LINGER_BYTES = 32 << 20
"""How long, and how much, a server reads that has answered already. Bodies with pictures have up to 20 MB."""
TICK = 0.25
"""Seconds between checks of a client that has closed its side."""
SILENCE = 2
"""Ticks before the first probe: most answers are there before, and not every client expects an interim response."""
PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"
"""Without a meaning, allowed at any time before a response, and reset by a client that has left."""


class Closing:
    """A transport for responses. While the client `sends`, `close` lets it read the response first."""

    def __init__(self, transport: asyncio.Transport, sends: Callable[[], bool], resume: Callable[[], None]) -> None:
        self.transport, self.write, self.is_closing = transport, transport.write, transport.is_closing
        self.lingers = False
        self._sends, self._resume, self._discarded = sends, resume, 0
        self._timer: asyncio.TimerHandle | None = None

    def close(self) -> None:
        if self.lingers or self.transport.is_closing():
            return
        if not (self._sends() and self.transport.can_write_eof()):
            self.transport.close()
            return
        self.lingers = True
        self.transport.write_eof()
        self._resume()
        self._timer = asyncio.get_running_loop().call_later(LINGER_SECONDS, self.transport.abort)

    def discard(self, size: int) -> None:
        """Count bytes that came after the response."""
        self._discarded += size
        if self.lingers and self._discarded > LINGER_BYTES:
            self.transport.abort()

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class Listener:
    """Watches a client that has closed its side, while `waits`. The connection is aborted once it turns out to be gone.

    `probes` says whether an interim response may be sent now. It is sent after a moment, and every `period` seconds.
    """

    def __init__(
        self, transport: asyncio.Transport, waits: Callable[[], bool], probes: Callable[[], bool], period: float
    ) -> None:
        self.transport, self.waits, self.probes = transport, waits, probes
        self._period, self._due = max(1, round(period / TICK)), SILENCE
        self._timer = asyncio.get_running_loop().call_later(TICK, self._tick)

    def _tick(self) -> None:
        if self.transport.is_closing() or not self.waits():
            return
        if failed(self.transport):
            self.transport.abort()
            return
        self._due -= 1
        if self._due <= 0 and self.probes():
            self._due = self._period
            self.transport.write(PROBE)
        self._timer = asyncio.get_running_loop().call_later(TICK, self._tick)

    def cancel(self) -> None:
        self._timer.cancel()


def failed(transport: asyncio.Transport) -> bool:
    """Whether the connection was reset. A transport that has read the end does not watch for it any more."""
    one: Any = transport.get_extra_info("socket")
    try:
        return bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
    except OSError:
        return True
