"""The load benchmark: clients in a process of their own get whole replies, and the table says what was measured."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import lookahead


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import serve_load

    return serve_load


def test_the_steady_part_of_a_run(script: ModuleType) -> None:
    """Of a run of four seconds the last three count: five of the events below, with two tokens or one each."""
    slow = {"asked": 10.0, "first": 1.0, "gaps": [1.0, 1.0, 1.0], "tokens": 8}
    late = {"asked": 12.5, "first": 0.25, "gaps": [0.5, 3.0], "tokens": 3}
    assert script.steady([slow, late], begin=10.0, seconds=4.0) == (3 * 2 + 2 * 1) / 3
    assert script.steady([], begin=10.0, seconds=4.0) == 0


def test_no_prompt_is_asked_twice_while_there_are_new_ones(script: ModuleType) -> None:
    deal = script.Deal([{"prompt": number} for number in range(10)])
    assert [body["prompt"] for body in deal.take(4)] == [0, 1, 2, 3]
    assert [deal.again(4, replies) for replies in (3, 4, 6)] == [0, 0, 2]
    assert [body["prompt"] for body in deal.take(8)] == [4, 5, 6, 7, 8, 9, 0, 1]
    assert [deal.again(8, replies) for replies in (6, 8)] == [0, 2]
    deal.take(3)
    assert deal.again(3, 2) == 2


@pytest.mark.slow
def test_a_short_load(script: ModuleType, model: Any, tokenizer: Any, settings: Any, tmp_path: Path) -> None:
    loaded = lookahead.load((model, tokenizer), config=settings, backend="graph")
    order: dict[str, Any] = {"streams": [1, 2], "engine": [2], "repeats": 1, "rates": [20], "tokens": 6, "turns": 1}
    order |= {"seconds": 0.8, "crosstalk": 8, "pages": 12, "prompts": "builtin", "limit": 4}
    found = script.measure(Namespace(**order, data_dir=None, out=tmp_path), loaded)
    records = found["records"]
    cells = {(one["kind"], one["way"], one.get("streams")) for one in records}
    kinds = {("engine", 2), ("full", 2), ("closed", 1), ("closed", 2), ("open", None)}
    assert cells == {(kind, way, streams) for kind, streams in kinds for way in ("plain", "lookahead")}
    for one in records:
        assert one["tokens_per_second"] > 0
        if one["kind"] != "engine":
            assert one["refused"] == 0
            assert one["compression"] == 1 or one["way"] == "lookahead"
    (talk,) = found["crosstalk"]
    assert talk["equal"] == talk["requests"] == 8
    assert talk["apart"] < 1e-4
    assert talk["left_in_use"] == 0
    written = script.report(tmp_path / "serve-load.json", tmp_path / "page" / "serve.md")
    rows = [line for line in written.splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[0] for row in rows[1:]] == ["| 1 streams", "| 2 streams", "| 20 a second"]
    assert "%" in rows[2]
    assert "%" not in rows[1] + rows[3]
    assert "8 replies equal" in written
    assert (tmp_path / "page" / "serve.png").exists()
