"""A front process: HTTP in front of an engine in another process.

`run` starts it with the numbers of inherited file descriptors: its link, and the listening sockets. Signals are for the
engine's process, which drains its fronts or ends them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

from lookahead.serve.errors import log, unavailable
from lookahead.serve.fronts.client import FrontClient
from lookahead.serve.fronts.link import Start, read
from lookahead.serve.life import Server, keep_from_collection, make_server, serving_process
from lookahead.serve.logs import logging_to_stderr
from lookahead.serve.remote import RemoteModel, RemoteRequestState
from lookahead.serve.reply import Reply
from lookahead.serve.requests import RequestSpec, RequestState
from lookahead.serve.serialize import GrammarTexts
from lookahead.serve.service import Service
from lookahead.serve.settings import ServeSettings

REPORT_SECONDS = 0.5


class FrontService(Service):
    """The service of a front: its requests run in the engine's process, which also counts them."""

    model: RemoteModel

    def __init__(self, model: RemoteModel, settings: ServeSettings) -> None:
        super().__init__(model, settings)
        self.grammars = GrammarTexts(model)  # compiled by the engine's process
        self.client = cast(FrontClient, model.client)
        self.client.owner_of = self.keys.owners.index
        self._reporting: asyncio.Task[None] | None = None

    def make_state(self, spec: RequestSpec, index: int) -> RequestState:
        return RemoteRequestState(self.model, self.tokenizer, spec, index)

    def check_ready(self) -> None:
        """Raise a 503 while the server drains, and when the engine has failed. The engine's process looks whether it
        works again."""
        if self.lost is not None:
            raise unavailable(str(self.lost))
        if self.draining:
            raise unavailable("the server is shutting down; try another server", retry=5)
        if self.client.failure is not None:
            raise unavailable(str(self.client.failure), retry=5)

    async def open(self, prepare: Callable[[], list[RequestSpec]], size: int) -> Reply:
        """As in one process, a request that the engine refuses is answered with an error, not with a begun reply."""
        reply = await super().open(prepare, size)
        try:
            for state in reply.states:
                if state.stream is not None and (refusal := await self.client.refusal(state.stream)) is not None:
                    raise refusal
        except BaseException:
            self.leave(reply)
            raise
        return reply

    async def metrics_text(self) -> bytes:
        self.client.report(self.metrics.refused)
        return await self.client.metrics()

    async def start(self) -> None:
        await super().start()
        await self.client.connect()
        self._reporting = asyncio.ensure_future(self._report())

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            with suppress(RuntimeError):  # the link is closed
                self.client.report(self.metrics.refused)

    async def close(self) -> None:
        if self._reporting is not None:
            self._reporting.cancel()
        await super().close()
        self.client.close()


def say_ready(server: Server) -> None:
    """Called once the server listens."""
    service = cast(FrontService, server.service)
    service.client.on_drain = server.begin_drain
    service.client.ready()
    if service.client.drains:  # it came before
        server.begin_drain()


def front_server(link: socket.socket, sockets: Sequence[socket.socket] = ()) -> Server:
    """The server of a front, from the link's first message. Raises EOFError if there is none: the engine's process has
    ended."""
    start = read(link)
    if not isinstance(start, Start):
        raise TypeError(f"the first message is a {type(start).__name__}")
    model = RemoteModel(start.facts, FrontClient(link, start.facts.version))
    kind: Any = FrontService
    settings = replace(start.settings, memory_folder=None)
    return make_server(model, settings, lambda line: log.debug("%s", line), kind, sockets, on_ready=say_ready)


def main(arguments: Sequence[str]) -> None:
    """Serve until the engine's process drains the server, or ends; then end this process."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    link_fd, *socket_fds = map(int, arguments)
    sockets, code = [socket.socket(fileno=fd) for fd in socket_fds], 0
    with serving_process():
        try:
            server = front_server(socket.socket(fileno=link_fd), sockets)
            server.ignores_signals = True
            settings = server.service.settings
            with logging_to_stderr(settings.log_level, settings.log_format):
                keep_from_collection()
                server.run()
        except EOFError:
            pass  # the server did not start
        except BaseException:
            traceback.print_exc()
            code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # nothing is left to do, and threads of libraries may not end
