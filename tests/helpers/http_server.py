"""A real server on loopback, around a tiny model: one thread serves, and the tests are its clients."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from lookahead.serve.life import Server, make_server
from lookahead.serve.service import Service
from lookahead.serve.settings import ServeSettings


class Running:
    """A server that runs in a thread of its own."""

    def __init__(self, model: Any, **settings: Any) -> None:
        self.model = model
        self.said: list[str] = []
        self.server = self.make(ServeSettings(port=0, **settings))
        self.service: Service = self.server.service
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        assert soon(lambda: self.server.started)
        self.url = self.server.address

    def make(self, settings: ServeSettings) -> Server:
        return make_server(self.model, settings, self.said.append)

    @cached_property
    def client(self) -> Any:
        """Made when it is used: the tests on a GPU do without the package."""
        import httpx2

        return httpx2.Client(base_url=self.url, timeout=60)

    def post(self, path: str, **body: Any) -> Any:
        return self.client.post(path, json=body)

    def complete(self, **body: Any) -> dict[str, Any]:
        answer = self.post("/v1/completions", **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stop(self) -> None:
        if "client" in vars(self):
            self.client.close()
        self.server.begin_drain()
        self.thread.join(20)
        assert not self.thread.is_alive()


def soon(met: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if met():
            return True
        time.sleep(0.005)
    return False


@contextmanager
def running(model: Any, **settings: Any) -> Iterator[Running]:
    one = Running(model, **settings)
    try:
        yield one
    finally:
        one.stop()
