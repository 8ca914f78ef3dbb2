"""Two replicas on this machine, as users run them: identity, stickiness, and what happens when processes are killed.

The cluster takes half a minute to start, so that only `make test-all` runs these.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
import pytest
from http_server import Running, soon
from ray import serve
from ray_bodies import requests, same, told
from ray_clients import PATIENCE, Reader, long_bodies, processes, read_all, replicas, samples, solo

from lookahead import LookaheadConfig
from lookahead.serve.ray.application import NAME, build
from lookahead.serve.ray.local import cluster
from lookahead.serve.ray.settings import RaySettings
from lookahead.serve.settings import ServeSettings

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wanted(folder: Path, settings: LookaheadConfig) -> RaySettings:
    own = ServeSettings(port=0, model_name="tiny", drain_seconds=20, max_concurrency=16)
    return RaySettings(model=str(folder), backend="eager", config=settings, replicas=2, serve=own)


@pytest.fixture(scope="module")
def client(wanted: RaySettings) -> Iterator[httpx.Client]:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with cluster(wanted, print) as url, httpx.Client(base_url=url, timeout=PATIENCE) as one:
        assert soon(lambda: replicas(one) == 2, PATIENCE)
        yield one

    def left() -> list[str]:
        found = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
        return [child.name() for child in found if child.status() != psutil.STATUS_ZOMBIE]

    assert soon(lambda: not left()), left()


def test_forty_mixed_requests_are_as_with_one_process(client: httpx.Client, one_process: Running) -> None:
    mixed = [*requests(16), *requests(24), *requests(40)[:6]]
    assert len(mixed) == 40

    def ask(request: tuple[str, dict[str, Any]]) -> Any:
        answer = client.post(request[0], json=request[1])
        assert answer.status_code == 200, answer.text
        return told(answer.json())

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(ask, mixed))
    for (path, body), one in zip(mixed, found, strict=True):
        assert same(one, told(one_process.post(path, **body).json())), body
    assert soon(lambda: all(value > 0 for value in samples(client, "generation_tokens").values()))


def test_the_interface_is_the_same(client: httpx.Client, one_process: Running) -> None:
    for path in ("/v1/models", "/ready", "/health"):
        ours, theirs = client.get(path), one_process.client.get(path)
        assert ours.status_code == theirs.status_code == 200
        assert {**ours.json(), "data": 0} == {**theirs.json(), "data": 0}
    for path, body in (
        ("/v1/completions", {"prompt": "x", "n": 0}),
        ("/v1/nothing", {}),
        ("/tokenize", {"prompt": "x"}),
    ):
        ours, theirs = client.post(path, json=body), one_process.client.post(path, json=body)
        assert (ours.status_code, ours.json()) == (theirs.status_code, theirs.json())


def test_requests_have_ids_and_lines(client: httpx.Client) -> None:
    """Ray's proxy sends the id back, once. The ingress writes the line."""
    mine = f"test-{uuid.uuid4().hex}"
    body = {"prompt": "true", "max_tokens": 9, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=body, headers={"X-Request-Id": mine}) as answer:
        assert answer.headers.get_list("x-request-id") == [mine]
        for _ in answer.iter_lines():
            pass

    def lines() -> list[str]:
        logs = (Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray").glob("session_2*/logs/worker-*.err")
        return [line for path in logs for line in read_lines(path) if mine in line]

    assert soon(lambda: any("INFO: request method=POST" in line for line in lines()), 20), lines()
    (line,) = [line for line in lines() if "INFO: request method=POST" in line]
    assert " status=200 " in line
    assert " output_tokens=9 " in line
    assert " key=everybody " in line
    assert client.head("/health").status_code == 200
    assert client.get("/health", headers={"Host": "evil.example"}).status_code == 403


def read_lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines()


def test_a_conversation_stays_on_its_replica(client: httpx.Client) -> None:
    def tokens() -> dict[str, float]:
        time.sleep(2.5)  # the replicas post once a second
        return samples(client, "generation_tokens")

    for headers, words in (({"X-Session-Id": "one"}, "short"), ({}, "a long story of a true name and no count")):
        before = tokens()
        messages = [{"role": "user", "content": words}]
        for _ in range(6):
            body = {"messages": messages, "max_tokens": 8, "ignore_eos": True}
            said = client.post("/v1/chat/completions", json=body, headers=headers).json()
            text = said["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
            time.sleep(0.5)  # the router is told where the conversation is
        after = tokens()
        gained = sorted(after[name] - before.get(name, 0) for name in after)
        assert gained == [0, 48], headers


def test_streams_survive_the_death_of_a_replica(client: httpx.Client, one_process: Running) -> None:
    readers = [Reader(client.base_url, body) for body in long_bodies()]
    assert soon(lambda: all(reader.chunks > 20 for reader in readers), PATIENCE)
    assert not any(reader.over for reader in readers)
    os.kill(processes("Replica")[0], signal.SIGKILL)
    read_all(readers, one_process)
    assert sum(samples(client, "replicas_lost").values()) > 0
    assert soon(lambda: len(processes("Replica")) == 2 and replicas(client) == 2, PATIENCE)


def test_a_rolling_change_loses_nothing(client: httpx.Client, one_process: Running, wanted: RaySettings) -> None:
    """Every replica and the ingress are replaced while requests come."""
    stop, failed, texts = threading.Event(), [], list[tuple[int, str]]()
    body = {"prompt": "true false", "max_tokens": 40, "temperature": 1, "ignore_eos": True}

    def ask(first: int) -> None:
        number = first
        with httpx.Client(base_url=client.base_url, timeout=PATIENCE) as own:
            while not stop.is_set():
                answer = own.post("/v1/completions", json={**body, "seed": number})
                if answer.status_code != 200:
                    failed.append(answer.text)
                else:
                    texts.append((number, answer.json()["choices"][0]["text"]))
                number += 10

    threads = [threading.Thread(target=ask, args=(first,), daemon=True) for first in range(4)]
    before = set(processes("Replica") + processes("Ingress"))
    for thread in threads:
        thread.start()
    changed = replace(wanted, serve=replace(wanted.serve, max_concurrency=17))
    serve.run(build(changed), name=NAME, route_prefix="/")
    time.sleep(1)
    stop.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert not failed
    assert len(texts) > 4
    for number, text in texts[:: max(1, len(texts) // 20)]:
        assert text == solo(one_process, {**body, "seed": number})
    assert soon(lambda: not before & set(processes("Replica") + processes("Ingress")), PATIENCE)


def test_a_dead_ingress_is_replaced_and_its_clients_get_an_error(client: httpx.Client, one_process: Running) -> None:
    reader = Reader(client.base_url, long_bodies()[1])
    assert soon(lambda: reader.chunks > 20, PATIENCE)
    begin = time.monotonic()
    os.kill(processes("Ingress")[0], signal.SIGKILL)
    reader.join(PATIENCE)
    assert not reader.is_alive()
    assert reader.error is not None
    assert not reader.over

    def ready() -> bool:
        return client.get("/ready").status_code == 200

    assert soon(ready, PATIENCE)
    print(f"up again after {time.monotonic() - begin:.1f} s")
    body = long_bodies()[0]
    again = Reader(client.base_url, body)
    again.join(PATIENCE)
    assert again.text == solo(one_process, body)
