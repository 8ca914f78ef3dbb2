"""The loop of the thread that owns the device: it runs commands, steps the engine and delivers events."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from lookahead.backends.failures import DeviceError, device_error
from lookahead.engine.engine import Engine
from lookahead.engine.request import Event
from lookahead.engine.request_stream import RequestStream, StepCallback


class EngineCore:
    """The engine, the streams of its requests, and the commands that other threads have queued."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.streams: dict[int, RequestStream] = {}
        self.commands: deque[Callable[[EngineCore], None]] = deque()
        self.stop = threading.Event()
        self.failure: BaseException | None = None  # of the last step
        self.dead = False  # the device is lost, or the thread ended with an error that it could not handle
        self._callbacks: dict[StepCallback, list[RequestStream]] = {}  # to call after this step
        # If the device runs asynchronously, the next step begins before the events of the last one are sent.
        self.begins_early = engine.backend.capabilities.overlaps

    @property
    def has_work(self) -> bool:
        return bool(self.streams or self.commands)

    def run_until_idle(self) -> None:
        """Step until there is no work left."""
        while self.has_work and not self.dead:
            self.run_step()

    def run_step(self) -> None:
        """Run the queued commands and one step. If that fails, every request fails; later requests run again, unless
        the device is lost."""
        try:
            if self.begins_early:
                self._finish_and_begin()
            else:
                self._run_commands_or_stop()
                self._deliver(self.engine.step())
        except BaseException as error:
            self.recover(error)
        self._notify()

    def _finish_and_begin(self) -> None:
        """Finish the running step, run the commands, and begin the next step. Events are sent while that one runs."""
        finished = self.engine.finish()
        try:
            self._run_commands_or_stop()
            self.engine.begin()
        finally:  # the events of the last step are delivered even if the next one cannot begin
            self._deliver(finished.events())

    def _run_commands_or_stop(self) -> None:
        self.run_commands()
        if self.stop.is_set():
            raise RuntimeError("the model was closed while it was answering")

    def _deliver(self, events: Sequence[Event]) -> None:
        """Put events into their streams. A request that was cancelled meanwhile has none."""
        lost = None
        for event in events:
            stream = self.streams.get(event.request.id)
            if stream is None:
                continue
            if event.finish_reason is not None:
                del self.streams[event.request.id]
            stream.put(event)
            self._notify_later(stream)
            self.failure = None
            if event.error is not None:
                lost = self.device_error(event.error) or lost
        if lost is not None:
            raise lost

    def recover(self, error: BaseException) -> None:
        """After a failed step: every request fails, and the engine is empty."""
        if self.shut_down_if_lost(error) is None:
            self.engine.abort()
            self._fail_all(error)

    def device_error(self, error: BaseException) -> DeviceError | None:
        """The DeviceError to raise for this error if it means that the device is lost."""
        return device_error(error, self.engine.backend.device)

    def shut_down_if_lost(self, error: BaseException) -> DeviceError | None:
        """If the error means that the device is lost, fail every request, and all later ones."""
        lost = self.device_error(error)
        if lost is not None and not self.dead:
            self.shut_down(lost)
            with suppress(Exception):
                self.engine.abort(wait=False)
        return lost

    def shut_down(self, error: BaseException) -> None:
        """Fail every request with this error: nothing runs after it, so no reader may wait."""
        self.dead, self.failure = True, error
        while self.commands:
            with suppress(BaseException):
                self.run_commands()  # requests that were submitted meanwhile fail, too
        self._fail_all(error)
        self._notify()

    def _fail_all(self, error: BaseException) -> None:
        self.failure = error
        failed, self.streams = self.streams, {}
        for stream in failed.values():
            self._end(stream, error)

    def _end(self, stream: RequestStream, error: BaseException | None = None) -> None:
        stream.end(error)
        self._notify_later(stream)

    def _notify_later(self, stream: RequestStream) -> None:
        if stream.on_step is not None:
            self._callbacks.setdefault(stream.on_step, []).append(stream)

    def _notify(self) -> None:
        if self._callbacks:
            callbacks, self._callbacks = self._callbacks, {}
            for on_step, streams in callbacks.items():
                on_step(streams)

    # Commands.

    def run_commands(self) -> None:
        while self.commands:
            self.commands.popleft()(self)

    def submit(self, stream: RequestStream) -> None:
        try:
            self.streams[self.engine.submit(stream.request)] = stream
        except Exception as error:
            self._end(stream, error)

    def cancel(self, stream: RequestStream) -> None:
        if self.streams.pop(stream.request.id, None) is not None:
            self.engine.cancel(stream.request.id)
            self._end(stream)
