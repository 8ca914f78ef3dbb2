"""The load benchmark: its clients get whole replies, and the page says what was measured."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import serve_load
import server_process
from http_server import running
from load import Reply, steady, summary
from server_process import Served, connect

import lookahead

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_the_steady_part_of_a_run() -> None:
    """Of a run of four seconds the last three count: five of the events below, with two tokens or one each."""
    slow = Reply(asked=10.0, status=200, first=1.0, gaps=[1.0, 1.0, 1.0], tokens=8, steps=8)
    late = Reply(asked=12.5, status=200, first=0.25, gaps=[0.5, 3.0], tokens=3, steps=2)
    assert steady([slow, late], begin=10.0, seconds=4.0) == (3 * 2 + 2 * 1) / 3
    assert steady([], begin=10.0, seconds=4.0) == 0
    found = summary([slow, late, Reply(10.0, 429, None, [], 0, 0)], 10.0, 4.0)
    assert (found["replies"], found["refused"], found["compression"]) == (2, 1, 1.1)
    assert found["mean_seconds"] == (4.0 + 3.75) / 2
    assert found["ttft_ms"][0] == 625


def test_no_prompt_is_asked_twice_while_there_are_new_ones() -> None:
    asked = serve_load.Requests([str(number) for number in range(10)], tokens=5)

    def take(count: int) -> list[str]:
        return [asked.take(True)["messages"][0]["content"] for _ in range(count)]

    assert take(4) == ["0", "1", "2", "3"]
    assert asked.again(0) == 0
    assert take(8) == ["4", "5", "6", "7", "8", "9", "0", "1"]
    assert asked.again(4) == 2
    take(3)
    assert asked.again(12) == 3


def test_the_page_of_the_results_here() -> None:
    found = json.loads((RESULTS / "serve-h200.json").read_text(encoding="utf-8"))
    page, records = serve_load.page(found), found["records"]
    expected = [
        "1 streams",
        "243.3",
        "817.1",
        "3.36",
        "4.47",
        "8.5 / 17.4",
        "10.6 / 15.4",
        "",
        "",
        "4.1 / 4.6",
        "5.4 / 6.0",
    ]
    assert page.rows[0] == expected
    assert [row[0] for row in page.rows] == [f"{count} streams" for count in (1, 8, 32, 64)]
    beside = serve_load.beside_engine(records)
    assert beside.rows[-1] == ["64", "8755", "8940", "0.979", "12406", "12469", "0.995"]
    assert "No requests had the prompt of an earlier one" in page.notes[1]


@pytest.mark.slow
def test_a_short_load(model: Any, tokenizer: Any, settings: Any, tmp_path: Path) -> None:
    loaded = lookahead.load((model, tokenizer), config=settings)
    order: dict[str, Any] = {"streams": [1, 2], "rates": [20], "tokens": 6, "turns": 1, "seconds": 1.5}
    order |= {"prompts": "builtin", "limit": 4, "data_dir": None, "out": tmp_path, "options": []}
    with running(loaded) as server:
        found = serve_load.measure(Served(server.url), Namespace(**order))
    records = found["records"]
    loads = {("closed", 1), ("closed", 2), ("open", 20)}
    cells = {(one["kind"], one.get("streams", one.get("rate")), one["way"]) for one in records}
    assert cells == {(*load, way) for load in loads for way in ("plain", "lookahead")}
    for one in records:
        assert one["tokens_per_second"] > 0
        assert one["refused"] == 0
        assert one["compression"] == 1 or one["way"] == "lookahead"
    assert records[0]["again"] == max(0, records[0]["replies"] - 4)
    assert found["about"]["dtype"] == "float32"
    assert json.loads((tmp_path / "serve-load.json").read_text()) == found
    assert [row[0] for row in serve_load.page(found).rows] == ["1 streams", "2 streams", "20 a second"]


def test_a_server_that_is_started_may_need_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import sys, time; print('serving x at http://127.0.0.1:9/v1', file=sys.stderr, flush=True); time.sleep(60)"
    )
    start = server_process.subprocess.Popen
    fake = lambda command, **options: start([*command[:1], "-c", script], **options)  # noqa: E731
    monkeypatch.setattr(server_process.subprocess, "Popen", fake)
    order = Namespace(url=None, options=["--api-key-file", "keys"], patience=30.0, inflate=None, key="secret")
    with connect(order) as served:
        assert (served.url, served.key) == ("http://127.0.0.1:9", "secret")
