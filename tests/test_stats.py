"""The counters, by hand."""

from __future__ import annotations

import pytest

from lookahead.stats import Stats


def test_nothing_happened_yet() -> None:
    stats = Stats(prompt_tokens=7)
    assert (stats.compression, stats.tokens_per_second, stats.tokens_per_step) == (0.0, 0.0, 0.0)
    assert (stats.accepted_by_depth, stats.accepted_by_source) == ([], {})


def test_steps_add_up() -> None:
    stats = Stats(prompt_tokens=7)
    stats.count_step(20, 1, [])
    stats.count_step(30, 4, ["suffix", "suffix", "recycle"])
    stats.count_step(10, 2, ["jacobi"])
    stats.seconds = 0.5
    assert (stats.steps, stats.step_tokens, stats.generated_tokens) == (3, 60, 7)
    assert stats.accepted_by_depth == [2, 1, 1]
    assert stats.accepted_by_source == {"suffix": 2, "recycle": 1, "jacobi": 1}
    assert stats.compression == pytest.approx(7 / 3)
    assert stats.tokens_per_step == pytest.approx(20)
    assert stats.tokens_per_second == pytest.approx(14)


def test_counters_belong_to_one_request() -> None:
    first, second = Stats(), Stats()
    first.count_step(3, 2, ["prompt"])
    assert (second.accepted_by_depth, second.accepted_by_source) == ([], {})


def test_the_total_of_several_turns() -> None:
    first, second = Stats(prompt_tokens=5), Stats(prompt_tokens=9)
    first.count_step(4, 3, ["suffix", "jacobi"])
    first.seconds, first.first_token_seconds = 2.0, 0.5
    second.count_step(6, 1, [])
    second.count_step(6, 2, ["suffix"])
    second.seconds, second.first_token_seconds, second.forward_seconds = 1.0, 0.25, 0.75
    total = Stats.total([first, second])
    assert (total.prompt_tokens, total.generated_tokens, total.steps, total.step_tokens) == (14, 6, 3, 16)
    assert (total.seconds, total.first_token_seconds, total.forward_seconds) == (3.0, 0.5, 0.75)
    assert total.accepted_by_depth == [2, 1]
    assert total.accepted_by_source == {"suffix": 2, "jacobi": 1}
    assert total.compression == 2.0
    assert first.generated_tokens == 3, "the parts stay as they are"
    assert Stats.total([]) == Stats()


def test_expected_tokens_add_up() -> None:
    first, second = Stats(), Stats()
    first.count_step(9, 3, ["suffix", "suffix"], 1.5)
    second.count_step(1, 1, [])
    assert (first.expected_tokens, second.expected_tokens) == (2.5, 1.0)
    assert Stats.total([first, second]).expected_tokens == 3.5
