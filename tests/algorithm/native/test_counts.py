"""How many guesses a step takes of each sequence: the same in C as with numpy."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead.algorithm.counts import best_counts
from lookahead.algorithm.native.build import library
from lookahead.algorithm.native.drafter import NativeDrafter

if library() is None:
    pytest.skip("needs a C compiler", allow_module_level=True)

OURS = NativeDrafter(library())


@st.composite
def steps(draw: st.DrawFn) -> tuple[Any, ...]:
    """Scores in any order, of which many are equal; costs that end early, or none."""
    count = draw(st.integers(1, 6))
    score = st.sampled_from((0.0, 0.1, 0.25, 0.5, 0.9, 1.0)) if draw(st.booleans()) else st.floats(0, 1)
    scores = [array("d", draw(st.lists(score, max_size=9))) for _ in range(count)]
    weights = draw(st.lists(st.sampled_from((0.5, 1.0, 1.3)), min_size=count, max_size=count))
    bonuses = draw(st.lists(st.sampled_from((0.0, 0.008)), min_size=count, max_size=count))
    kept = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    cost = draw(st.none() | st.lists(st.floats(0.01, 10), min_size=1, max_size=40))
    if cost is not None and draw(st.booleans()):
        cost = np.array(cost)
    return scores, weights, bonuses, kept, count + draw(st.integers(0, 3)), draw(st.integers(-2, 60)), cost


@settings(max_examples=400, deadline=None)
@given(steps())
def test_counts_are_the_same_bit_for_bit(step: tuple[Any, ...]) -> None:
    assert repr(OURS.best_counts(*step)) == repr(best_counts(*step))


def test_many_guesses_are_sorted_as_numpy_does() -> None:
    rng = np.random.default_rng(3)
    for count in (1, 2, 3, 7, 64, 256):
        scores = [array("d", np.sort(rng.random(rng.integers(0, 40)).round(2))[::-1]) for _ in range(count)]
        cost = 1 + 0.001 * np.arange(4 * count)
        step = scores, [1.1] * count, [0.008] * count, [False] * count, count, 10**6, cost
        assert OURS.best_counts(*step) == best_counts(*step)


def test_a_weight_for_every_sequence() -> None:
    with pytest.raises(ValueError, match="2 sequences in 2 rows with 1 weights"):
        OURS.best_counts([array("d"), array("d")], [1.0], [0.0, 0.0], [False, False], 2, 5, None)
