"""The soak benchmark asks for everything, finds nothing wrong with a good server, and notices a bad one."""

from __future__ import annotations

import os
import random
from argparse import Namespace
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from http_server import Running, soon

ORDER: dict[str, Any] = {"clients": 4, "seconds": 2.0, "tokens": 10, "again": 6, "seed": 3, "timeout": 60.0}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import soak

    return soak


def test_a_server_that_is_well(script: ModuleType, json_server: Running) -> None:
    found = script.run(script.Served(json_server.url, os.getpid()), Namespace(**ORDER))
    assert found["problems"] == []
    totals = found["totals"]
    assert totals["answered"] > 0
    assert totals["failed"] == totals["busy"] == 0
    assert found["again"]["asked"] == found["again"]["equal"] == min(6, totals["answered"])
    assert found["memory"]["host"]["end"] > 50 << 20
    assert set(found["at_rest"].values()) <= {0.0, None}
    shown = script.report(found)
    assert "no problems" in shown
    assert f"| all | {totals['answered']} | {totals['left']} | {totals['refused']} | 0 | 0 |" in shown


def test_a_server_that_fails(script: ModuleType, json_server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_server.model.backend, "launch", lambda inputs: 1 / 0)
    monkeypatch.setattr(script, "REST", 0.1)
    found = script.run(script.Served(json_server.url), Namespace(**{**ORDER, "seconds": 0.3}))
    monkeypatch.undo()
    assert found["totals"]["failed"] > 0
    assert found["totals"]["answered"] == 0
    assert "nothing was answered" in found["problems"]
    assert any("500, not 200" in line or "503, not 200" in line for line in found["problems"])
    assert "/ready is 503 at the end" in found["problems"]
    assert soon(lambda: json_server.client.get("/ready").status_code == 200)


def test_another_reply_is_noticed(script: ModuleType, json_server: Running) -> None:
    asked = script.Asked("greedy text", "/v1/completions", {"prompt": "true", "temperature": 0, "max_tokens": 3})
    found = script.Found(sample=[(asked, [("something else", [], "length")])])
    assert script.asyncio.run(script.again(script.Served(json_server.url), found, 30.0)) == 0
    (problem,) = found.problems
    assert problem.startswith("another reply alone: greedy text")


def test_every_wrong_request_is_refused(script: ModuleType, json_server: Running) -> None:
    from soak_requests import WRONGS  # type: ignore[import-not-found]

    async def ask_all() -> list[Any]:
        line = script.Line(json_server.url, None)
        asked = [script.Asked("wrong", path, body, status=status) for path, body, status in WRONGS]
        return [await script.one(line, one, 30.0) for one in asked]

    assert [outcome.what for outcome in script.asyncio.run(ask_all())] == ["refused"] * len(WRONGS)


def test_the_mix(script: ModuleType) -> None:
    """It follows from the seed, has every kind, and about as many who leave and who are wrong as it says."""
    asked = [script.make(random.Random(f"1/{number}"), 64) for number in range(2000)]
    assert asked == [script.make(random.Random(f"1/{number}"), 64) for number in range(2000)]
    kinds = Counter(one.kind for one in asked)
    assert kinds.keys() == {*script.KINDS, "wrong"}
    assert 60 < kinds["wrong"] < 140
    assert 320 < sum(one.leave > 0 for one in asked) < 440
    assert all(one.body["stream"] for one in asked if one.leave)
    for one in asked:
        if one.kind != "wrong":
            assert one.body["temperature"] == 0 or "seed" in one.body


def test_metrics_are_read_by_name(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    text = '# TYPE x counter\nlookahead:num{model_name="a",replica="1"} 2.0\nlookahead:num{replica="2"} 3.0\n'
    monkeypatch.setattr(script.Served, "get", lambda self, path: (200, text + "lookahead_captures_total 7.0\n"))
    served = script.Served("")
    assert served.metric("num") == 5
    assert served.metric("captures(?:_total)?") == 7
    assert served.metric("nothing") is None
