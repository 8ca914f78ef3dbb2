"""A reply does not depend on who else is being served: many mixed requests at once, in little memory, each as alone."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
from http_server import Running, running, soon
from marks import slow_but

import lookahead
from lookahead.backends.graph.backend import GraphBackend
from lookahead.engine.client import EngineClient
from lookahead.engine.engine import Engine
from lookahead.kv.pages import PagePool, PagePools

PAGES = 10
"""Of 64 tokens: room for a few sequences at once."""
STEMS = ("the quick brown fox jumps over the lazy dog " * 7, "once more the dog and the fox; " * 9, "def fox(dog): ")


@pytest.fixture(scope="module")
def paged(model: Any, tokenizer: Any, settings: Any) -> Iterator[Running]:
    """The graph backend, as its twins run it on a CPU, with hardly any pages."""
    loaded = lookahead.load((model, tokenizer), config=settings, backend="graph")
    assert isinstance(loaded.backend, GraphBackend)
    loaded.backend.slots.pool = PagePools([PagePool(PAGES, 64)])
    loaded.engine = Engine(loaded.backend)
    loaded.client = EngineClient(loaded.engine)
    with running(loaded, max_concurrency=16) as server:
        yield server


def made_up(count: int, seed: int) -> list[dict[str, Any]]:
    """Bodies of requests of all kinds."""
    rng = random.Random(seed)
    bodies = []
    for number in range(count):
        body: dict[str, Any] = {
            "prompt": rng.choice(STEMS) + rng.choice(("fox", "dog", "the", "café")) * rng.randrange(1, 4),
            "max_tokens": rng.choice((3, 8, 20, 70)),
            "temperature": rng.choice((0.0, 0.0, 0.7, 1.3)),
            "seed": number,
            "logprobs": rng.choice((None, 0, 3)),
            "stream": rng.random() < 0.5,
        }
        for name, values in {
            "stop": (["ox"], ["zz", "the d"]),
            "top_k": (5, 30),
            "top_p": (0.8,),
            "presence_penalty": (0.9,),
            "repetition_penalty": (1.3,),
            "logit_bias": ({"30": 3.0},),
            "n": (2,),
            "lookahead": (False, {"window": 0, "budget": 12}),
            "ignore_eos": (True,),
        }.items():
            if rng.random() < 0.25:
                body[name] = rng.choice(values)
        bodies.append(body)
    return bodies


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> list[Any]:
    """The choices of a reply: texts, reasons, tokens and log-probabilities."""
    if not body["stream"]:
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"]
    choices: dict[int, Any] = {}
    async with client.stream("POST", "/v1/completions", json=body) as stream:
        async for line in stream.aiter_lines():
            if not line.startswith("data: {"):
                continue
            (part,) = json.loads(line[6:])["choices"]
            whole = choices.setdefault(part["index"], {**part, "text": "", "logprobs": None})
            whole["text"] += part["text"]
            whole["finish_reason"] = part["finish_reason"]
            if part["logprobs"]:
                told = whole["logprobs"] = whole["logprobs"] or {name: [] for name in part["logprobs"]}
                for name, values in part["logprobs"].items():
                    told[name] += values
    return [choices[index] for index in sorted(choices)]


async def give_up(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    """A client that leaves after the first event."""
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True, "n": 1}) as stream:
        async for _ in stream.aiter_lines():
            return


def crowd(server: Running, bodies: list[dict[str, Any]], seed: int) -> list[list[Any]]:
    async def run() -> list[list[Any]]:
        rng = random.Random(seed)
        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:

            async def later(body: dict[str, Any]) -> list[Any]:
                await asyncio.sleep(rng.random() * 0.1)
                return await ask(client, body)

            leaving = [give_up(client, rng.choice(bodies)) for _ in range(len(bodies) // 8)]
            found = await asyncio.gather(*map(later, bodies), *leaving)
            return [one for one in found if one is not None]

    return asyncio.run(run())


@pytest.mark.parametrize("count", slow_but([28, 64]))
def test_requests_at_once_get_what_each_gets_alone(paged: Running, count: int) -> None:
    bodies = made_up(count, seed=1)
    before = paged.model.engine.preemptions
    together = crowd(paged, bodies, seed=2)
    pool = paged.model.backend.pool
    assert paged.model.engine.preemptions > before
    assert pool.hit_tokens > 0
    for body, found in zip(bodies, together, strict=True):
        expected = paged.complete(**{**body, "stream": False})["choices"]
        assert [strip(one) for one in found] == [strip(one) for one in expected], body
        for one, other in zip(found, expected, strict=True):
            if one["logprobs"]:
                assert one["logprobs"]["token_logprobs"] == pytest.approx(other["logprobs"]["token_logprobs"], abs=1e-4)
    assert soon(lambda: pool.used == 0)
    assert not paged.service._states
    assert paged.service.queue.taken == 0


def strip(choice: Any) -> Any:
    """A choice without its log-probabilities, which on a CPU are equal but for rounding."""
    told = choice["logprobs"]
    return (
        choice["index"],
        choice["text"],
        choice["finish_reason"],
        told and told["tokens"],
        told and told["text_offset"],
    )
