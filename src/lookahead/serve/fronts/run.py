"""The engine's process of a server with fronts: it starts them, restarts one that dies, drains, and ends with its
reason."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any

from lookahead.generate import LookaheadModel
from lookahead.machine import cores
from lookahead.serve.errors import log
from lookahead.serve.fronts.host import EngineService, FrontLink
from lookahead.serve.fronts.link import Drain, Status
from lookahead.serve.life import (
    FLUSH_SECONDS,
    POLL,
    address_of,
    keep_from_collection,
    ready_line,
    serving_process,
)  # fmt: skip
from lookahead.serve.settings import ServeSettings
from lookahead.serve.sockets import allow_port_reuse
from lookahead.serve.wire import Facts

MOST_FRONTS = 16
CORES_FOR_A_FRONT = 8
"""From as many cores on a server has a front. A second one gained nothing beside an H200 with 16 cores, at up to 64
streams from one client process (benchmarks/results/serve.md)."""
MOST_RESTARTS, RESTART_SECONDS = 5, 60.0
"""If fronts die more often than this within these seconds, the server ends: a restart does not help."""
EXIT_SECONDS = 5.0
"""Seconds that a front may take to exit after its last reply."""


def default_fronts() -> int:
    """The number of fronts for this machine. On a few cores a process of its own would take them from the engine."""
    return int(cores() >= CORES_FOR_A_FRONT)


START = """
import sys
sys.path[:] = [path for path in sys.path if path]
if sys.argv[1] not in sys.path:
    sys.path.insert(0, sys.argv[1])
from lookahead.serve.fronts.front import main
main(sys.argv[2:])
"""
"""A front's program. It imports what this process does, and nothing from the folder that it is started in."""
PROBE_SECONDS = 0.1, 5.0
"""Seconds between attempts to let a failed engine generate a token: at first, and at most."""


class Front:
    """A front process and its link."""

    def __init__(self, sockets: Sequence[socket.socket]) -> None:
        ours, theirs = socket.socketpair()
        inherited = [theirs.fileno(), *(one.fileno() for one in sockets)]
        source = str(Path(__file__).resolve().parents[3])
        command = [sys.executable, "-c", START, source, *map(str, inherited)]
        with theirs:
            # In a session of its own: Ctrl-C is for the engine's process, which drains the fronts.
            self.process = subprocess.Popen(
                command,
                pass_fds=inherited,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            )
        self.socket = ours
        self.link: FrontLink | None = None

    def connect(self, service: EngineService, facts: Facts) -> None:
        """Tell the front about the model, and serve it."""
        self.link = FrontLink(service, self.socket, lambda: None)
        self.link.start(facts)

    @property
    def is_ready(self) -> bool:
        return self.link is not None and self.link.ready.is_set()

    def send(self, message: Any) -> None:
        if self.link is not None:
            self.link.send(message)

    def end(self) -> None:
        """End the process, which has nothing left to do."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self.link is not None:
            self.link.close()
        else:
            self.socket.close()


class FrontsError(RuntimeError):
    """Fronts keep dying."""


class Fronts:
    """The fronts of a server. They are started before the model is loaded, because they import for seconds, too."""

    def __init__(self, count: int, sockets: Sequence[socket.socket]) -> None:
        if not 1 <= count <= MOST_FRONTS:
            raise ValueError(f"fronts={count} must be from 0 (HTTP in the engine's process) to {MOST_FRONTS}")
        self.sockets = list(sockets)
        self.fronts = [Front(self.sockets) for _ in range(count)]
        self._restarts: list[float] = []

    def __enter__(self) -> Fronts:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        for front in self.fronts:
            front.end()

    def connect(self, service: EngineService) -> None:
        self._service, self._facts = service, Facts.of(service.model, service.name)
        try:
            pickle.dumps(self._facts)
        except Exception as error:
            raise ValueError(
                f"this model's tokenizer cannot be sent to another process ({error}); use --fronts 0"
            ) from error
        for front in self.fronts:
            front.connect(service, self._facts)

    @property
    def are_ready(self) -> bool:
        return all(front.is_ready for front in self.fronts)

    @property
    def ended(self) -> list[Front]:
        return [front for front in self.fronts if front.process.poll() is not None]

    def restart(self, front: Front, status: Status) -> None:
        """Start another front in the place of one that has died. Raises FrontsError if that happens too often."""
        now = monotonic()
        self._restarts = [*(time for time in self._restarts if now - time < RESTART_SECONDS), now]
        code = front.process.returncode
        if len(self._restarts) > MOST_RESTARTS:
            raise FrontsError(f"front processes have died {len(self._restarts)} times in a minute (exit code {code})")
        log.warning("a front process has ended (exit code %s); another one is started", code)
        front.end()
        try:
            new = Front(self.sockets)
        except OSError as error:
            log.warning("a front process cannot be started: %s", error)
            return
        self.fronts[self.fronts.index(front)] = new
        new.connect(self._service, self._facts)
        new.send(status)

    def send(self, message: Any) -> None:
        for front in self.fronts:
            front.send(message)


class Supervisor:
    """Runs a server with fronts from its start to its end, in the engine's process."""

    def __init__(self, service: EngineService, fronts: Fronts, say: Callable[[str], None]) -> None:
        self.service, self.fronts, self.say = service, fronts, say
        self._draining, self._told = False, ""
        self._pause, self._next_probe = PROBE_SECONDS[0], 0.0

    async def run(self) -> None:
        """Serve until a signal, or until the device is lost. Raises ValueError if the server cannot start, and
        FrontsError if its fronts keep dying."""
        with self._signals():
            try:
                await self.service.start()
            except Exception as error:
                raise ValueError(f"the server cannot start: {type(error).__name__}: {error}") from error
            try:
                self.fronts.connect(self.service)
                await self._start()
                try:
                    await self._watch()
                finally:
                    await self._end()
            finally:
                await self.service.close()

    async def _watch(self) -> None:
        """Replace fronts that die, and tell all of them how the engine is."""
        while not self._draining and self.service.lost is None:
            for front in self.fronts.ended:
                self.fronts.restart(front, Status(self._told or None))
            self._report_failure()
            await asyncio.sleep(POLL)

    async def _start(self) -> None:
        """Wait until all fronts listen."""
        while not self.fronts.are_ready and not self._draining and self.service.lost is None:
            if ended := self.fronts.ended:
                code = ended[0].process.returncode
                raise ValueError(f"the server cannot start: a front process has ended (exit code {code})")
            await asyncio.sleep(POLL)
        if self.fronts.are_ready:
            self.say(ready_line(address_of(self.fronts.sockets[0]), self.service))

    def _report_failure(self) -> None:
        """Tell the fronts when the engine has failed, and when it works again."""
        failure = self.service.model.client.failure
        text = "" if failure is None else f"the engine has failed ({type(failure).__name__})"
        if failure is None:
            self._pause, self._next_probe = PROBE_SECONDS[0], 0.0
        elif monotonic() > self._next_probe:
            self._pause, self._next_probe = min(2 * self._pause, PROBE_SECONDS[1]), monotonic() + self._pause
            self.service.probe()
        if text != self._told:
            self._told = text
            self.fronts.send(Status(text or None))

    async def _end(self) -> None:
        """Let the fronts finish their replies, or end them if the device is lost."""
        service, settings = self.service, self.service.settings
        seconds = EXIT_SECONDS + FLUSH_SECONDS
        if service.lost is not None:
            self.fronts.send(Status(str(service.lost), lost=True))
        else:
            if service.running:
                self.say(f"finishing {len(service.running)} requests, at most {settings.drain_seconds:g} s")
            self.fronts.send(Drain())
            seconds += settings.drain_seconds
        for front in self.fronts.fronts:
            if not front.is_ready:  # it has no replies
                front.end()
        end = monotonic() + seconds
        while len(self.fronts.ended) < len(self.fronts.fronts) and monotonic() < end:
            if service.lost is not None and self._draining:
                self.fronts.send(Status(str(service.lost), lost=True))
                self._draining = False
            await asyncio.sleep(POLL)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """The first signal drains, the second ends the server at once."""
        loop, handled = asyncio.get_running_loop(), (signal.SIGTERM, signal.SIGINT)

        def handle(number: int) -> None:
            if self._draining:
                self.fronts.__exit__(None, None, None)
                os._exit(128 + number)
            self._draining = True

        for number in handled:
            loop.add_signal_handler(number, handle, number)
        try:
            yield
        finally:
            for number in handled:
                with suppress(ValueError):
                    loop.remove_signal_handler(number)


def serve(model: LookaheadModel, settings: ServeSettings, say: Callable[[str], None], fronts: Fronts) -> None:
    """Serve until a signal. Raises ValueError if the server cannot start, and DeviceError if its device was lost. Exits
    with code 1 if its fronts keep dying."""
    with serving_process():
        service = EngineService(model, settings)
        allow_port_reuse(fronts.sockets)
        keep_from_collection()
        try:
            asyncio.run(Supervisor(service, fronts, say).run())
        except FrontsError as error:
            say(f"error: {error}")
            raise SystemExit(1) from error
        if service.lost is not None:
            raise service.lost
