"""The script that times the host's part of a step plays texts back as a model would."""

from __future__ import annotations

import pytest
from host_time import OUTPUT, PARTS, PROMPT, Run

from lookahead.algorithm.native import choose_drafter
from lookahead.config import LookaheadConfig


@pytest.mark.parametrize(
    ("config", "least"),
    [(LookaheadConfig(), 1.5), (LookaheadConfig.autoregressive(), 1.0)],
    ids=["default", "one by one"],
)
def test_texts_are_played_back(config: LookaheadConfig, least: float) -> None:
    run = Run(config, 1, choose_drafter())
    run.step()
    played = run.backend.texts[0].tolist()
    while run.engine.running:
        run.step()
    assert run.sequences[0].output == played[PROMPT : PROMPT + OUTPUT]
    assert run.stats.compression >= least
    assert all(len(run.times[part]) == run.stats.steps - 1 for part in PARTS)
    assert min(run.times["host"]) > 0
