"""Drafts that are one chain: their length, and that both drafters propose nothing else."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import examples
from toy import targets_of, toy_model

from lookahead import LookaheadConfig
from lookahead.algorithm.budget import chain_length
from lookahead.algorithm.choice import choose_chains
from lookahead.algorithm.native import choose_drafter
from lookahead.algorithm.search import PythonDrafter
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.sources import SharedMemory
from lookahead.config import StopRules

CHAINS = LookaheadConfig().as_chain()


def gain(scores: list[float], times: list[float], again: int, count: int) -> float:
    """Tokens per second of a chain of this many draft tokens, case by case: all are accepted, or one is refused."""
    tokens = 1.0 + sum(scores[:count])
    seconds, above = times[again + count], 1.0
    for depth, score in enumerate(scores[:count]):
        rows_again = again + 1 + depth  # what ran twice, the root, and the accepted ones
        seconds += (above - score) * (times[rows_again] - times[0])
        above = score
    return tokens / seconds


@settings(max_examples=examples(100), deadline=None)
@given(st.data())
def test_the_length_of_a_chain_is_the_best(data: Any) -> None:
    rates = data.draw(st.lists(st.floats(0.0, 1.0), max_size=16))
    steps = data.draw(st.lists(st.floats(0.001, 1.0), min_size=24, max_size=24))
    times = [1.0 + sum(steps[:index]) for index in range(len(steps))]
    again = data.draw(st.integers(0, 6))
    scores, score = [], 1.0
    for rate in rates:
        score *= rate
        scores.append(score)
    found = chain_length(scores, times, again, 0.0)
    best = max(gain(scores, times, again, count) for count in range(len(scores) + 1))
    assert gain(scores, times, again, found) == pytest.approx(best)


def test_what_runs_again_is_weighed() -> None:
    """A draft token that is refused half of the time would pay, if the accepted root did not run again for it."""
    times = [1.0, 1.45, 1.9]
    assert (1 + 0.5) / times[1] > 1 / times[0]
    assert chain_length([0.5], times, 0, 0.0) == 0
    assert chain_length([0.9], times, 0, 0.0) == 1
    assert chain_length([0.9, 0.9, 0.9], [1.0] * 4, 0, 0.0) == 3
    assert chain_length([1.0] * 30, [1.0 + 0.01 * rows for rows in range(17)], 0, 0.0) == 16
    assert chain_length([1.0] * 30, [1.0 + 0.01 * rows for rows in range(17)], 6, 0.0) == 10


@pytest.mark.parametrize("predicted", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_both_drafters_propose_the_same_chains(seed: int, predicted: bool) -> None:
    prompt = random.Random(seed).choices(range(5), k=30)

    def run(drafter: Any) -> list[Any]:
        model, seen = toy_model(5, seed, order=2), list[Any]()
        prediction = random.Random(seed + 9).choices(range(5), k=40) if predicted else ()
        rules, memory = StopRules(max_tokens=40), SharedMemory(drafter)
        sequence = DecodingSequence(prompt, CHAINS, None, rules, memory=memory, prediction=prediction)
        while sequence.finish_reason is None:
            tree = choose_chains([sequence], [0])[0]
            assert list(tree.parents) == list(range(-1, tree.size - 1))
            seen.append((list(tree.tokens), list(tree.origins)))
            sequence.accept_step(tree, targets_of(sequence, tree, model))
        return seen

    ours = run(choose_drafter())
    assert ours == run(PythonDrafter())
    assert any(len(tokens) > 2 for tokens, _ in ours)


def test_the_budget_includes_what_runs_again() -> None:
    sequence = DecodingSequence([1, 2, 3] * 9, CHAINS.adapted(budget=8))
    assert choose_chains([sequence], [0])[0].size == 8
    assert choose_chains([sequence], [5])[0].size == 3
    assert choose_chains([sequence], [7])[0].size == 1
    weighed = DecodingSequence([1, 2, 3] * 9, LookaheadConfig(chain=True, window=0, step_cost=(1.0,) * 128))
    assert choose_chains([weighed], [0])[0].size > 1
    assert [tree.size for tree in choose_chains([weighed, weighed], [0, 3])] == [1, 1]


def test_a_chain_has_no_window() -> None:
    with pytest.raises(ValueError, match="use window=0"):
        LookaheadConfig(chain=True)
    assert LookaheadConfig().adapted(chain=True).window == 0
    assert LookaheadConfig.paper(3, 4, 3).as_chain().sources == ("suffix",)
