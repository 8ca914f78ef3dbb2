"""Thread-safe access to an engine: one thread owns the device, and the others submit requests and read their streams.

The thread steps the engine while there is work, and sleeps otherwise. It starts with the first request, and ends with
the `EngineClient`, to which it holds no reference.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar
from weakref import finalize

from lookahead.backends.failures import DeviceError
from lookahead.engine.core import EngineCore
from lookahead.engine.engine import Engine
from lookahead.engine.request import Request
from lookahead.engine.request_stream import RequestStream, StepCallback

R = TypeVar("R")

LAST_STEP = 5.0
"""Seconds to wait for the running step when a model is freed or Python exits."""


class EngineClient:
    """Lets many threads use one engine. The output of a request does not depend on the other requests.

    With `thread=False` the engine is stepped by the thread that reads a stream. That is for ranks, which must all make
    the same calls in the same order. `core` replaces the plain `EngineCore`.
    """

    def __init__(self, engine: Engine, thread: bool = True, core: EngineCore | None = None) -> None:
        self._core = core or EngineCore(engine)
        self._core.begins_early &= thread
        self._inbox: SimpleQueue[EngineCore | None] | None = SimpleQueue() if thread else None
        self._threads: list[threading.Thread] = []  # none yet, or one
        self._starting = threading.Lock()
        if self._inbox is not None:
            finalize(self, _stop, self._core.stop, self._inbox, self._threads)

    @property
    def failure(self) -> BaseException | None:
        """The error of the last step, or the one that ended the engine's thread; None after a successful step. After a
        DeviceError the engine never works again."""
        return self._core.failure

    def submit(self, request: Request, on_step: StepCallback | None = None) -> RequestStream:
        """Submit a request. Raises ValueError if it could never run. Streams of a step that have the same `on_step`
        share one call of it."""
        self._core.engine.check_request(request)
        stream = RequestStream(request, None if self._inbox is not None else self._core.run_step, on_step)
        self._post(lambda core: core.submit(stream))
        return stream

    def cancel(self, stream: RequestStream) -> None:
        """End a request early, at the latest after the running step. Does nothing if it has finished."""
        if not stream.done and not self._core.stop.is_set():
            self._post(lambda core: core.cancel(stream))

    def call(self, function: Callable[[], R]) -> R:
        """Run a function between two steps, in the thread that owns the device, and return its result."""
        found: list[R] = []
        errors: list[BaseException] = []
        over = threading.Event()

        def run() -> None:
            try:
                found.append(function())
            except BaseException as error:
                errors.append(self._core.shut_down_if_lost(error) or error)
            over.set()

        self._post(lambda core: run())
        over.wait()
        if errors:
            raise errors[0]
        return found[0]

    def release(self, function: Callable[[], Any]) -> None:
        """Like `call`, for clean-up at the end of a generator. In the engine's own thread it does not wait."""
        if threading.current_thread() in self._threads:
            self._post(lambda core: function())
        else:
            self.call(function)

    def close(self) -> None:
        """End all requests; waiting readers get a RuntimeError. Nothing can be submitted afterwards."""
        if self._inbox is None:
            self._core.stop.set()
            self._core.run_step()
        elif not self._core.stop.is_set():
            self._post(lambda core: core.stop.set())

    def _post(self, command: Callable[[EngineCore], None]) -> None:
        """Queue a command for the engine's thread, which runs queued commands before every step."""
        if self._core.stop.is_set():
            raise RuntimeError("the model was closed; load it again")
        self._core.commands.append(command)
        if self._core.dead:  # tested after queueing: a thread that is about to end may still run the command
            if isinstance(self._core.failure, DeviceError):
                raise DeviceError(str(self._core.failure))
            raise RuntimeError(f"the engine's thread has died of {self._core.failure!r:.200}; load the model again")
        if self._inbox is None:
            self._core.run_commands()
            return
        with self._starting:
            if not self._threads or not self._threads[0].is_alive():
                self._threads[:] = [threading.Thread(target=_run, args=(self._inbox,), name="lookahead", daemon=True)]
                self._threads[0].start()
        self._inbox.put(self._core)


def _run(inbox: SimpleQueue[EngineCore | None]) -> None:
    """The engine's thread. While it waits for work it references only its inbox, so that a model can be freed."""
    while (core := inbox.get()) is not None:
        try:
            core.run_until_idle()
        except BaseException as error:  # even the clean-up after a failed step has failed
            core.shut_down(error)
            return
        del core


def _stop(stop: threading.Event, inbox: SimpleQueue[EngineCore | None], threads: list[threading.Thread]) -> None:
    """End the thread when its client is freed or Python exits. It may be in the middle of a step."""
    stop.set()
    inbox.put(None)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(LAST_STEP)
