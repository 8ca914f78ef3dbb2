"""Binds the server's address before the model is loaded, so that a port in use shows at once.

Until the server is ready the sockets are bound but do not listen: connections are refused.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
"""Errors of a host name that resolves to addresses this machine lacks, such as IPv6 ones."""
REASONS = {
    errno.EADDRINUSE: "the port is in use; stop what uses it, or give another --port (0 for any free one)",
    errno.EACCES: "there is no permission to; give a --port from 1024 up",
    errno.EADDRNOTAVAIL: "this machine has no such address; give another --host, such as 127.0.0.1",
}


@contextmanager
def bound(host: str, port: int) -> Iterator[list[socket.socket]]:
    """Sockets bound to the address, closed at the end of the context. Raises ValueError if binding fails."""
    sockets = bind(host, port)
    try:
        yield sockets
    finally:
        for one in sockets:
            one.close()


def bind(host: str, port: int) -> list[socket.socket]:
    """One socket per address of the host name; for port 0, only one for the first address."""
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        why = f"the host is not known ({error.args[-1]}); give another --host, such as 127.0.0.1"
        raise ValueError(f"cannot listen on {host_port(host, port)}: {why}") from error
    sockets: list[socket.socket] = []
    absent: OSError | None = None
    for family, address in dict.fromkeys((family, address) for family, _, _, _, address in found):
        try:
            sockets.append(_bind(family, address))
        except OSError as error:
            absent = error
            if error.errno not in ABSENT:
                for one in sockets:
                    one.close()
                raise cannot_listen(host, port, error) from error
        if sockets and port == 0:
            break
    if not sockets and absent is not None:
        raise cannot_listen(host, port, absent) from absent
    return sockets


def _bind(family: socket.AddressFamily, address: Any) -> socket.socket:
    one = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            one.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            # SO_REUSEADDR ignores an earlier server's connections in TIME_WAIT. Two sockets that both have it may
            # share a port until one listens, so it is set only if binding without it has failed.
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(address)
    except BaseException:
        one.close()
        raise
    return one


def allow_port_reuse(sockets: Sequence[socket.socket]) -> None:
    """Call this just before listening, so that this server's connections do not block a later one."""
    for one in sockets:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def cannot_listen(host: str, port: int, error: OSError) -> ValueError:
    """The error message for whoever starts the server."""
    why = REASONS.get(error.errno or 0) or error.strerror or str(error)
    return ValueError(f"cannot listen on {host_port(host, port)}: {why}")


def host_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
