"""Replicas that are groups of two ranks each: identity with one process, and the death of a rank."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from http_server import Running, soon
from ray.util import placement_group_table
from ray_bodies import requests, same, told
from ray_clients import PATIENCE, Reader, actors, long_bodies, processes, read_all, replicas, samples

from lookahead import LookaheadConfig
from lookahead.serve.ray.local import cluster
from lookahead.serve.ray.settings import RaySettings
from lookahead.serve.settings import ServeSettings

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def client(folder: Path, settings: LookaheadConfig) -> Iterator[httpx.Client]:
    own = ServeSettings(port=0, model_name="tiny", drain_seconds=20, max_concurrency=16)
    wanted = RaySettings(model=str(folder), backend="eager", config=settings, replicas=2, ranks=2, serve=own)
    with cluster(wanted, print) as url, httpx.Client(base_url=url, timeout=PATIENCE) as one:
        assert soon(lambda: replicas(one) == 2, PATIENCE)
        yield one


def test_requests_are_as_with_one_process(client: httpx.Client, one_process: Running) -> None:
    mixed = [one for one in requests(24) if "logprobs" not in one[1]]

    def ask(request: tuple[str, dict[str, Any]]) -> Any:
        answer = client.post(request[0], json=request[1])
        assert answer.status_code == 200, answer.text
        return told(answer.json())

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(ask, mixed))
    for (path, body), one in zip(mixed, found, strict=True):
        assert same(one, told(one_process.post(path, **body).json())), body
    refused = client.post("/v1/completions", json={"prompt": "x", "logprobs": 1, "stream": True})
    assert refused.status_code == 400
    assert "the ranks of this server exchange tokens" in refused.json()["error"]["message"]


def test_the_ranks_of_a_replica_are_placed_together(client: httpx.Client) -> None:
    groups = [group for group in placement_group_table().values() if group["state"] == "CREATED"]
    assert [(group["strategy"], len(group["bundles"])) for group in groups] == [("STRICT_PACK", 2)] * 2
    assert len(processes("Replica")) == len(actors("Rank")) == 2


def test_streams_survive_the_death_of_a_rank(client: httpx.Client, one_process: Running) -> None:
    """Its replica dies with it, and the other one goes on with the streams."""
    before = processes("Replica")
    readers = [Reader(client.base_url, body) for body in long_bodies()[:4]]
    assert soon(lambda: all(reader.chunks > 10 for reader in readers), PATIENCE)
    assert not any(reader.over for reader in readers)
    os.kill(actors("Rank")[0], signal.SIGKILL)
    read_all(readers, one_process)
    assert sum(samples(client, "replicas_lost").values()) > 0
    assert soon(lambda: len(set(before) & set(processes("Replica"))) == 1, PATIENCE)
    assert soon(lambda: len(processes("Replica")) == len(actors("Rank")) == 2 and replicas(client) == 2, PATIENCE)
