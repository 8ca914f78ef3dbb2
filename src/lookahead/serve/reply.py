"""The jobs of one HTTP request together: their pieces come as the engine's steps give them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from time import perf_counter
from typing import Any

from lookahead.serve.errors import ApiError, internal, unavailable
from lookahead.serve.jobs import Job, Piece


class Reply:
    """The jobs of one HTTP request. Iterate its pieces; leaving the `async with` cancels what has not ended.

    It may take `timeout` seconds. `leave` is called with it when it is over.
    """

    def __init__(self, jobs: list[Job], timeout: float, leave: Callable[[Reply], None]) -> None:
        self.jobs, self.timeout, self.leave = jobs, timeout, leave
        self.begin = perf_counter()
        self.failure: ApiError | None = None
        self._fresh: dict[Job, None] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._patience = 0.0  # until when `_news` waits, in the event loop's time

    async def __aenter__(self) -> Reply:
        return self

    async def __aexit__(self, *error: Any) -> None:
        self.leave(self)

    async def pieces(self, keep_alive: float | None = None) -> AsyncIterator[Piece | None]:
        """The pieces of all jobs as they come, and None where nothing came for `keep_alive` seconds.

        Raises an ApiError if the server or the engine fails, or when the request's time is over.
        """
        limit = self.begin + self.timeout
        try:
            while self._left():
                if not self._fresh and self.failure is None:
                    rest = limit - perf_counter()
                    if rest <= 0:
                        raise ApiError(504, f"no answer within {self.timeout:g} s", code="timeout")
                    if not await self._news(rest if keep_alive is None else min(rest, keep_alive)):
                        yield None
                fresh, self._fresh = self._fresh, {}
                for job in fresh:
                    piece = self._read(job)
                    if piece is not None:
                        yield piece
                if self.failure is not None and self._left():
                    raise self.failure
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def _left(self) -> bool:
        """Whether a job has not ended. One that has may still be told of again, so they are not counted down."""
        return any(not job.over for job in self.jobs)

    async def finish(self) -> list[list[Piece]]:
        """All pieces of every job, after their ends."""
        found: list[list[Piece]] = [[] for _ in self.jobs]
        async for piece in self.pieces():
            if piece is not None:
                found[self.jobs.index(piece.job)].append(piece)
        return found

    def wake(self, job: Job | None = None) -> None:
        """Called in the event loop: this job has something, or the reply has failed."""
        if job is not None:
            self._fresh[job] = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _read(self, job: Job) -> Piece | None:
        ticket = job.ticket
        if ticket is None or job.over:
            return None
        done = ticket.done  # asked before the events are taken: after the end come no more
        events = ticket.take()
        job.over = done
        if done and ticket.error is not None:
            raise internal(ticket.error)
        if done and not (events and events[-1].finish_reason):
            raise self.failure or unavailable("the request was cancelled")
        return job.read(events) if events else None

    async def _news(self, seconds: float) -> bool:
        """Wait until there is something, at most so many seconds. Returns whether there is.

        One timer serves many waits: making one for each would take a tenth of the time of a chunk.
        """
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        self._patience = loop.time() + seconds
        if self._timer is None or self._timer.when() > self._patience:
            self._set_timer(loop)
        try:
            await self._waiter
        finally:
            self._waiter = None
        return bool(self._fresh) or self.failure is not None

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(self._patience, self._time_is_up, loop)

    def _time_is_up(self, loop: asyncio.AbstractEventLoop) -> None:
        """The timer has gone off. If the reply has waited anew since it was set, it is set again."""
        self._timer = None
        if self._waiter is not None and loop.time() < self._patience:
            self._set_timer(loop)
        else:
            self.wake()
