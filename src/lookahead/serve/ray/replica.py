"""A replica: one engine in its own process, behind Ray Serve's router, without HTTP."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

import lookahead
from lookahead.engine.request import Event, Request
from lookahead.generate import LookaheadModel
from lookahead.serve.errors import bad_request, failed, unavailable
from lookahead.serve.life import SWITCH_SECONDS
from lookahead.serve.memory import folder_of
from lookahead.serve.ranks import LeadingService
from lookahead.serve.ray.channels import Numbered, Outbox
from lookahead.serve.ray.ranks import Ranks
from lookahead.serve.ray.reports import PERIOD
from lookahead.serve.ray.settings import RaySettings
from lookahead.serve.requests import Piece, RequestSpec, RequestState
from lookahead.serve.serialize import GrammarText
from lookahead.serve.service import Service
from lookahead.serve.wire import Chunk, DecodeRequest, Facts, as_fields

CHUNK_SECONDS = 0.001
"""Seconds of an ingress' time per chunk. With n sequences each sends at most one chunk per n times that, with all steps
since the last, and fewer if several replicas share an ingress: beside an H200 one ingress forwarded 600 to 900 chunks a
second, and further ones piled up. On two busy cores a chunk takes 2 ms of proxy, ingress and replica together."""
TOKEN_BYTES = 4
"""Bytes per prompt token, to decide by size which thread prepares a request."""
DEVICE_LOST = 70
"""The exit code of a replica whose device is lost, as of `lookahead serve`."""

log = logging.getLogger("ray.serve")


@dataclass
class Events(Piece):
    """A piece with raw events: the ingress turns them into text."""

    events: Sequence[Event] = ()


class ReplicaRequestState(RequestState):
    """A request whose events are forwarded unchanged."""

    def read(self, events: Sequence[Event]) -> Piece:
        self.tried += sum(event.tried for event in events)
        return Events(self, "", [], [], events[-1].finish_reason, events=events)


class ReplicaService(Service):
    """The service of a replica: the engine, metrics and memories of a single process, without text."""

    def make_state(self, spec: RequestSpec, index: int) -> RequestState:
        return ReplicaRequestState(self.model, self.tokenizer, spec, index)


class LeadingReplicaService(LeadingService, ReplicaService):
    """The service of a replica that is a group of ranks."""


class Replica:
    """The engine's deployment. Every call of `decode` is one sequence."""

    _chunk_seconds = CHUNK_SECONDS
    _ranks: asyncio.Task[None] | None = None
    _reporting: asyncio.Task[None] | None = None  # None until the service has started

    async def __init__(  # type: ignore[misc]
        self, settings: RaySettings, reports: DeploymentHandle[Any]
    ) -> None:
        sys.setswitchinterval(SWITCH_SECONDS)
        context = serve.get_replica_context()
        self.name, self._reports = context.replica_id.unique_id, reports
        self._outboxes: dict[str, Outbox] = {}  # by ingress
        self._chunk_seconds = CHUNK_SECONDS * settings.most / settings.ingresses
        ranks = Ranks(settings) if settings.ranks > 1 else None
        # In a thread: Ray checks meanwhile whether the process is alive.
        model = await asyncio.to_thread(load if ranks is None else ranks.load, settings)
        kind: Callable[..., ReplicaService] = ReplicaService
        if ranks is not None:
            kind, self._ranks = LeadingReplicaService, asyncio.ensure_future(ranks.exit_with_ranks())
        own = settings.for_replicas()
        if own.memory_folder is not None:  # two replicas must not write the same file
            own = replace(own, memory_folder=own.memory_folder / f"replica-{context.rank.rank}")
        await asyncio.to_thread(model.prepare, own.max_concurrency)
        self.service = kind(model, own)
        self.version = version_of(model, settings)
        await self.service.start()
        await self.introduce(self.name)
        self._reporting = asyncio.ensure_future(self._report_periodically())

    async def facts(self) -> Facts:
        """What an ingress needs to know about the model."""
        return Facts.of(self.service.model, self.version)

    @serve.multiplexed(max_num_models_per_replica=1)  # type: ignore[untyped-decorator]
    async def introduce(self, name: str) -> str:
        """Register this replica's name with Ray's router as if it were a model only this replica has. The router then
        sends requests for it here, and elsewhere if this replica is full or gone."""
        return name

    async def decode(self, call: DecodeRequest) -> AsyncIterator[Chunk]:
        """Generate a sequence, or the rest of it: one chunk per step, or fewer if there are many sequences."""
        first = at = len(call.spec.output)
        try:
            if call.version != self.version:
                raise unavailable("the model was replaced while it answered; try again")
            if isinstance(mask := call.spec.mask, GrammarText):  # compiled here, not on the event loop
                await self.service.in_worker(lambda: mask.mask(self.service.grammars))
            reply = await self.service.open(lambda: [self._spec(call)], TOKEN_BYTES * len(call.spec.prompt))
            async with reply:
                state = reply.states[0]
                while (pieces := await reply.next()) is not None:
                    for piece in cast("list[Events]", pieces):
                        chunk = self._chunk(at, state, piece.events)
                        outbox = self._outboxes.get(call.ingress)
                        if outbox is None or at == first or chunk.stats is not None:
                            yield chunk
                        else:
                            outbox.put(call.number, chunk)
                        at += sum(len(event.tokens) for event in piece.events)
                    if (others := len(self.service.replies) - 1) > 0:
                        await asyncio.sleep(self._chunk_seconds * others)
        except Exception as error:
            self._exit_if_lost()
            yield Chunk(at, [], error=as_fields(failed(error)))

    async def listen(self, ingress: str, replica: str) -> AsyncIterator[list[Numbered]]:
        """A channel: chunks of all sequences of an ingress. Empty if it was meant for another replica."""
        if replica != self.name or ingress in self._outboxes:
            return
        outbox = self._outboxes[ingress] = Outbox()
        try:
            async for batch in outbox.batches():
                yield batch
        finally:
            del self._outboxes[ingress]

    def _spec(self, call: DecodeRequest) -> RequestSpec:
        """The spec with an owner and a mask of this process."""
        spec, owners = call.spec, self.service.keys.owners
        if call.owner >= len(owners):
            raise bad_request("the replica does not know this key; deploy it again")
        mask = spec.mask.mask(self.service.grammars) if isinstance(spec.mask, GrammarText) else spec.mask
        return replace(spec, owner=owners[call.owner], mask=mask)

    def _chunk(self, at: int, state: RequestState, events: Sequence[Event]) -> Chunk:
        unset = cast(Request, None)  # the ingress fills in its own request
        chunk = Chunk(at, [replace(event, request=unset) for event in events], self.name)
        if events[-1].finish_reason is not None:
            prediction = state.sequence.prediction
            chunk.cached, chunk.stats = state.request.cached, state.sequence.stats
            chunk.predicted = 0 if prediction is None else prediction.accepted
        return chunk

    async def check_health(self) -> None:
        """Polled by Ray, which replaces a replica after several failures."""
        self._exit_if_lost()
        self.service.check_ready()

    def _exit_if_lost(self) -> None:
        """Exit this process if its device is lost, so that its sequences are resumed elsewhere and Ray replaces it. As
        long as it lived, the router would prefer it: it has nothing to do."""
        if self.service.lost is not None:
            log.error("%s; the replica exits", self.service.lost)
            os._exit(DEVICE_LOST)

    async def _report_periodically(self) -> None:
        service = self.service
        while True:
            text = service.metrics.text(service.model, service.settings.vllm_metrics)
            with suppress(RayError, RayServeException):
                await self._reports.post.remote("replica", self.name, text)
            await asyncio.sleep(PERIOD)

    async def __del__(self) -> None:
        """Called by Ray when the replica has drained."""
        if self._ranks is not None:
            self._ranks.cancel()
        if self._reporting is not None:
            self._reporting.cancel()
            await self.service.close()


def load(settings: RaySettings) -> LookaheadModel:
    return lookahead.load(
        settings.model,
        dtype=settings.dtype,
        device=settings.device,
        backend=settings.backend,
        config=settings.config,
    )


def version_of(model: LookaheadModel, settings: RaySettings) -> str:
    """Identifies the model: it changes with the name, tokenizer, shape and number format."""
    return f"{folder_of(model, Path()).name}-{model.dtype}-{settings.dtype}"
