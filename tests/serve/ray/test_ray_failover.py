"""Streams survive their replica, bit for bit: replicas in this process, which die wherever a test wants it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, cast

import httpx2 as httpx
import pytest
from http_server import Running
from marks import slow_but
from ray.exceptions import ActorDiedError
from ray.serve.exceptions import BackPressureError
from ray_bodies import requests, same, told

from lookahead.engine.request import Event
from lookahead.serve.app import make_app
from lookahead.serve.ray import channels
from lookahead.serve.ray.client import RemoteClient
from lookahead.serve.ray.ingress import IngressService
from lookahead.serve.ray.replica import Replica, ReplicaService
from lookahead.serve.remote import RemoteModel
from lookahead.serve.settings import ServeSettings
from lookahead.serve.wire import Chunk, DecodeRequest, Facts


class LocalReplica(Replica):
    """A replica without Ray around it."""

    def __init__(self, model: Any, settings: ServeSettings) -> None:
        self.service, self.version = ReplicaService(model, settings), "1"
        self.name = "first"
        self._outboxes = {}

    def __del__(self) -> None: ...  # type: ignore[override]


class Call:
    """Stands in for a stream of Ray's: it dies after so many chunks, each of which has the event of one step."""

    def __init__(self, chunks: AsyncIterator[Chunk], death: int | None, error: Exception) -> None:
        self.chunks, self.death, self.error, self.cancelled = chunks, death, error, False

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        sent = 0
        async for whole in self.chunks:
            for chunk in of_one_step_each(whole):
                if sent == self.death:
                    await self.chunks.aclose()  # type: ignore[attr-defined]
                    raise self.error
                sent += 1
                yield chunk

    def cancel(self) -> None:
        self.cancelled = True


def of_one_step_each(chunk: Chunk) -> list[Chunk]:
    """A busy machine reads the events of several steps at once, and a test wants to count them."""
    at = list(accumulate((len(event.tokens) for event in chunk.events[:-1]), initial=chunk.at))
    if len(at) != len(chunk.events):
        return [chunk]  # an error
    parts = [Chunk(place, [event], chunk.replica) for place, event in zip(at, chunk.events, strict=True)]
    return [*parts[:-1], replace(chunk, at=at[-1], events=chunk.events[-1:])]


class Listening:
    """Stands in for the channels' part of Ray's handle. `delay` and `broken` are what may happen to a channel."""

    def __init__(self, replica: LocalReplica) -> None:
        self.replica, self.delay, self.broken, self.batches, self.chunks = replica, 0.0, False, 0, 0

    async def remote(self, ingress: str, replica: str) -> AsyncIterator[Any]:
        async for batch in self.replica.listen(ingress, replica):
            self.batches, self.chunks = self.batches + 1, self.chunks + len(batch)
            await asyncio.sleep(self.delay)
            if not self.broken:
                yield batch


class Handle:
    """Stands in for Ray's handle. The first calls die after as many chunks as `deaths` says."""

    def __init__(self, replica: LocalReplica, deaths: list[int | None], error: Exception | None = None) -> None:
        self.replica, self.deaths, self.error = replica, list(deaths), error or ActorDiedError()
        self.sent: list[DecodeRequest] = []
        self.names: list[str] = []
        self.calls: list[Call] = []
        self.decode = self
        self.listen = Listening(replica)

    def options(self, stream: bool, multiplexed_model_id: str) -> Handle:
        assert stream
        self.names.append(multiplexed_model_id)
        return self

    def remote(self, request: DecodeRequest) -> Call:
        self.sent.append(request)
        death = self.deaths.pop(0) if self.deaths else None
        self.calls.append(Call(self.replica.decode(request), death, self.error))
        return self.calls[-1]


Test = Callable[[httpx.AsyncClient, Handle, IngressService], Awaitable[Any]]


def with_ingress(
    model: Any, deaths: list[int | None], test: Test, error: Exception | None = None, **settings: Any
) -> Any:
    """Run a test against an ingress whose first calls of a replica die."""

    async def run() -> Any:
        replica = LocalReplica(model, ServeSettings(**settings))
        await replica.service.start()
        handle: Any = Handle(replica, deaths, error)
        remote = RemoteModel(Facts.of(model, "1"), RemoteClient(handle, "1"))
        app = make_app(remote, ServeSettings(**settings), partial(IngressService, reports=None, process="ingress"))
        service = app.state.service
        await super(IngressService, service).start()  # without the reports
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as client:
            found = await test(client, handle, service)
        assert not service.replies
        if tasks := list(service.client._tasks.values()):  # a sequence's stream ends a moment after its last chunk
            await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
        assert not service.client._tasks
        assert not replica.service.replies
        return found

    return asyncio.run(run())


@pytest.mark.parametrize("deaths", slow_but([[], [0], [2], [7]], [2]), ids=str)
def test_every_kind_of_request_is_as_with_one_process(
    served: Any, one_process: Running, deaths: list[int | None]
) -> None:
    async def test(client: httpx.AsyncClient, handle: Handle, service: IngressService) -> None:
        for path, body in requests(12):
            handle.deaths = list(deaths)
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            assert same(told(answer.json()), told(one_process.post(path, **body).json())), body

    with_ingress(served, [], test, model_name="tiny")


@pytest.mark.parametrize("deaths", slow_but([(0, 1, 5, 11), tuple(range(12))], (0, 1, 5, 11)))
def test_a_stream_goes_on_after_any_chunk(served: Any, one_process: Running, deaths: tuple[int, ...]) -> None:
    body = {"prompt": "true false", "max_tokens": 20, "temperature": 1.1, "seed": 3, "stream": True, "logprobs": 1}
    expected = joined(one_process.client.post("/v1/completions", json=body).text)

    async def test(client: httpx.AsyncClient, handle: Handle, service: IngressService) -> None:
        for death in deaths:
            before = len(handle.sent)
            handle.deaths = [death]
            answer = await client.post("/v1/completions", json=body)
            assert joined(answer.text) == expected, death
            first, second = handle.sent[before:]
            assert list(first.spec.output) == []
            assert len(second.spec.output) >= death
        assert service.client.counts["lost"] == len(deaths)

    with_ingress(served, [], test)


@pytest.mark.parametrize("happens", slow_but(["nothing", "slow", "broken", "deaths"], "broken", "deaths"))
@pytest.mark.thinned(1, most=1)
def test_many_sequences_share_a_channel(
    served: Any, one_process: Running, happens: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most chunks come by the channel, which may be late, or lose all of them; and replicas may die meanwhile."""
    common = {"prompt": "true false", "max_tokens": 60, "ignore_eos": True, "stream": True, "lookahead": False}
    bodies = [{**common, "temperature": number % 2, "seed": number, "logprobs": 1} for number in range(6)]
    expected = [joined(one_process.client.post("/v1/completions", json=body).text) for body in bodies]
    monkeypatch.setattr(channels, "MISSING", 0.2)

    async def test(client: httpx.AsyncClient, handle: Handle, service: IngressService) -> None:
        handle.listen.delay, handle.listen.broken = 0.03 * (happens == "slow"), happens == "broken"
        handle.deaths = [1, None, 1, None, 1, 1] if happens == "deaths" else []
        answers = await asyncio.gather(*[client.post("/v1/completions", json=body) for body in bodies])
        for answer, text in zip(answers, expected, strict=True):
            assert joined(answer.text)[:2] == text[:2]  # log-probabilities depend on the batch in their last bits
        assert handle.listen.chunks > 100
        assert handle.listen.batches < handle.listen.chunks / 2
        assert service.client.counts["lost"] == {"nothing": 0, "slow": 0, "broken": 6, "deaths": 4}[happens]
        await asyncio.sleep(0)
        open_channels = list(service.client._channels._open.values())
        await asyncio.wait_for(asyncio.gather(*open_channels), 5)  # they close when nothing comes
        assert not handle.replica._outboxes

    with_ingress(served, [], test)


def test_chunks_are_given_in_their_order() -> None:
    def chunk(at: int, count: int) -> Chunk:
        return Chunk(at, [Event(cast(Any, None), [0] * count, None)])

    async def test() -> None:
        inbox = channels.Inbox(3)
        for at, size in ((6, 1), (3, 2), (7, 4), (5, 1), (3, 2)):
            inbox.put(chunk(at, size))
        found = [await inbox.next() for _ in range(4)]
        assert [one.at for one in found if one is not None] == [3, 5, 6, 7]
        inbox.end(ActorDiedError())
        with pytest.raises(ActorDiedError):
            await inbox.next()

    asyncio.run(test())


def joined(text: str) -> tuple[str, list[str], list[float]]:
    """The text of a stream, its tokens and their log-probabilities."""
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert not any("error" in event for event in events), text
    parts = [event["choices"][0] for event in events]
    tokens = [token for part in parts for token in part["logprobs"]["tokens"]]
    values = [round(value, 4) for part in parts for value in part["logprobs"]["token_logprobs"]]
    return "".join(part["text"] for part in parts), tokens, values


def test_a_request_that_kills_two_replicas_is_dropped(served: Any) -> None:
    async def test(client: httpx.AsyncClient, handle: Handle, service: IngressService) -> None:
        body = {"prompt": "true", "max_tokens": 20, "ignore_eos": True}
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 502
        assert answer.json()["error"]["code"] == "replicas_lost"
        assert len(handle.calls) == 2
        handle.deaths = [1, 1]
        answer = await client.post("/v1/completions", json={**body, "stream": True})
        *_, last, done, empty = answer.text.split("\n\n")
        assert json.loads(last[6:])["error"]["code"] == "replicas_lost"
        assert (done, empty) == ("data: [DONE]", "")
        assert service.client.counts == {"lost": 4, "dropped": 2}

    with_ingress(served, [3, 0], test)


def test_a_full_queue_is_a_429_unless_the_request_has_begun(served: Any) -> None:
    full = BackPressureError(num_queued_requests=3, max_queued_requests=3)

    async def test(client: httpx.AsyncClient, handle: Handle, service: IngressService) -> None:
        answer = await client.post("/v1/completions", json={"prompt": "true"})
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "queue_full"
        handle.deaths = [2]  # as if a dead replica's sequences did not fit into the queue of the other one
        answer = await client.post("/v1/completions", json={"prompt": "true", "ignore_eos": True})
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 16

    with_ingress(served, [0], test, full)


def test_a_mistake_of_the_request_is_not_retried(served: Any) -> None:
    async def test(client: httpx.AsyncClient, handle: Handle, service: IngressService) -> None:
        schema = {"name": "x", "schema": {"type": "no such type"}}
        format = {"type": "json_schema", "json_schema": schema}
        body = {"messages": [{"role": "user", "content": "hi"}], "response_format": format}
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400
        answer = await client.post("/v1/completions", json={"prompt": "x" * 9000})
        assert answer.status_code == 400
        assert not handle.calls

    with_ingress(served, [], test)


def test_another_model_does_not_continue_a_stream(served: Any) -> None:
    async def test(client: httpx.AsyncClient, handle: Handle, service: IngressService) -> None:
        handle.replica.version = "2"
        answer = await client.post("/v1/completions", json={"prompt": "true"})
        assert answer.status_code == 503
        assert "the model was replaced" in answer.json()["error"]["message"]

    with_ingress(served, [], test)


def test_turns_of_a_conversation_ask_for_its_replica(served: Any) -> None:
    async def test(client: httpx.AsyncClient, handle: Handle, service: IngressService) -> None:
        messages = [{"role": "user", "content": "tell me a long story of a true name"}]
        for _ in range(3):
            body = {"messages": messages, "max_tokens": 8, "ignore_eos": True}
            answer = await client.post("/v1/chat/completions", json=body)
            said = answer.json()["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "go on"}]
        assert handle.names == ["", "first", "first"]
        handle.names.clear()
        other = [{"role": "user", "content": "or write a short letter to another name"}]
        await client.post("/v1/chat/completions", json={"messages": other, "max_tokens": 8})
        assert handle.names == [""]
        # The replica dies: the conversation goes where there is room, and stays there.
        handle.names.clear()
        handle.deaths = [2]
        for name in ("second", "third"):
            handle.replica.name = name
            await client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 8, "ignore_eos": True})
        assert handle.names == ["first", "", "second"]

    with_ingress(served, [], test)
