"""The number of replicas follows the load, from one to two and back, and no request fails meanwhile."""

from __future__ import annotations

import threading
from pathlib import Path

import httpx2 as httpx
import pytest
from http_server import Running, soon
from ray_clients import PATIENCE, long_bodies, replicas, solo

from lookahead import LookaheadConfig
from lookahead.serve.ray.local import cluster
from lookahead.serve.ray.settings import RaySettings
from lookahead.serve.settings import ServeSettings

pytestmark = pytest.mark.slow


def test_replicas_follow_the_load(folder: Path, settings: LookaheadConfig, one_process: Running) -> None:
    wanted = RaySettings(
        model=str(folder),
        backend="eager",
        config=settings,
        replicas=1,
        max_replicas=2,
        target_ongoing=2,
        upscale_seconds=1,
        downscale_seconds=5,
        serve=ServeSettings(port=0, model_name="tiny", max_concurrency=16),
    )
    bodies = [{**body, "stream": False, "max_tokens": 100} for body in long_bodies()[:6]]
    expected = [solo(one_process, body) for body in bodies]
    stop, answered, wrong = threading.Event(), list[int](), list[str]()

    def ask(number: int, url: str) -> None:
        with httpx.Client(base_url=url, timeout=PATIENCE) as own:
            while not stop.is_set():
                answer = own.post("/v1/completions", json=bodies[number])
                answered.append(number)
                if answer.status_code != 200 or answer.json()["choices"][0]["text"] != expected[number]:
                    wrong.append(answer.text)

    with cluster(wanted, print) as url, httpx.Client(base_url=url, timeout=PATIENCE) as client:
        assert soon(lambda: replicas(client) == 1, PATIENCE)
        threads = [threading.Thread(target=ask, args=(number, url), daemon=True) for number in range(len(bodies))]
        for thread in threads:
            thread.start()
        try:
            assert soon(lambda: replicas(client) == 2, PATIENCE)
        finally:
            stop.set()
        for thread in threads:
            thread.join(PATIENCE)
        assert set(answered) == set(range(len(bodies)))
        assert not wrong
        assert soon(lambda: replicas(client) == 1, PATIENCE)
