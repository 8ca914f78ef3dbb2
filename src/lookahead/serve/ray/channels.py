"""Channels: one stream from a replica to an ingress that multiplexes the chunks of all their sequences.

A call of `Replica.decode` is a stream of its own, and every message of a stream costs both processes about a
millisecond, however small it is. So the first and the last chunk of a sequence are sent on its own stream, and those in
between on the channel, batched across sequences. A channel opens when there is more than one sequence, and closes when
it is idle. Without a channel, all chunks use the sequence's own stream.

The two streams may overtake each other. Every chunk has its offset in the output, and an `Inbox` returns them in order,
without duplicates.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from itertools import count
from time import monotonic
from typing import Any, cast
from uuid import uuid4

from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from lookahead.serve.wire import Chunk

log = logging.getLogger("ray.serve")

BATCH_SECONDS = 0.005
"""Seconds between two messages of a channel: it carries at most 200 a second. Not tuned."""
IDLE = 0.5
"""Seconds without a chunk after which a channel closes. A draining replica waits for that."""
AGAIN = 1.0
"""Seconds before a failed or closed channel is reopened."""
MISSING = 5.0
"""Seconds that chunks may arrive after the end of their sequence's own stream. Then they count as lost."""

Numbered = tuple[int, Chunk]


class Outbox:
    """In a replica: chunks queued for the next message of a channel."""

    def __init__(self) -> None:
        self._chunks: list[Numbered] = []
        self._filled = asyncio.Event()

    def put(self, number: int, chunk: Chunk) -> None:
        self._chunks.append((number, chunk))
        self._filled.set()

    async def batches(self) -> AsyncGenerator[list[Numbered], None]:
        """All messages of the channel, until it is idle."""
        while True:
            try:
                await asyncio.wait_for(self._filled.wait(), IDLE)
            except asyncio.TimeoutError:
                if not self._chunks:
                    return
            chunks, self._chunks = self._chunks, []
            self._filled.clear()
            yield chunks
            await asyncio.sleep(BATCH_SECONDS)


class Inbox:
    """In an ingress: the chunks of a sequence from one replica, returned in order.

    The output has `at` tokens already. `ended` is set at the end of the sequence's own stream.
    """

    def __init__(self, at: int) -> None:
        self._at, self._held = at, dict[int, Chunk]()
        self.ended = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, chunk: Chunk) -> None:
        self._held[chunk.at] = chunk
        self._wake()

    def end(self, error: Exception | None = None) -> None:
        self.ended, self._error = True, error
        self._wake()

    async def next(self) -> Chunk | None:
        """The next chunk; None after the end, or if chunks before the end are missing. Raises the stream's error."""
        patience = MISSING
        while True:
            chunk = self._held.pop(self._at, None)
            if chunk is not None:
                self._at += sum(len(event.tokens) for event in chunk.events)
                return chunk
            if self._error is not None:
                raise self._error
            if self.ended and (not self._held or patience <= 0):
                return None
            begin = monotonic()
            self._waiter = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._waiter], timeout=patience if self.ended else None)
            patience -= monotonic() - begin if self.ended else 0.0

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Channels:
    """The channels of an ingress, which replicas know by `name`."""

    def __init__(self, replicas: DeploymentHandle[Any]) -> None:
        self.name = uuid4().hex
        self._replicas = replicas
        self._numbers = count(1)
        self._inboxes: dict[int, Inbox] = {}
        self._open: dict[str, asyncio.Task[None]] = {}
        self._tried: dict[str, float] = {}

    @contextmanager
    def numbered(self, inbox: Inbox) -> Iterator[int]:
        """A number for an inbox. Chunks with a number that is no longer in use are dropped."""
        number = next(self._numbers)
        self._inboxes[number] = inbox
        try:
            yield number
        finally:
            del self._inboxes[number]

    def use(self, replica: str) -> None:
        """Open a channel to a replica that runs a sequence, unless one is open or there is only one sequence."""
        if len(self._inboxes) < 2 or replica in self._open:
            return
        now = monotonic()
        if now - self._tried.get(replica, -AGAIN) < AGAIN:
            return
        self._tried = {name: when for name, when in self._tried.items() if now - when < AGAIN} | {replica: now}
        self._open[replica] = asyncio.get_running_loop().create_task(self._listen(replica))

    async def _listen(self, replica: str) -> None:
        """Read a channel to its end. If it breaks, the sequences' own streams raise the error."""
        handle = self._replicas.options(stream=True, multiplexed_model_id=replica)
        stream = cast("DeploymentResponseGenerator[list[Numbered]]", handle.listen.remote(self.name, replica))
        try:
            async for batch in stream:
                for number, chunk in batch:
                    inbox = self._inboxes.get(number)
                    if inbox is not None:
                        inbox.put(chunk)
        except Exception as error:
            log.info("a channel has ended: %s", type(error).__name__)
            stream.cancel()
        finally:
            del self._open[replica]
