"""The process of a replica: what it does at its end, and when its device is lost."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray.exceptions import ActorDiedError

import lookahead
from lookahead import LookaheadConfig
from lookahead.config import SamplingParams, StopRules
from lookahead.serve.ray import replica as module
from lookahead.serve.ray.replica import Replica
from lookahead.serve.ray.settings import RaySettings
from lookahead.serve.requests import RequestSpec
from lookahead.serve.settings import ServeSettings
from lookahead.serve.wire import Chunk, DecodeRequest


class Alone(Replica):
    """A replica whose router has no names, and which is not deleted twice."""

    async def introduce(self, name: str) -> str:
        return name

    def __del__(self) -> None: ...  # type: ignore[override]


class Reports:
    """Stands in for the handle of the reports' deployment."""

    def __init__(self) -> None:
        self.post, self.posted = self, list[str]()

    async def remote(self, kind: str, name: str, text: bytes) -> None:
        self.posted.append(name)


@pytest.fixture
def own(served: Any, settings: LookaheadConfig) -> Any:
    """A model with an engine of its own, which may break."""
    return lookahead.load((served.model, served.tokenizer), backend="eager", config=settings)


def with_replica(
    model: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, test: Callable[[Replica, Reports], Awaitable[None]]
) -> None:
    """Run a test with a replica that was started as Ray starts it."""
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="first"), rank=SimpleNamespace(rank=0))
    monkeypatch.setattr(module.serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(module, "load", lambda settings: model)
    monkeypatch.setattr(sys, "setswitchinterval", lambda seconds: None)

    async def run() -> None:
        replica, reports = Alone.__new__(Alone), Reports()
        settings = RaySettings(serve=ServeSettings(memory_folder=folder))
        await replica.__init__(settings, reports)  # type: ignore[misc]
        await test(replica, reports)

    asyncio.run(run())


async def decode(replica: Replica, model: Any) -> list[Chunk]:
    owner = replica.service.keys.owners[0]
    spec = RequestSpec(model.encode("true false"), model.default_config, SamplingParams(), StopRules(12), owner=owner)
    return [chunk async for chunk in replica.decode(DecodeRequest.of(spec, 0, replica.version, []))]


def test_a_replica_that_has_drained_saves_its_memory(own: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(replica: Replica, reports: Reports) -> None:
        await decode(replica, own)
        assert reports.posted == ["first"]
        assert not list(tmp_path.rglob("*.npz"))
        await Replica.__del__(replica)
        assert list(tmp_path.glob("replica-0/*/*.npz"))
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)  # nothing goes on

    with_replica(own, tmp_path, monkeypatch, test)


def test_a_replica_without_a_device_ends_at_once(own: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as it lived, the router would send it every request: it has nothing to do."""
    codes: list[int] = []

    def end(code: int) -> None:
        codes.append(code)
        raise ActorDiedError()

    def lost(*args: Any) -> Any:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    async def test(replica: Replica, reports: Reports) -> None:
        await replica.check_health()
        monkeypatch.setattr(own.backend, "launch", lost)
        monkeypatch.setattr(os, "_exit", end)
        with pytest.raises(ActorDiedError):
            await decode(replica, own)
        with pytest.raises(ActorDiedError):
            await replica.check_health()
        assert codes == [70, 70]
        await Replica.__del__(replica)

    with_replica(own, tmp_path, monkeypatch, test)
