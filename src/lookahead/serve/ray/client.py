"""Submits an ingress' requests to the replicas. A sequence whose replica dies is resumed by another one, bit for bit.

The tokens sent so far are stored here, with the seed. Another replica gets them as existing output and samples with the
uniforms of the following positions, so its text is what the first replica would have generated.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, cast

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from lookahead.engine.request import Request
from lookahead.engine.request_stream import RequestStream, StepCallback
from lookahead.serve.errors import ApiError
from lookahead.serve.ray.channels import Channels, Inbox
from lookahead.serve.ray.conversations import Homes
from lookahead.serve.remote import RemoteSequence
from lookahead.serve.wire import Chunk, DecodeRequest

log = logging.getLogger("ray.serve")
"""Ray's logger, which adds the request id in every process."""

MOST_LOSSES = 2
"""A request fails after this many lost replicas: it may be what kills them."""
PAUSE = 0.2
"""Seconds before a started sequence is submitted again if all queues are full."""


class ReplicaLostError(Exception):
    """A replica has died, or its engine has failed. `reported` is the error that it sent before, or None."""

    def __init__(self, why: str, reported: ApiError | None = None) -> None:
        super().__init__(why)
        self.reported = reported


class RemoteClient:
    """The part of `engine.client.EngineClient`'s interface that the server uses. All calls come from the event loop.

    `owner_of` gives the index of a sequence's key, and `retry_after` the seconds until there may be room. `counts`
    counts lost replicas and dropped sequences.
    """

    failure: BaseException | None = None

    def __init__(self, replicas: DeploymentHandle[Any], version: str) -> None:
        self._replicas, self._version = replicas, version
        self._tasks: dict[RequestStream, asyncio.Task[None]] = {}
        self.owner_of: Callable[[Any], int] = lambda owner: 0
        self.retry_after: Callable[[], int] = lambda: 1
        self.counts: Counter[str] = Counter()
        self._homes = Homes()
        self._channels = Channels(replicas)

    def submit(self, request: Request, on_step: StepCallback | None = None) -> RequestStream:
        stream = RequestStream(request, None, on_step)
        task = asyncio.get_running_loop().create_task(self._run(stream))
        self._tasks[stream] = task
        task.add_done_callback(lambda done: self._tasks.pop(stream, None))
        return stream

    def cancel(self, stream: RequestStream) -> None:
        """End a sequence early, and cancel it on its replica."""
        task = self._tasks.get(stream)
        if task is not None:
            task.cancel()

    async def _run(self, stream: RequestStream) -> None:
        """Generate one sequence, on several replicas if some are lost."""
        try:
            await self._generate(stream)
            error: BaseException | None = None
        except Exception as failed:
            error = failed
        if not stream.done:
            stream.end(error)
        self._notify(stream)

    async def _generate(self, stream: RequestStream) -> None:
        sequence, losses = cast(RemoteSequence, stream.request.sequence), 0
        while sequence.finish_reason is None:
            try:
                async with aclosing(self._chunks(sequence, by_channel=not losses)) as chunks:
                    async for chunk in chunks:
                        for event in sequence.take(chunk, stream.request):
                            stream.put(event)
                        self._notify(stream)
                if sequence.finish_reason is None:
                    raise ReplicaLostError("it ended without a reason")
            except ReplicaLostError as lost:
                losses += 1
                self._homes.forget(sequence.spec.conversation)
                self.counts["lost"] += 1
                sent = len(sequence.output)
                log.warning("a replica was lost after %d tokens of a sequence (%s); loss %d", sent, lost, losses)
                if losses >= MOST_LOSSES:
                    self.counts["dropped"] += 1
                    raise too_many_losses(lost) from lost
            except BackPressureError as full:
                if not sequence.output and not losses:
                    raise queue_full(self.retry_after()) from full
                await asyncio.sleep(PAUSE)  # it was admitted before, so it may wait

    async def _chunks(self, sequence: RemoteSequence, by_channel: bool) -> AsyncGenerator[Chunk, None]:
        """The chunks of one replica, after the output so far. After a loss only the sequence's own stream is used: the
        channel may have been what was lost."""
        spec, inbox = sequence.spec, Inbox(len(sequence.output))
        replicas = self._replicas.options(stream=True, multiplexed_model_id=self._homes.find(spec.conversation))
        with self._channels.numbered(inbox) as number:
            owner, name = self.owner_of(spec.owner), self._channels.name if by_channel else ""
            call = DecodeRequest.of(spec, owner, self._version, sequence.output, name, number)
            stream = cast("DeploymentResponseGenerator[Chunk]", replicas.decode.remote(call))
            reading = asyncio.get_running_loop().create_task(read_into(inbox, stream))
            assigned = False
            try:
                while (chunk := await inbox.next()) is not None:
                    if chunk.error is not None:
                        raise refusal(ApiError(**chunk.error))
                    if not assigned:
                        self._homes.assign(spec.conversation, chunk.replica)
                        assigned = True
                    self._channels.use(chunk.replica)
                    yield chunk
            except RayTaskError:  # a bug in the replica's code, not its death
                raise
            except BackPressureError:
                raise
            except (RayError, RayServeException) as error:
                raise ReplicaLostError(type(error).__name__) from error
            finally:
                if not inbox.ended:
                    stream.cancel()
                    reading.cancel()

    def _notify(self, stream: RequestStream) -> None:
        if stream.on_step is not None:
            stream.on_step([stream])


async def read_into(inbox: Inbox, stream: DeploymentResponseGenerator[Chunk]) -> None:
    """Read a sequence's own stream to its end."""
    try:
        async for chunk in stream:
            inbox.put(chunk)
        inbox.end()
    except Exception as error:
        inbox.end(error)


def refusal(error: ApiError) -> Exception:
    """The exception for a replica's error: an engine failure is a loss, everything else is the request's own."""
    if error.code in ("internal", "unavailable"):
        return ReplicaLostError(error.message, error)
    return error


def too_many_losses(lost: ReplicaLostError) -> ApiError:
    if lost.reported is not None:
        return lost.reported
    message = f"{MOST_LOSSES} replicas were lost while they answered this request"
    return ApiError(502, message, code="replicas_lost")


def queue_full(seconds: int) -> ApiError:
    headers = {"Retry-After": str(seconds)}
    return ApiError(
        429, "all replicas are busy, and their queue is full; try again", code="queue_full", headers=headers
    )
