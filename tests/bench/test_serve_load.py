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


def test_a_short_load(script: ModuleType, model: Any, tokenizer: Any, settings: Any, tmp_path: Path) -> None:
    loaded = lookahead.load((model, tokenizer), config=settings)
    order = {"streams": [2], "rates": [20], "tokens": 6, "seconds": 0.2, "warm": 0.1, "turns": 1}
    records = script.measure(Namespace(**order, out=tmp_path), loaded)
    assert {(one["kind"], one["way"]) for one in records} == {
        (kind, way) for kind in ("engine", "closed", "open") for way in ("plain", "lookahead")
    }
    for one in records:
        assert one["tokens_per_second"] > 0
        if one["kind"] != "engine":
            assert one["refused"] == 0
            assert one["compression"] == 1 or one["way"] == "lookahead"
    assert (tmp_path / "serve-load.json").exists()
    lines = script.table(records).splitlines()
    assert lines[2].startswith("| 2 streams |")
    assert lines[3].startswith("| 20 a second |")
