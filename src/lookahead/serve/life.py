"""Runs the server: the ready line, draining at the first signal, exit at the second."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import uvicorn

from lookahead.generate import LookaheadModel
from lookahead.serve.app import make_app
from lookahead.serve.connection import Connection
from lookahead.serve.errors import unavailable
from lookahead.serve.service import Service
from lookahead.serve.settings import ServeSettings
from lookahead.serve.sockets import allow_port_reuse, bind, cannot_listen

SWITCH_SECONDS = 0.0005
"""How long the event loop may hold the GIL while the engine's thread waits for it. Python's own 5 ms are as long as
a step on a GPU. Not tuned: between 0.1 and 2 ms no difference was seen with steps of 5 ms on two busy cores."""
YOUNG_OBJECTS = 20_000
"""New objects before a collection of the youngest generation. Python's default of 700 is about ten requests: with 32
streams, 30 collections a second took 2 to 3% of the time."""
FLUSH_SECONDS = 0.5
"""Seconds for clients to read the error that ends their stream."""
POLL = 0.02


class Server(uvicorn.Server):
    """Uvicorn with draining: after the first signal no new requests are accepted, and running ones may finish.

    `sockets` are bound already (see `sockets`). The service starts before they listen, and its startup errors are
    raised: an application lifespan, uvicorn's own way, would hide them behind an exit code. `on_ready` is called once
    they listen.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        service: Service,
        say: Callable[[str], None],
        sockets: list[socket.socket],
        on_ready: Callable[[Server], None],
    ) -> None:
        super().__init__(config)
        self.service, self.say, self._sockets, self._on_ready = service, say, sockets, on_ready
        self.ignores_signals = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve, after binding the address unless that is done."""
        host, port = self.service.settings.host, self.service.settings.port
        await super().serve(sockets or self._sockets or bind(host, port))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        host, port = self.service.settings.host, self.service.settings.port
        try:
            await self.service.start()
        except Exception as error:
            raise ValueError(f"the server cannot start: {type(error).__name__}: {error}") from error
        try:
            allow_port_reuse(sockets or ())
            await super().startup(sockets)
        except OSError as error:
            raise cannot_listen(host, port, error) from error
        self._loop = asyncio.get_running_loop()
        if self.started:
            self._on_ready(self)

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second. A server whose device is lost ends."""
        if self.service.lost is not None and self._drain is None:
            self._drain = asyncio.ensure_future(self._end_all(str(self.service.lost)))
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        await self.service.close()

    @property
    def address(self) -> str:
        """Where the server listens, as a URL."""
        return address_of(self.servers[0].sockets[0])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second exits at once."""
        if self.ignores_signals:
            return
        if self.service.draining:
            os._exit(128 + sig)
        self.begin_drain()

    def begin_drain(self) -> None:
        """Stop accepting requests. May be called from any thread."""
        self.service.draining = True
        if self._loop is None:
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self._start_drain)

    def _start_drain(self) -> None:
        if self._drain is None:
            self._drain = asyncio.ensure_future(self._finish())

    async def _finish(self) -> None:
        service, loop = self.service, asyncio.get_running_loop()
        end = loop.time() + service.settings.drain_seconds
        if service.replies:
            self.say(f"finishing {len(service.replies)} requests, at most {service.settings.drain_seconds:g} s")
        while service.replies and loop.time() < end and service.lost is None:
            await asyncio.sleep(POLL)
        if service.replies:
            self.say(f"ending {len(service.replies)} requests that were not finished in time")
        await self._end_all("the server has shut down before the reply was finished; try another server")

    async def _end_all(self, reason: str) -> None:
        """End running requests with an error, give clients a moment to read it, and stop the server."""
        service, loop = self.service, asyncio.get_running_loop()
        service.fail_all(unavailable(reason))
        end = loop.time() + FLUSH_SECONDS
        while service.replies and loop.time() < end:
            await asyncio.sleep(POLL)
        self.should_exit = True


def address_of(listening: socket.socket) -> str:
    """Where a socket listens, as a URL."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def say_ready(server: Server) -> None:
    server.say(ready_line(server.address, server.service))


def ready_line(address: str, service: Service) -> str:
    key = ' -H "Authorization: Bearer $KEY"' if service.settings.keys else ""
    body = '{"messages": [{"role": "user", "content": "Hello"}]}'
    return (
        f"serving {service.name} at {address}/v1\n"
        f"see it in a browser: {address}/\n"
        f"try: curl {address}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"
    )


def make_server(
    model: LookaheadModel,
    settings: ServeSettings,
    say: Callable[[str], None],
    kind: Callable[..., Service] = Service,
    sockets: Sequence[socket.socket] = (),
    on_ready: Callable[[Server], None] = say_ready,
) -> Server:
    """A server, ready to `run`. Without `sockets` it binds its address in `run`."""
    app = make_app(model, settings, kind)
    options: dict[str, Any] = {
        "lifespan": "off",  # `Server` starts and closes the service
        "log_config": None,  # its records go where ours go
        "log_level": "warning",
        "access_log": False,
        "server_header": False,
        "http": partial(Connection, settings=settings, refused=app.state.service.metrics.refused),
        "ws": "none",
        "timeout_graceful_shutdown": 2,
    }
    return Server(uvicorn.Config(app, **options), app.state.service, say, list(sockets), on_ready)


def serve(
    model: LookaheadModel,
    settings: ServeSettings,
    say: Callable[[str], None] = print,
    kind: Callable[..., Service] = Service,
    sockets: Sequence[socket.socket] = (),
) -> None:
    """Serve until a signal. `say` prints messages for the user; `kind` creates the service.

    `sockets` are bound already (see `sockets`). Raises ValueError if the server cannot start, and DeviceError if it
    stopped because its device was lost.
    """
    with serving_process():
        server = make_server(model, settings, say, kind, sockets)
        keep_from_collection()
        server.run()
        if server.service.lost is not None:
            raise server.service.lost


@contextmanager
def serving_process() -> Iterator[None]:
    """Set what Python does between threads, and how often it collects garbage, for a process that serves."""
    sys.setswitchinterval(SWITCH_SECONDS)
    threshold = gc.get_threshold()
    try:
        yield
    finally:
        gc.set_threshold(*threshold)
        gc.unfreeze()  # so that all is freed at exit: triton complains otherwise


def keep_from_collection() -> None:
    """Exclude imported and loaded objects from collection: a full collection of these 440,000 objects takes 0.2 to
    0.3 s, during which no step runs."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
