"""The jobs of one HTTP request together: their pieces come as the engine's steps give them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import perf_counter
from typing import Any

from lookahead.serve.errors import ApiError, failed, unavailable
from lookahead.serve.requests import Piece, RequestState


class Reply:
    """The jobs of one HTTP request. Ask for the `next` pieces; leaving the `async with` cancels what has not ended.

    It may take `timeout` seconds. `leave` is called with it when it is over, which may be more than once.
    """

    def __init__(self, states: list[RequestState], timeout: float, leave: Callable[[Reply], None]) -> None:
        self.states, self.timeout, self.leave = states, timeout, leave
        self.begin = perf_counter()
        self.failure: ApiError | None = None  # of the server; a reply that has ended does not mind
        self._broken: ApiError | None = None  # what ends the reply once its last pieces were given
        self._running = len(states)
        self._fresh: dict[RequestState, None] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.Handle | None = None
        self._due = 0.0  # when the timer goes off; not each of uvloop's timers can tell
        self._patience = 0.0  # until when `_wait_for_output` waits, in the event loop's time
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
        """The reply's time is over. It is left at once: if its client does not read, nobody may ever ask for `next`."""
        self.fail(ApiError(504, f"no answer within {self.timeout:g} s", code="timeout"))
        self.leave(self)

    async def next(self, keep_alive: float | None = None) -> list[Piece] | None:
        """The pieces that have come since the last call. It waits for some, and gives none after `keep_alive` seconds
        without any. After the end of all jobs it gives None.

        Raises an ApiError if the server or the engine fails, or when the request's time is over.
        """
        while self._broken is None and self._running:
            if not self._fresh and self.failure is None:
                await self._wait_for_output(keep_alive)
                if not self._fresh and self.failure is None:
                    return []
            pieces = self._read_fresh()
            if self.failure is not None and self._running:
                self._broken = self.failure
            if pieces:
                return pieces
        if self._broken is not None:
            raise self._broken
        return None

    def _read_fresh(self) -> list[Piece]:
        """The pieces of the jobs that have something."""
        fresh, self._fresh = self._fresh, {}
        pieces = []
        try:
            for state in fresh:
                piece = self._read(state)
                if piece is not None:
                    pieces.append(piece)
        except ApiError as error:  # it is raised after these pieces were given
            self._broken = error
        return pieces

    async def finish(self) -> list[list[Piece]]:
        """All pieces of every job, after their ends."""
        found: list[list[Piece]] = [[] for _ in self.states]
        while (pieces := await self.next()) is not None:
            for piece in pieces:
                found[self.states.index(piece.state)].append(piece)
        return found

    def fail(self, error: ApiError) -> None:
        """Called in the event loop: what has not ended ends with this error."""
        self.failure = error
        self.wake()

    def wake(self, state: RequestState | None = None) -> None:
        """Called in the event loop: this job has something, or the reply has failed."""
        if state is not None:
            self._fresh[state] = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _read(self, state: RequestState) -> Piece | None:
        ticket = state.ticket
        if ticket is None or state.over:
            return None
        done = ticket.done  # asked before the events are taken: after the end come no more
        events = ticket.take()
        error = ticket.error if done else None
        if events and events[-1].finish_reason is not None:  # the last event comes a moment before `done`
            done, error = True, events[-1].error
        elif done and error is None:
            error = self.failure or unavailable("the request was cancelled")
        if done:
            state.over = True
            self._running -= 1
        if error is not None:
            raise failed(error)
        return state.read(events) if events else None

    async def _wait_for_output(self, seconds: float | None) -> None:
        """Wait until there is something, at most so many seconds.

        One timer serves many waits: making one for each would take a tenth of the time of a chunk.
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
        """The timer has gone off. If the reply has waited anew since it was set, it is set again."""
        self._timer = None
        if self._waiter is not None and loop.time() < self._patience:
            self._set_timer(loop)
        else:
            self.wake()
