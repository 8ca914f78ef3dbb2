"""Between HTTP and the engine: a `RequestSpec` becomes an engine request, and its events return to asyncio.

The engine's thread calls `Service._on_step` once per step with every stream that has new events: one call into the
event loop per step, however many streams there are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from time import perf_counter, time
from typing import TypeVar

from lookahead.algorithm.sequence import DecodingSequence
from lookahead.backends.failures import DeviceError
from lookahead.config import LookaheadConfig, StopRules
from lookahead.engine.request import Request
from lookahead.engine.request_stream import RequestStream
from lookahead.engine.text import SharedTokenizer
from lookahead.generate import LookaheadModel
from lookahead.serve.errors import ApiError, bad_request, log, unavailable
from lookahead.serve.grammar import Grammars
from lookahead.serve.keys import KeyRing
from lookahead.serve.limits import Queue
from lookahead.serve.logprobs import TokenFormatter
from lookahead.serve.logs import FIELDS
from lookahead.serve.memory import MemorySaver
from lookahead.serve.metrics import Metrics
from lookahead.serve.reasoning import find_tags
from lookahead.serve.records import current
from lookahead.serve.reply import Reply
from lookahead.serve.requests import RequestSpec, RequestState
from lookahead.serve.settings import ServeSettings
from lookahead.serve.tracing import find_tracing

R = TypeVar("R")

SMALL = 4096
"""Largest body in bytes that is prepared on the event loop: longer ones would delay the other streams."""


class Service:
    """The model, its engine, and the replies in progress.

    With `tags_responses` every response has its request's id in `X-Request-Id`. `more_statuses` are those of
    errors on the way to this kind of service.
    """

    tags_responses = True
    more_statuses: tuple[int, ...] = (408, 431)

    def __init__(self, model: LookaheadModel, settings: ServeSettings) -> None:
        self.model, self.settings = model, settings
        self.name = settings.model_name or model.name.rstrip("/").rsplit("/", 1)[-1]
        self.keys = KeyRing(settings.keys, model.memory, settings.share_memory, settings.public)
        self.queue = Queue(settings.max_concurrency, settings.max_queue)
        self.metrics = Metrics(self.name)
        self.tracing = find_tracing(self.name)
        self.grammars = Grammars(model)
        self.tokenizer = SharedTokenizer(model.tokenizer)
        self.token_formatter = TokenFormatter(model.tokenizer)
        template = getattr(model.tokenizer, "chat_template", None) or ""  # some tokenizers have several, by name
        self.template = template if isinstance(template, str) else "\n".join(template.values())
        self.tags = find_tags(settings.reasoning_tags, model.tokenizer, self.template)
        self.created = int(time())
        self.draining = False
        self.replies: dict[Reply, None] = {}
        self._states: dict[Request, tuple[Reply, RequestState]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="lookahead-prepare")
        self._probing: RequestStream | None = None
        self.memory_saver: MemorySaver | None = None
        if settings.memory_folder is not None:
            owners = list({owner.file: owner for owner in self.keys.owners}.values())  # one per file
            self.memory_saver = MemorySaver(model, settings, owners, self.in_worker, lambda: self.busy)
        model.engine.set_max_sequences(settings.max_concurrency)
        model.prepare(settings.max_concurrency, log.info)  # before the first request
        model.engine.on_pass = self.metrics.observe_step

    async def start(self) -> None:
        """Called in the server's event loop."""
        self._loop = asyncio.get_running_loop()
        await self.in_worker(self.grammars.prepare)
        if self.memory_saver is not None:
            await self.memory_saver.start()

    @property
    def busy(self) -> bool:
        """Whether requests are running."""
        return bool(self.replies)

    def decode(self, ids: Sequence[int]) -> str:
        """Token ids as text, special tokens included."""
        text: str = self.model.tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.name:
            raise ApiError(
                404, f"no model {name!r} here; there is {self.name!r}", param="model", code="model_not_found"
            )

    async def in_worker(self, function: Callable[[], R], size: int = SMALL + 1) -> R:
        """Run a slow function in a worker thread; for a small body, run it at once."""
        if size <= SMALL:
            return function()
        return await asyncio.get_running_loop().run_in_executor(self._worker, function)

    def make_state(self, spec: RequestSpec, index: int) -> RequestState:
        return RequestState(self.model, self.tokenizer, spec, index)

    async def open(self, prepare: Callable[[], list[RequestSpec]], size: int) -> Reply:
        """Prepare the engine requests of one HTTP request, and submit them. Raises an ApiError on failure."""
        self.check_room()  # before doing any work

        def states() -> list[RequestState]:
            try:
                return [self.make_state(spec, index) for index, spec in enumerate(prepare())]
            except ValueError as error:
                raise bad_request(str(error)) from error

        made = await self.in_worker(states, size)
        record = current.get()
        if self.settings.log_prompts:
            for state in made:
                prompt = {"key": state.spec.owner.name, "prompt": self.decode(state.spec.prompt)}
                request = {} if record is None else {"request_id": record.id}
                log.info("prompt", extra={FIELDS: {**prompt, **request}})
        self.check_open()
        self.queue.enter(len(made))
        reply = Reply(made, self.settings.request_timeout, self.leave)
        self.replies[reply] = None
        if record is not None:
            record.replies.append(reply)
        try:
            for state in made:
                self._states[state.request] = reply, state
                state.stream = self.model.client.submit(state.request, self._on_step)
        except BaseException as error:
            self.leave(reply)
            if isinstance(error, ValueError):
                raise bad_request(str(error)) from error
            raise unavailable(str(error)) if isinstance(error, RuntimeError) else error from error
        return reply

    def leave(self, reply: Reply) -> None:
        """End a reply: cancel its unfinished requests, and release its room in the queue."""
        if reply not in self.replies:
            return
        del self.replies[reply]
        for state in reply.states:
            self._states.pop(state.request, None)
            finished = state.stream is not None and state.stream.done
            if state.stream is not None and not state.stream.done:
                try:
                    self.model.client.cancel(state.stream)
                except RuntimeError:  # the engine is gone
                    finished = True
            self.queue.leave(perf_counter() - state.begin if finished else None)
            self.metrics.observe_end(state, perf_counter())

    # Events from the engine.

    def _on_step(self, streams: Sequence[RequestStream]) -> None:
        """Called in the engine's thread, once per step."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            with suppress(RuntimeError):  # closed in between
                loop.call_soon_threadsafe(self._arrived, streams, perf_counter())

    def _arrived(self, streams: Sequence[RequestStream], now: float) -> None:
        for stream in streams:
            found = self._states.get(stream.request)
            if found is not None:
                reply, state = found
                self.metrics.observe_tokens(state, now)
                reply.wake(state)

    # Lifecycle.

    async def metrics_text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return self.metrics.text(self.model, self.settings.vllm_metrics)

    def check_room(self) -> None:
        """Raise an ApiError if no request can be accepted now, or none more."""
        self.check_open()
        self.queue.check_room(1)

    def check_open(self) -> None:
        """Raise an ApiError if no request can be accepted now."""
        self.check_ready()

    @property
    def lost(self) -> DeviceError | None:
        """Why the device cannot be used any more, once it is lost. The process must end then."""
        failure = self.model.client.failure
        return failure if isinstance(failure, DeviceError) else None

    def check_ready(self) -> None:
        """Raise a 503 while the server drains, and when the engine has failed."""
        if self.lost is not None:
            raise unavailable(str(self.lost))
        if self.draining:
            raise unavailable("the server is shutting down; try another server", retry=5)
        if self.model.client.failure is not None:
            self.probe()
            raise unavailable(f"the engine has failed ({type(self.model.client.failure).__name__})", retry=5)

    def probe(self) -> None:
        """After a failed step: let the engine generate one token. Success clears the failure."""
        if self._probing is not None and not self._probing.done:
            return
        sequence = DecodingSequence([0], LookaheadConfig.autoregressive(), rules=StopRules(1))
        try:
            self._probing = self.model.client.submit(Request(sequence, salt="probe"))
        except (RuntimeError, ValueError):  # its thread is gone
            self._probing = None

    def fail_all(self, error: ApiError) -> None:
        """End every reply in progress with this error."""
        for reply in list(self.replies):
            reply.fail(error)

    async def close(self) -> None:
        if self.memory_saver is not None:
            await self.memory_saver.close()
        self._worker.shutdown(wait=False, cancel_futures=True)
        if self.tracing is not None:
            await asyncio.get_running_loop().run_in_executor(None, self.tracing.close)
