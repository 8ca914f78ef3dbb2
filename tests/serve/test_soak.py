"""Many requests of all kinds for a while: nothing grows, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from typing import Any

import httpx2 as httpx
import pytest
from http_server import running, soon
from test_crosstalk import ask, give_up, made_up

import lookahead

SECONDS = 60.0
"""Long enough to see growth. Set it to 600 for the long soak."""


def resident() -> int:
    """The process's memory, in bytes."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


@pytest.mark.slow
def test_nothing_grows(model: Any, tokenizer: Any, settings: Any) -> None:
    loaded = lookahead.load((model, tokenizer), config=settings, backend="graph")
    with running(loaded, max_concurrency=8, max_queue=64) as server:
        rng, end, sizes = random.Random(3), time.monotonic() + SECONDS, list[int]()

        async def run() -> None:
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
                while time.monotonic() < end:
                    bodies = made_up(8, seed=rng.randrange(1 << 30))
                    wrong = client.post("/v1/completions", json={"prompt": "the", "n": -1})
                    await asyncio.gather(*(ask(client, body) for body in bodies), give_up(client, bodies[0]), wrong)
                    gc.collect()
                    sizes.append(resident())

        asyncio.run(run())
        assert soon(lambda: not server.service._states and not loaded.engine.running)
        assert loaded.backend.pool.used == 0
        assert server.service.queue.taken == 0
        assert threading.active_count() < 12
        rounds = len(sizes)
        assert rounds > 8
        early, late = sizes[rounds // 2], sizes[-1]  # by half-time all tables and caches have their size
        assert late - early < 40 << 20, f"{(late - early) >> 20} MiB more after {rounds} rounds"
