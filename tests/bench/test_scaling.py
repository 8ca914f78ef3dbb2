"""The projection: a rehearsal on one rank counts what several ranks run, and the arithmetic around it is right."""

from __future__ import annotations

import random
from typing import Any

import pytest
from toys import VOCABULARY, ToyBackend, on_ranks

from lookahead.algorithm.sources import SharedMemory
from lookahead.bench.paper.projection import (
    OUR_SETTINGS,
    PAPER_SETTINGS,
    Link,
    Rehearsal,
    Rehearsed,
    exchanged,
    project,
    rehearse,
)
from lookahead.bench.run.decode import decode
from lookahead.config import LookaheadConfig, StopRules
from lookahead.loading.step_cost import StepCost
from lookahead.parallel.backend import ParallelBackend

RULES = StopRules(40)


def prompts(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCABULARY) for _ in range(rng.randint(2, 12))] for _ in range(3)]


def outputs_of(backend: Any, chosen: list[list[int]], config: LookaheadConfig) -> list[list[int]]:
    """One after another on one memory, as `rehearse` does."""
    memory = SharedMemory()
    return [decode(backend, [prompt], config, RULES, memory).outputs[0] for prompt in chosen]


@pytest.mark.parametrize("config", [LookaheadConfig(3, 4, 6, 48), LookaheadConfig.paper(4, 3, 4, prompt=True)])
def test_a_rehearsal_counts_what_the_ranks_run(config: LookaheadConfig) -> None:
    chosen = prompts(1)
    rehearsal = Rehearsal(ToyBackend(), (1, 2, 4))
    expected = outputs_of(rehearsal, chosen, config)
    for ranks in (1, 2, 4):

        def work(group: Any) -> Any:
            backend = ParallelBackend(ToyBackend(), group)
            return outputs_of(backend, chosen, config), backend.counters

        for outputs, counters in on_ranks(ranks, work):
            assert outputs == expected
            assert counters.slowest == rehearsal.shares[ranks]
    assert rehearsal.shares[4] < rehearsal.shares[2] < rehearsal.shares[1]


def test_a_rehearsal_adds_up_tokens_steps_and_shares() -> None:
    config = LookaheadConfig(3, 4, 6, 48)
    found = rehearse(ToyBackend(), prompts(2), "one", config, RULES, (1, 2))
    assert found.tokens == 3 * 40
    assert found.shares[1] == found.step_tokens
    assert found.compression == found.tokens / found.steps
    assert found.share(2) == found.shares[2] / found.steps
    assert found.share(2) < found.share(1)


def test_the_settings_are_those_that_are_named() -> None:
    assert OUR_SETTINGS["W=5, N=5, G=8, K=128"] == LookaheadConfig()
    assert PAPER_SETTINGS["paper (5,15,15)"] == LookaheadConfig.paper(15, 5, 15, prompt=True)


def test_a_projection_takes_the_best_setting_for_each_number_of_ranks() -> None:
    # t(K) = 10 ms for one token and 0.1 ms for each further one; no exchange.
    cost = StepCost((1, 101), (0.010, 0.020))
    small = Rehearsed("small", tokens=200, steps=100, step_tokens=1100, shares={1: 1100, 8: 200})
    large = Rehearsed("large", tokens=400, steps=100, step_tokens=20100, shares={1: 20100, 8: 2100})
    free = Link(float("inf"), 0.0)
    one, eight = project([small, large], cost, free)
    assert (one.ranks, one.of.setting) == (1, "small")
    assert (eight.ranks, eight.of.setting) == (8, "large")
    assert one.step_ms == pytest.approx(11.0)
    assert one.speedup == pytest.approx(2 * 10 / 11)
    assert eight.token_ms == pytest.approx(12 / 4)
    assert eight.speedup == pytest.approx(4 * 10 / 12)
    slow = Link(1e3, 1.0)
    assert project([large], cost, slow)[1].exchange_ms == pytest.approx(1e3 * (1 + 7 * exchanged(21) / 1e3))
    assert project([large], cost, slow)[0].exchange_ms == 0


@pytest.mark.parametrize("config", [LookaheadConfig(3, 4, 6, 48), LookaheadConfig.paper(4, 3, 4, prompt=True)])
def test_what_is_exchanged_is_what_the_backend_sends(config: LookaheadConfig) -> None:

    def work(group: Any) -> Any:
        backend = ParallelBackend(ToyBackend(), group)
        outputs_of(backend, prompts(3), config)
        return backend.counters

    counters = on_ranks(2, work)[0]
    found = rehearse(ToyBackend(), prompts(3), "one", config, RULES, (2,))
    (line,) = project([found], StepCost((1, 64), (0.010, 0.020)))
    assert counters.sent_bytes / counters.collectives == line.sent == exchanged(line.share, found.top)
