"""The front's end of its link, with the interface of `engine.client.EngineClient` that the server uses."""

from __future__ import annotations

import asyncio
import pickle
import socket
from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import Any, cast

from lookahead.backends.failures import DeviceError
from lookahead.engine.request import Request
from lookahead.engine.request_stream import RequestStream, StepCallback
from lookahead.serve.errors import ApiError, log, unavailable
from lookahead.serve.fronts.link import (
    LENGTH,
    Accepted,
    AskMetrics,
    Cancel,
    Drain,
    Metrics,
    Ready,
    Refused,
    Status,
    Stepped,
    Submit,
    frame,
    unpacked,
)
from lookahead.serve.remote import RemoteSequence
from lookahead.serve.wire import DecodeRequest

GONE = "the engine's process has ended"


class FrontClient:
    """Submits sequences to the engine's process. All calls come from the event loop.

    `owner_of` gives the index of a sequence's key. `failure` is why no request can run now; after a DeviceError the
    engine never works again. `drains` is set when the server drains, and `on_drain` is called.
    """

    def __init__(self, link: socket.socket, version: str) -> None:
        self.failure: BaseException | None = None
        self.drains = False
        self.owner_of: Callable[[Any], int] = lambda owner: 0
        self.on_drain: Callable[[], None] = lambda: None
        self._link, self._version = link, version
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._numbers = count(1)
        self._streams: dict[int, RequestStream] = {}
        self._number_of: dict[RequestStream, int] = {}
        self._answers: dict[RequestStream, asyncio.Future[ApiError | None]] = {}  # whether the engine runs it
        self._metrics: list[asyncio.Future[bytes]] = []  # those that wait for an answer, in the order of asking
        self._reported: dict[str, int] = {}

    async def connect(self) -> None:
        """Begin to read the link, in this event loop."""
        reader, self._writer = await asyncio.open_connection(sock=self._link)
        self._reading = asyncio.ensure_future(self._read(reader))

    def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        if self._writer is not None:
            self._writer.close()

    def submit(self, request: Request, on_step: StepCallback | None = None) -> RequestStream:
        """Send a sequence to the engine. What the engine refuses ends the stream with its error."""
        stream, number = RequestStream(request, None, on_step), next(self._numbers)
        sequence = cast(RemoteSequence, request.sequence)
        call = DecodeRequest.of(sequence.spec, self.owner_of(sequence.spec.owner), self._version, sequence.output)
        self._send(Submit(number, call))
        self._streams[number], self._number_of[stream] = stream, number
        self._answers[stream] = asyncio.get_running_loop().create_future()
        return stream

    async def refusal(self, stream: RequestStream) -> ApiError | None:
        """Wait until the engine runs a sequence, or return why it does not."""
        answer = self._answers.get(stream)
        return None if answer is None else await answer

    def _answer(self, stream: RequestStream, error: ApiError | None = None) -> None:
        answer = self._answers.pop(stream, None)
        if answer is not None and not answer.done():
            answer.set_result(error)

    def cancel(self, stream: RequestStream) -> None:
        """End a sequence early. Does nothing if it has finished."""
        self._answer(stream)
        number = self._number_of.pop(stream, None)
        if number is not None:
            del self._streams[number]
            self._send(Cancel(number))

    def ready(self) -> None:
        """Tell the engine's process that this front listens."""
        self._send(Ready())

    def report(self, refused: Counter[str]) -> None:
        """Send the number of refused requests, if it has changed."""
        if refused != self._reported and self.failure is None:
            self._reported = dict(refused)
            self._send(Refused(self._reported))

    async def metrics(self) -> bytes:
        """All metrics of the server."""
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._send(AskMetrics())
        self._metrics.append(answer)
        return await answer

    def _send(self, message: Any) -> None:
        if self._writer is None or isinstance(self.failure, DeviceError):
            raise RuntimeError(str(self.failure or GONE))
        self._writer.write(frame(message))

    # What the engine's process says.

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                self._receive(pickle.loads(await reader.readexactly(size)))
        except (asyncio.IncompleteReadError, OSError):
            self._lose(GONE)
        except Exception as error:  # a bug: without the link the front is of no use
            log.error("the link to the engine's process failed: %s", error, exc_info=error)
            self._lose(f"the link to the engine's process failed ({type(error).__name__})")

    def _receive(self, message: Any) -> None:
        if isinstance(message, Stepped):
            self._take_step(message)
        elif isinstance(message, Status) and message.lost:
            self._lose(str(message.failure))
        elif isinstance(message, Status):
            self.failure = None if message.failure is None else RuntimeError(message.failure)
        elif isinstance(message, Accepted):
            if (stream := self._streams.get(message.number)) is not None:
                self._answer(stream)
        elif isinstance(message, Metrics):
            answer = self._metrics.pop(0)
            if not answer.done() and message.error is not None:
                answer.set_exception(ApiError(**message.error))
            elif not answer.done():
                answer.set_result(message.text)
        elif isinstance(message, Drain):
            self.drains = True
            self.on_drain()

    def _take_step(self, step: Stepped) -> None:
        callbacks: dict[StepCallback, list[RequestStream]] = {}
        for number, last, data in step.parts:
            stream = self._streams.get(number)
            if stream is None:  # cancelled meanwhile
                continue
            request = stream.request
            chunk = unpacked(data, request)
            self._answer(stream, None if chunk.error is None else ApiError(**chunk.error))
            for event in cast(RemoteSequence, request.sequence).take(chunk, request):
                stream.put(event)
            if last:
                del self._streams[number], self._number_of[stream]
                if chunk.error is not None or not stream.done:
                    stream.end(None if chunk.error is None else ApiError(**chunk.error))
            if stream.on_step is not None:
                callbacks.setdefault(stream.on_step, []).append(stream)
        for on_step, streams in callbacks.items():
            on_step(streams)

    def _lose(self, why: str) -> None:
        """Nothing comes any more: every sequence ends with this reason, and so does the front."""
        self.failure = DeviceError(why)
        for answer in self._metrics:
            if not answer.done():
                answer.set_exception(unavailable(why))
        streams = list(self._streams.values())
        self._streams.clear()
        self._number_of.clear()
        for stream in streams:
            self._answer(stream, unavailable(why))
            stream.end(unavailable(why))
            if stream.on_step is not None:
                stream.on_step([stream])
