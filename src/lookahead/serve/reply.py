"""The output of all engine requests of one HTTP request, as the engine's steps produce it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import perf_counter
from typing import Any

from lookahead.serve.errors import ApiError, failed, unavailable
from lookahead.serve.requests import Piece, RequestState


class Reply:
    """Collects the output of all engine requests of one HTTP request.

    Await the `next` pieces; leaving the `async with` cancels unfinished requests. It fails after `timeout` seconds.
    `leave` is called with the reply when it is over, possibly more than once.
    """

    def __init__(self, states: list[RequestState], timeout: float, leave: Callable[[Reply], None]) -> None:
        self.states, self.timeout, self.leave = states, timeout, leave
        self.begin = perf_counter()
        self.failure: ApiError | None = None  # set by the server; ignored by a finished reply
        self.error: ApiError | None = None  # that it ended with; raised after the last pieces have been returned
        self._running = len(states)
        self._fresh: dict[RequestState, None] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.Handle | None = None
        self._due = 0.0  # when the timer fires; not all of uvloop's timers know
        self._patience = 0.0  # until when `_wait_for_output` waits, in event loop time
        self._deadline: asyncio.Handle | None = None

    async def __aenter__(self) -> Reply:
        rest = max(0.0, self.begin + self.timeout - perf_counter())
        self._deadline = asyncio.get_running_loop().call_later(rest, self._end_late)
        return self

    async def __aexit__(self, *error: Any) -> None:
        for timer in (self._timer, self._deadline):
            if timer is not None:
                timer.cancel()
        self.leave(self)

    def _end_late(self) -> None:
        """Fail at the deadline. `leave` is called here: if the client stops reading, `next` may never be awaited."""
        self.fail(ApiError(504, f"no answer within {self.timeout:g} s", code="timeout"))
        self.leave(self)

    async def next(self, keep_alive: float | None = None) -> list[Piece] | None:
        """Wait for new pieces. Returns an empty list after `keep_alive` seconds without any, and None once all requests
        have ended.

        Raises an ApiError if the server or the engine fails, or at the deadline.
        """
        while self.error is None and self._running:
            if not self._fresh and self.failure is None:
                await self._wait_for_output(keep_alive)
                if not self._fresh and self.failure is None:
                    return []
            pieces = self._read_fresh()
            if self.failure is not None and self._running:
                self.error = self.failure
            if pieces:
                return pieces
        if self.error is not None:
            raise self.error
        return None

    def _read_fresh(self) -> list[Piece]:
        """The pieces of the requests with new events."""
        fresh, self._fresh = self._fresh, {}
        pieces = []
        try:
            for state in fresh:
                piece = self._read(state)
                if piece is not None:
                    pieces.append(piece)
        except ApiError as error:  # raised after these pieces have been returned
            self.error = error
        return pieces

    async def finish(self) -> list[list[Piece]]:
        """All pieces of every request, once all have ended."""
        found: list[list[Piece]] = [[] for _ in self.states]
        while (pieces := await self.next()) is not None:
            for piece in pieces:
                found[self.states.index(piece.state)].append(piece)
        return found

    def fail(self, error: ApiError) -> None:
        """Called in the event loop: end all unfinished requests with this error."""
        self.failure = error
        self.wake()

    def wake(self, state: RequestState | None = None) -> None:
        """Called in the event loop: this request has new events, or the reply has failed."""
        if state is not None:
            self._fresh[state] = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _read(self, state: RequestState) -> Piece | None:
        stream = state.stream
        if stream is None or state.over:
            return None
        events, done, error = stream.read()
        if done and error is None and not (events and events[-1].finish_reason is not None):
            error = self.failure or unavailable("the request was cancelled")
        if done:
            state.over = True
            self._running -= 1
        if error is not None:
            raise failed(error)
        return state.read(events) if events else None

    async def _wait_for_output(self, seconds: float | None) -> None:
        """Wait for new events, at most `seconds`.

        One timer serves many waits: creating one per wait would take a tenth of a chunk's time.
        """
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        if seconds is not None:
            self._patience = loop.time() + seconds
            if self._timer is None or self._due > self._patience:
                self._set_timer(loop)
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due = self._patience
        self._timer = loop.call_at(self._due, self._time_is_up, loop)

    def _time_is_up(self, loop: asyncio.AbstractEventLoop) -> None:
        """The timer has fired. Restart it if a later wait has extended the time."""
        self._timer = None
        if self._waiter is not None and loop.time() < self._patience:
            self._set_timer(loop)
        else:
            self.wake()
