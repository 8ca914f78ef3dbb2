"""The engine's end of the links: requests come in, and what a step brought goes out in one message per front.

Nothing of it runs in the engine's thread but the queueing of a step's streams: each link has a thread that builds
requests, and one that packs what they got, while the device runs the next step.
"""

from __future__ import annotations

import copy
import socket
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import SimpleQueue
from time import perf_counter
from typing import Any

from lookahead.engine.request_stream import RequestStream
from lookahead.generate import LookaheadModel
from lookahead.serve.errors import bad_request, failed, log, unavailable
from lookahead.serve.fronts.link import (
    Accepted,
    AskMetrics,
    Cancel,
    Metrics,
    Number,
    Ready,
    Refused,
    Start,
    Stepped,
    Submit,
    frame,
    packed,
    read,
)  # fmt: skip
from lookahead.serve.requests import RequestSpec, RequestState
from lookahead.serve.serialize import GrammarText
from lookahead.serve.service import Service
from lookahead.serve.settings import ServeSettings
from lookahead.serve.wire import Chunk, DecodeRequest, Facts, as_fields


@dataclass(eq=False)
class Running:
    """A sequence of a front. `sent` counts the tokens that the front has."""

    number: Number
    state: RequestState
    stream: RequestStream
    sent: int


class EngineService(Service):
    """The service of the engine's process: keys' memories, grammars, admission and metrics for all fronts."""

    def __init__(self, model: LookaheadModel, settings: ServeSettings) -> None:
        super().__init__(model, settings)
        self.running: dict[Running, None] = {}
        self.lock = threading.Lock()  # of the queue and the metrics, which all links use
        self._refused: dict[Any, Counter[str]] = {}  # by link, those of ended fronts, too

    @property
    def busy(self) -> bool:
        return bool(self.running)

    def spec_of(self, call: DecodeRequest) -> RequestSpec:
        """The spec with an owner and a mask of this process."""
        spec = call.spec
        mask = spec.mask.mask(self.grammars) if isinstance(spec.mask, GrammarText) else spec.mask
        return replace(spec, owner=self.keys.owners[call.owner], mask=mask)

    def set_refused(self, link: Any, counts: dict[str, int]) -> None:
        with self.lock:
            self._refused[link] = Counter(counts)
            total = sum(self._refused.values(), Counter[str]())
            self.metrics.refused.clear()
            self.metrics.refused.update(total)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        with self.lock:  # a copy takes a tenth of the time, and no step waits for the rest
            metrics = copy.deepcopy(self.metrics)
        return metrics.text(self.model, self.settings.vllm_metrics)

    def prepare_in_worker(self, work: Callable[[], None]) -> None:
        """Do slow work of a request beside the others, in the order of asking."""
        self._worker.submit(work)


class FrontLink:
    """The link to one front. `on_end` is called in a thread of its own when the front has gone."""

    def __init__(self, service: EngineService, link: socket.socket, on_end: Callable[[], None]) -> None:
        self.ready, self.ended = threading.Event(), threading.Event()
        self._service, self._link, self._on_end = service, link, on_end
        self._running: dict[Number, Running] = {}
        self._of_stream: dict[RequestStream, Running] = {}
        self._pending: set[Number] = set()  # those whose grammar is compiled in a worker thread
        self._outbox: SimpleQueue[Any] = SimpleQueue()

    def start(self, facts: Facts) -> None:
        """Tell the front what it needs to know, and begin to serve it."""
        self.send(Start(facts, self._service.settings))
        for work in (self._read, self._write):
            threading.Thread(target=work, name="lookahead-front", daemon=True).start()

    def send(self, message: Any) -> None:
        """Queue a message. One to a front that has gone is lost."""
        self._outbox.put(message)

    def close(self) -> None:
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)

    # From the front.

    def _read(self) -> None:
        try:
            while True:
                self._receive(read(self._link))
        except (EOFError, OSError):
            pass
        except Exception as error:
            log.error("the link to a front failed: %s", error, exc_info=error)
        self._end()

    def _receive(self, message: Any) -> None:
        if isinstance(message, Submit):
            if isinstance(message.call.spec.mask, GrammarText):
                with self._service.lock:
                    self._pending.add(message.number)
                self._service.prepare_in_worker(lambda: self._accept(message))
            else:
                self._accept(message)
        elif isinstance(message, Cancel):
            with self._service.lock:
                self._pending.discard(message.number)
                running = self._running.get(message.number)
            if running is not None:
                self._cancel(running)
        elif isinstance(message, Ready):
            self.ready.set()
        elif isinstance(message, Refused):
            self._service.set_refused(self, message.counts)
        elif isinstance(message, AskMetrics):
            try:
                self.send(Metrics(self._service.text()))
            except Exception as error:
                self.send(Metrics(b"", as_fields(failed(error))))

    def _accept(self, message: Submit) -> None:
        """Run a sequence, or tell its front why not."""
        try:
            self._submit(message)
        except Exception as error:
            self.send(refused(message.number, error))

    def _cancel(self, running: Running) -> None:
        with suppress(RuntimeError):  # the engine is gone
            self._service.model.client.cancel(running.stream)

    def _submit(self, message: Submit) -> None:
        service = self._service
        service.check_ready()
        with service.lock:
            service.queue.enter(1)
        try:
            state = service.make_state(service.spec_of(message.call), 0)
            slow = isinstance(message.call.spec.mask, GrammarText)
            # The engine may answer before `submit` returns: what it brings waits for the entry below.
            with service.lock:
                if slow and message.number not in self._pending:  # cancelled meanwhile
                    service.queue.leave()
                    return
                self._pending.discard(message.number)
                stream = state.stream = service.model.client.submit(state.request, self._on_step)
                running = Running(message.number, state, stream, len(message.call.spec.output))
                service.running[running] = None
                self._running[message.number] = self._of_stream[stream] = running
            self.send(Accepted(message.number))
        except BaseException:
            with service.lock:
                service.queue.leave()
            raise

    def _end(self) -> None:
        """The front has gone: nobody waits for its sequences."""
        self.ended.set()
        with self._service.lock:
            self._pending.clear()
            all_running = list(self._running.values())
        for running in all_running:
            self._cancel(running)
        self._outbox.put(None)
        self._on_end()

    # To the front.

    def _on_step(self, streams: Sequence[RequestStream]) -> None:
        """Called in the engine's thread, once per step."""
        self._outbox.put(streams)

    def _write(self) -> None:
        """Send messages, and what steps brought: all that has come since the last message in one."""
        open_ = True
        while True:
            items = [self._outbox.get()]
            while not self._outbox.empty():
                items.append(self._outbox.get())
            open_ = open_ and None not in items
            try:
                data = self._framed(items)
                if open_ and data:
                    self._link.sendall(data)
            except OSError:  # it is gone, and `_read` sees it, too
                open_ = False
            except Exception as error:  # a bug: the front is replaced
                log.error("the link to a front failed: %s", error, exc_info=error)
                open_ = False
                self.close()
            if not open_ and self.ended.is_set() and not self._running:
                self._link.close()
                return

    def _framed(self, items: Sequence[Any]) -> bytes:
        """Messages, and what the streams of steps got."""
        now, streams, data = perf_counter(), dict[RequestStream, None](), bytearray()
        for item in items:
            if isinstance(item, list):
                streams |= dict.fromkeys(item)
            elif item is not None:
                data += frame(item)
        parts = list[tuple[Number, bool, Any]]()
        for stream in streams:
            with self._service.lock:  # `_submit` holds it until the sequence is known here
                running = self._of_stream.get(stream)
            if running is None:
                continue
            try:
                part = self._part(running, now)
            except Exception as error:  # a bug, which ends this sequence alone
                part = self._give_up(running, error)
            if part is not None:
                parts.append(part)
        return bytes(data) + (frame(Stepped(parts)) if parts else b"")

    def _give_up(self, running: Running, error: Exception) -> tuple[Number, bool, Any] | None:
        """End a sequence that cannot be read."""
        fields = as_fields(failed(error))
        with self._service.lock:
            known = self._forget(running)
            if known:
                self._service.queue.leave()
        self._cancel(running)
        return (running.number, True, packed(Chunk(running.sent, [], error=fields))) if known else None

    def _forget(self, running: Running) -> bool:
        """Drop what is known of a sequence. Returns whether anything was."""
        self._of_stream.pop(running.stream, None)
        self._service.running.pop(running, None)
        return self._running.pop(running.number, None) is not None

    def _part(self, running: Running, now: float) -> tuple[Number, bool, Any] | None:
        """What a sequence got since its last part; None for nothing."""
        service = self._service
        events, done, error = running.stream.read()
        if not events and not done:
            return None
        chunk = Chunk(running.sent, events)
        state = running.state
        state.tried += sum(event.tried for event in events)
        if done:
            self._finish(running, chunk, error)
        with service.lock:
            service.metrics.observe_tokens(state, now)
            if done:
                service.metrics.observe_end(state, now)
                self._forget(running)
                finished = state.sequence.finish_reason is not None
                service.queue.leave(now - state.begin if finished else None)
        part = running.number, done, packed(chunk)
        running.sent += sum(len(event.tokens) for event in events)  # last: it will be sent
        return part

    def _finish(self, running: Running, chunk: Chunk, error: BaseException | None) -> None:
        """The sequence ends with this chunk."""
        sequence = running.state.sequence
        prediction = sequence.prediction
        chunk.cached, chunk.stats = running.state.request.cached, sequence.stats
        chunk.predicted = 0 if prediction is None else prediction.accepted
        if error is not None:
            chunk.error = as_fields(failed(error))
            chunk.events = [event for event in chunk.events if event.error is None]
        elif sequence.finish_reason is None:
            chunk.error = as_fields(unavailable("the request was cancelled"))


def refused(number: Number, error: Exception) -> Stepped:
    """The message that a sequence does not run."""
    shown = bad_request(str(error)) if isinstance(error, ValueError) else failed(error)
    return Stepped([(number, True, packed(Chunk(0, [], error=as_fields(shown))))])
