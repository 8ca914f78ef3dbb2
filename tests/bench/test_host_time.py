"""The script that times the host's part of a step plays texts back as a model would."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from lookahead.algorithm.native import choose_drafter
from lookahead.config import LookaheadConfig


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import host_time

    return host_time


@pytest.mark.parametrize(
    ("config", "least"),
    [(LookaheadConfig(), 1.5), (LookaheadConfig.autoregressive(), 1.0)],
    ids=["default", "one by one"],
)
def test_texts_are_played_back(script: ModuleType, config: LookaheadConfig, least: float) -> None:
    run = script.Run(config, 1, choose_drafter())
    done = run.step()
    played = run.backend.texts[0].tolist()
    while run.step() is done:
        pass
    assert done.outputs[0] == played[script.PROMPT : script.PROMPT + script.OUTPUT]
    assert done.stats.compression >= least
    assert all(len(run.times[part]) == done.stats.steps - 1 for part in script.PARTS)
    assert min(run.times["host"]) > 0
