"""benchmarks/batch.py on a tiny model: rows that add up, and a share of the budget for each of several sequences."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest

from lookahead.backends.eager.backend import EagerBackend
from lookahead.config import LookaheadConfig, StopRules

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    sys.modules.pop("batch", None)
    return __import__("batch")


def test_the_rows(script: Any, make_model: Any) -> None:
    model = make_model()
    prompts = [random.Random(i).choices(range(model.config.vocab_size), k=5) * 2 for i in range(5)]
    rows = script.compare(EagerBackend(model), prompts, 4, LookaheadConfig(window=0), StopRules(max_tokens=16))
    assert [row["method"] for row in rows] == ["autoregressive", "shared", "whole for each"]
    plain, shared, whole = rows
    assert all(row["same"] and row["batch"] == 4 and row["tok_s"] > 0 for row in rows)
    assert (plain["S"], plain["K"], plain["over"]) == (1.0, 1.0, 1.0)
    assert 1 < shared["K"] <= 32 < whole["K"] <= 128
    assert min(shared["S"], whole["S"]) > 1
