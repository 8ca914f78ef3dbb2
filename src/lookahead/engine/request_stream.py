"""The events of one request, read by the thread that submitted it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from lookahead.engine.request import Event, Request

StepCallback = Callable[[Sequence["RequestStream"]], None]
"""Called in the engine's thread after a step, with all streams that got an event or ended. It must not raise."""


class RequestStream:
    """A submitted request. Iterate over its events as they arrive, or `wait` for its end.

    Both raise the request's error if the request or the engine failed. If the request is cancelled, its events just
    end. A reader that must not block, such as an event loop, passes `on_step`, and calls `take` when it is notified.
    """

    def __init__(
        self, request: Request, run_step: Callable[[], None] | None, on_step: StepCallback | None = None
    ) -> None:
        self.request, self.on_step = request, on_step
        self.done = False
        self.error: BaseException | None = None
        self._events: deque[Event] = deque()
        self._run_step = run_step  # steps the engine in this thread; None: another thread does
        self._wake = threading.Event()
        self._iterated = False  # a reader iterates, and every event wakes it; otherwise only the end does

    def __iter__(self) -> Iterator[Event]:
        self._iterated = True
        while True:
            while self._events:
                yield self._events.popleft()
            if self.done and not self._events:
                break
            self._wait_for(lambda: bool(self._events) or self.done)
        if self.error is not None:
            raise self.error

    def take(self) -> list[Event]:
        """The events since the last `take`. Does not block."""
        events: list[Event] = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def read(self) -> tuple[list[Event], bool, BaseException | None]:
        """The events since the last `take`, whether the request has ended, and its error. Does not block."""
        done = self.done  # before the events: none come after the end
        events = self.take()
        if events and events[-1].finish_reason is not None:  # the last event arrives before `done` is set
            return events, True, events[-1].error
        return events, done, self.error if done else None

    def wait(self) -> None:
        """Wait until the request ends, and raise its error if it failed."""
        self.join()
        if self.error is not None:
            raise self.error

    def join(self) -> None:
        """Wait until the request ends, also if it fails."""
        self._iterated = False
        while not self.done:
            self._wait_for(lambda: self.done)

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        if self._run_step is not None:
            self._run_step()
            return
        self._wake.clear()
        if not condition():  # what came before `clear` is seen here, and what comes after it sets the event
            self._wake.wait()

    # Called by the thread that steps the engine.

    def put(self, event: Event) -> None:
        self._events.append(event)
        if event.finish_reason is not None:
            self.end(event.error)
        elif self._iterated:
            self._wake.set()

    def end(self, error: BaseException | None = None) -> None:
        self.error = error
        self.done = True
        self._wake.set()
