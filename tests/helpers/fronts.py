"""A server with fronts in one process: the engine's end of a link, and fronts in threads of their own."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from http_server import Running

from lookahead.serve.fronts.front import front_server
from lookahead.serve.fronts.host import EngineService, FrontLink
from lookahead.serve.life import Server
from lookahead.serve.settings import ServeSettings
from lookahead.serve.wire import Facts


class Behind(Running):
    """A front of `engine`, which is made here if it is None."""

    def __init__(self, model: Any, engine: EngineService | None = None, **settings: Any) -> None:
        self.engine = engine
        super().__init__(model, **settings)

    def make(self, settings: ServeSettings) -> Server:
        if self.engine is None:
            self.engine = EngineService(self.model, settings)
            asyncio.run(self.engine.start())
        ours, self.theirs = socket.socketpair()
        self.link = FrontLink(self.engine, ours, lambda: None)
        self.link.start(Facts.of(self.model, "1"))
        return front_server(self.theirs)

    def stop(self) -> None:
        if self.thread.is_alive():
            super().stop()
        self.link.close()


@contextmanager
def behind(model: Any, engine: EngineService | None = None, **settings: Any) -> Iterator[Behind]:
    one = Behind(model, engine, **settings)
    try:
        yield one
    finally:
        one.stop()
