"""The cost of a pass: the measured curve drawn as a table, and the line through the last passes that corrects it."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookahead.algorithm.cost import MOST_SLOPE, SURPRISE, CostCurve, PassCost, table_for_sizes
from lookahead.config import LookaheadConfig

# The curve.


def test_a_table_draws_straight_lines_between_the_sizes() -> None:
    cost = CostCurve((1, 2, 4, 8), (1.0, 2.0, 3.0, 3.0))
    assert cost.table(8) == pytest.approx((1.0, 2.0, 2.5, 3.0, 3.0, 3.0, 3.0, 3.0))
    assert cost.table(1) == (1.0,)


def test_a_table_goes_on_with_the_last_slope() -> None:
    assert CostCurve((1, 2, 4), (1.0, 1.5, 2.5)).table(7)[4:] == pytest.approx((3.0, 3.5, 4.0))


def test_one_size_alone_is_scaled() -> None:
    assert CostCurve((1,), (2.0,)).table(3) == pytest.approx((2.0, 4.0, 6.0))


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=8, unique=True).map(sorted),
    st.lists(st.floats(0.01, 5), min_size=8, max_size=8),
    st.integers(1, 60),
)
def test_a_table_never_falls(sizes: list[int], seconds: list[float], budget: int) -> None:
    """Noise may make a larger step the faster one; a config may rely on positive times in order."""
    cost = CostCurve(tuple(sizes), tuple(seconds[: len(sizes)]))
    table = cost.table(budget)
    assert len(table) == budget
    assert all(before <= after * (1 + 1e-9) for before, after in pairwise(table))
    rising = CostCurve(cost.sizes, tuple(sorted(cost.seconds)))
    for size, time in zip(rising.sizes, rising.seconds, strict=True):
        if size <= budget:
            assert rising.table(budget)[size - 1] == pytest.approx(time)
    LookaheadConfig(window=0, budget=budget, step_cost=table)


def test_padding_makes_stairs() -> None:
    assert table_for_sizes([1.0, 2.0, 3.0, 4.0, 5.0], (1, 4)) == (1.0, 4.0, 4.0, 4.0, 5.0)
    assert table_for_sizes([1.0, 2.0, 3.0], (4,)) == (3.0, 3.0, 3.0)


# What a pass costs now.

TABLE = [0.004 + 1e-5 * rows for rows in range(512)]


def noted(pairs: list[tuple[int, float]]) -> PassCost:
    times = PassCost(TABLE)
    for rows, seconds in pairs:
        times.record_pass(rows, seconds)
    return times


def test_without_passes_the_table_holds() -> None:
    assert np.array_equal(PassCost(TABLE).times_after(0), TABLE)


def test_passes_as_in_the_table_leave_it() -> None:
    rng = random.Random(0)
    times = noted([(rows, TABLE[rows - 1]) for rows in rng.choices(range(1, 513), k=300)])
    assert times.times_after(0) == pytest.approx(np.array(TABLE))


@pytest.mark.parametrize(("constant", "slope"), [(0.002, 1.0), (0.001, 1.8), (0.003, 0.7)])
def test_the_line_is_found(constant: float, slope: float) -> None:
    rng = random.Random(1)
    chosen = rng.choices(range(1, 400), k=400)
    times = noted([(rows, (constant + slope * TABLE[rows - 1]) * rng.uniform(0.97, 1.03)) for rows in chosen])
    for rows in (1, 64, 200, 400):
        assert times.times_after(0)[rows - 1] == pytest.approx(constant + slope * TABLE[rows - 1], rel=0.03)


def test_passes_of_one_size_move_the_whole_table() -> None:
    """Nothing tells the slope then, so the table's own is kept."""
    times = noted([(64, TABLE[63] + 0.002)] * 100)
    assert times.slope == pytest.approx(1.0, abs=0.01)
    assert times.times_after(0)[63] == pytest.approx(TABLE[63] + 0.002, rel=0.01)


def test_a_capture_is_no_reason_to_stop_drafting() -> None:
    rng = random.Random(2)
    usual = [(rows, TABLE[rows - 1]) for rows in rng.choices(range(1, 300), k=200)]
    usual_only, disturbed = noted(usual), noted([*usual, (128, 5.0)])
    assert disturbed.times_after(0).max() <= SURPRISE * usual_only.times_after(0).max()
    assert disturbed.slope <= MOST_SLOPE


@given(
    st.lists(st.floats(0.0, 3.0), min_size=1, max_size=20),
    st.lists(st.tuples(st.integers(1, 20), st.floats(1e-3, 10.0)), max_size=40),
)
def test_no_pass_takes_less_than_nothing(rises: list[float], passes: list[tuple[int, float]]) -> None:
    """A long pass that is faster than the table says must not move the short ones below zero: on a steep table the line
    would go on from there with times that mean nothing."""
    table = [1.0 + sum(rises[: k + 1]) for k in range(len(rises))]
    cost = PassCost(table)
    for rows, seconds in passes:
        cost.record_pass(rows, seconds)
    assert cost.times_after(0).min() > 0
    assert (np.diff(cost.times_after(0)) >= 0).all()


def test_a_steep_table_recovers_from_one_fast_long_pass() -> None:
    table = [50.0 + 10.0 * rows for rows in range(100)]
    cost = PassCost(table)
    cost.record_pass(100, 400.0)
    for _ in range(100):
        cost.record_pass(1, 50.0)
    assert cost.seconds(1) == pytest.approx(50.0, rel=0.05)


def test_prompts_beside_take_the_table_s_first_rows() -> None:
    times = PassCost(TABLE)
    assert np.array_equal(times.times_after(100), TABLE[100:])
    assert len(times.times_after(5000)) == 1


def test_a_pass_beyond_the_table_says_nothing() -> None:
    assert np.array_equal(noted([(513, 9.0)]).times_after(0), TABLE)


def test_the_time_of_a_pass_is_the_table_s_as_corrected() -> None:
    cost = noted([(64, TABLE[63] + 0.002)] * 100)
    assert cost.seconds(64) == pytest.approx(TABLE[63] + 0.002, rel=0.01)
    assert cost.seconds(900) == cost.seconds(512)
    assert [cost.seconds(rows) for rows in (1, 2, 400)] == pytest.approx(cost.times_after(0)[[0, 1, 399]])


def test_the_first_times_are_those_of_one_sequence() -> None:
    cost = noted([(64, TABLE[63] + 0.002)] * 100)
    first = cost.times_up_to(128)
    assert first is not None
    assert list(first) == cost.times_after(0)[:128].tolist()
    assert cost.times_up_to(513) is None
