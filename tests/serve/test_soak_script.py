"""The soak benchmark asks for everything, finds nothing wrong with a good server, and notices a bad one."""

from __future__ import annotations

import asyncio
import os
import random
from argparse import Namespace
from collections import Counter
from typing import Any

import pytest
import soak
from http_server import Running, soon
from mixed_requests import WRONGS, make

ORDER: dict[str, Any] = {"clients": 4, "seconds": 2.0, "tokens": 10, "again": 6, "seed": 3, "timeout": 60.0}


def test_a_server_that_is_well(json_server: Running) -> None:
    found = soak.run(soak.Served(json_server.url, os.getpid()), Namespace(**ORDER))
    assert found["problems"] == []
    totals = found["totals"]
    assert totals["answered"] > 0
    assert totals["failed"] == totals["busy"] == 0
    assert found["again"]["asked"] == found["again"]["equal"] == min(6, totals["answered"])
    assert found["memory"]["host"]["end"] > 50 << 20
    assert set(found["at_rest"].values()) <= {0.0, None}
    shown = soak.report(found)
    assert "no problems" in shown
    assert f"| all | {totals['answered']} | {totals['left']} | {totals['refused']} | 0 | 0 |" in shown


def test_a_server_that_fails(json_server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_server.model.backend, "launch", lambda inputs: 1 / 0)
    monkeypatch.setattr(soak, "REST", 0.1)
    found = soak.run(soak.Served(json_server.url), Namespace(**{**ORDER, "seconds": 0.3}))
    monkeypatch.undo()
    assert found["totals"]["failed"] > 0
    assert found["totals"]["answered"] == 0
    assert "nothing was answered" in found["problems"]
    assert any("500, not 200" in line or "503, not 200" in line for line in found["problems"])
    assert "/ready is 503 at the end" in found["problems"]
    assert soon(lambda: json_server.client.get("/ready").status_code == 200)


def test_another_reply_is_noticed(json_server: Running) -> None:
    asked = soak.Asked("greedy text", "/v1/completions", {"prompt": "true", "temperature": 0, "max_tokens": 3})
    found = soak.Found(sample=[(asked, [("something else", [], "length")])])
    assert soak.asyncio.run(soak.again(soak.Served(json_server.url), found, 30.0)) == 0
    (problem,) = found.problems
    assert problem.startswith("another reply alone: greedy text")


def test_every_wrong_request_is_refused(json_server: Running) -> None:
    async def ask_all() -> list[Any]:
        line = soak.Connection(json_server.url, None)
        asked = [soak.Asked("wrong", path, body, status=status) for path, body, status in WRONGS]
        return [await soak.one(line, one, 30.0) for one in asked]

    assert [outcome.what for outcome in soak.asyncio.run(ask_all())] == ["refused"] * len(WRONGS)


def test_a_request_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A timeout is an OSError, too, and has no text of its own."""

    async def never(*args: Any) -> Any:
        await asyncio.sleep(60)

    monkeypatch.setattr(soak, "ask", never)
    asked = make(random.Random(0), 8)
    outcome = asyncio.run(soak.one(soak.Connection("http://127.0.0.1:9"), asked, 0.01))
    assert (outcome.what, outcome.why) == ("failed", "no end within 0.01 s")


def test_the_mix() -> None:
    """It follows from the seed, has every kind, and about as many who leave and who are wrong as it says."""
    asked = [soak.make(random.Random(f"1/{number}"), 64) for number in range(2000)]
    assert asked == [soak.make(random.Random(f"1/{number}"), 64) for number in range(2000)]
    kinds = Counter(one.kind for one in asked)
    assert kinds.keys() == {*soak.KINDS, "wrong"}
    assert 60 < kinds["wrong"] < 140
    assert 320 < sum(one.leave > 0 for one in asked) < 440
    assert all(one.body["stream"] for one in asked if one.leave)
    for one in asked:
        if one.kind != "wrong":
            assert one.body["temperature"] == 0 or "seed" in one.body


def test_metrics_are_read_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    text = '# TYPE x counter\nlookahead:num{model_name="a",replica="1"} 2.0\nlookahead:num{replica="2"} 3.0\n'
    monkeypatch.setattr(soak.Served, "get", lambda self, path: (200, text + "lookahead_captures_total 7.0\n"))
    served = soak.Served("")
    assert served.metric("num") == 5
    assert served.metric("captures(?:_total)?") == 7
    assert served.metric("nothing") is None
