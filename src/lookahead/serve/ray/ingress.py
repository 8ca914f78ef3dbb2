"""An ingress: serves HTTP as a single process would, and forwards sequences to the replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any, cast

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from lookahead.serve.access import App, Receive, Scope, Send
from lookahead.serve.app import make_app
from lookahead.serve.errors import unavailable
from lookahead.serve.logs import logging_to_stderr
from lookahead.serve.ray.client import RemoteClient
from lookahead.serve.ray.conversations import Conversations
from lookahead.serve.ray.gather import ingress_text, merge_metrics
from lookahead.serve.ray.reports import PERIOD, Report
from lookahead.serve.ray.settings import RaySettings
from lookahead.serve.remote import RemoteModel, RemoteRequestState
from lookahead.serve.reply import Reply
from lookahead.serve.requests import RequestSpec, RequestState
from lookahead.serve.serialize import GrammarTexts, check_for_ranks
from lookahead.serve.service import Service
from lookahead.serve.settings import ServeSettings
from lookahead.serve.wire import Facts

SESSION_HEADER = b"x-session-id"
LONGEST_NAME = 256
session: ContextVar[str] = ContextVar("session", default="")
"""The client's session id of the current request."""
POLL = 0.02


class IngressService(Service):
    """The service of an ingress: requests go to replicas, and its queue grows with their number.

    `process` is this ingress' name in reports. A replica has `ranks` ranks.
    """

    model: RemoteModel
    tags_responses = False  # Ray's proxy does
    more_statuses = (502,)

    def __init__(
        self,
        model: RemoteModel,
        settings: ServeSettings,
        reports: DeploymentHandle[Any],
        process: str,
        ranks: int = 1,
    ) -> None:
        super().__init__(model, settings)
        self._reports, self._process, self._ranks = reports, process, ranks
        self._watching: asyncio.Task[None] | None = None
        self.grammars = GrammarTexts(model)  # compiled by the replicas
        self.conversations = Conversations()
        self.client = cast(RemoteClient, model.client)
        self.client.owner_of = self.keys.owners.index
        self.client.retry_after = lambda: self.queue.wait(1)
        self.live = 1  # the one that sent the model's facts

    def make_state(self, spec: RequestSpec, index: int) -> RequestState:
        if self._ranks > 1:
            check_for_ranks(spec)
        return RemoteRequestState(self.model, self.tokenizer, spec, index)

    async def open(self, prepare: Callable[[], list[RequestSpec]], size: int) -> Reply:
        named = session.get()

        def specs() -> list[RequestSpec]:
            found = prepare()
            for spec in found:
                owner = spec.owner.name
                spec.conversation = f"{owner}/{named}" if named else self.conversations.name(owner, spec.prompt)
            return found

        return await super().open(specs, size)

    def check_open(self) -> None:
        """Requests are accepted even without replicas: they wait for the next one."""
        if self.draining:
            self.check_ready()

    def check_ready(self) -> None:
        if self.draining:
            raise unavailable("the server is shutting down; try another server", retry=5)
        if not self.live:
            raise unavailable("no replica is ready", retry=5)

    @property
    def waiting(self) -> int:
        """About how many sequences wait here because all replicas are full."""
        return max(0, self.queue.taken - self.settings.max_concurrency * self.live)

    def count_replicas(self, live: int) -> None:
        """Resize the queue for `live` replicas."""
        self.live = live
        self.queue.resize(self.settings.max_concurrency * max(1, live), self.settings.max_queue)

    # Reports.

    async def start(self) -> None:
        await super().start()
        self._watching = asyncio.ensure_future(self._watch())

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        await super().close()

    async def metrics_text(self) -> bytes:
        """The metrics of all replicas, and those of all ingresses."""
        reports: list[Report] = await self._reports.read.remote()
        return merge_metrics([*(report for report in reports if report.name != self._process), self._report()])

    def _report(self) -> Report:
        text = ingress_text(self.name, self.waiting, self.metrics.refused, self.client.counts)
        return Report("ingress", self._process, text)

    async def _watch(self) -> None:
        """Report this ingress, and read the number of replicas."""
        while True:
            with suppress(RayError, RayServeException):
                await self._reports.post.remote(*self._report())
                reports: list[Report] = await self._reports.read.remote()
                self.count_replicas(sum(report.kind == "replica" for report in reports))
            await asyncio.sleep(PERIOD)


class Sessions:
    """Middleware that stores the client's session id."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            name = dict(scope["headers"]).get(SESSION_HEADER, b"")
            session.set(name.decode("latin-1")[:LONGEST_NAME])
        await self.app(scope, receive, send)


class Ingress:
    """The HTTP deployment. It has no weights, and gets the model's facts from a replica."""

    async def __init__(  # type: ignore[misc]
        self, settings: RaySettings, replicas: DeploymentHandle[Any], reports: DeploymentHandle[Any]
    ) -> None:
        facts: Facts = await replicas.facts.remote()
        model = RemoteModel(facts, RemoteClient(replicas, facts.version))
        own = replace(settings.serve, memory_folder=None)
        self._log = logging_to_stderr(own.log_level, own.log_format)  # which Ray keeps in its folder of logs
        self._log.__enter__()
        process = serve.get_replica_context().replica_id.unique_id
        kind = partial(IngressService, reports=reports, process=process, ranks=settings.ranks)
        self.app_ = make_app(model, own, kind)
        self.service: IngressService = self.app_.state.service

    def __serve_build_asgi_app__(self) -> App:
        """Called by Ray: the application that answers requests."""
        return Sessions(cast(App, self.app_))

    async def drain(self, seconds: float) -> int:
        """Accept no new requests, and wait for the running ones. Returns how many were not finished in time."""
        service, loop = self.service, asyncio.get_running_loop()
        service.draining = True
        end = loop.time() + seconds
        while service.replies and loop.time() < end:
            await asyncio.sleep(POLL)
        left = len(service.replies)
        service.fail_all(unavailable("the server has shut down before the reply was finished; try another server"))
        return left
