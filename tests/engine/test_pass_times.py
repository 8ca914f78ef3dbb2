"""The line through the last passes: what it finds, what disturbs it, and what the choice of guesses sees of it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from lookahead.engine.pass_times import MOST_SLOPE, SURPRISE, PassTimes

TABLE = [0.004 + 1e-5 * rows for rows in range(512)]


def noted(pairs: list[tuple[int, float]]) -> PassTimes:
    times = PassTimes(TABLE)
    for rows, seconds in pairs:
        times.note(rows, seconds)
    return times


def test_without_passes_the_table_holds() -> None:
    assert np.array_equal(PassTimes(TABLE).after(0), TABLE)


def test_passes_as_in_the_table_leave_it() -> None:
    rng = random.Random(0)
    times = noted([(rows, TABLE[rows - 1]) for rows in rng.choices(range(1, 513), k=300)])
    assert times.after(0) == pytest.approx(np.array(TABLE))


@pytest.mark.parametrize(("constant", "slope"), [(0.002, 1.0), (0.001, 1.8), (0.003, 0.7)])
def test_the_line_is_found(constant: float, slope: float) -> None:
    rng = random.Random(1)
    chosen = rng.choices(range(1, 400), k=400)
    times = noted([(rows, (constant + slope * TABLE[rows - 1]) * rng.uniform(0.97, 1.03)) for rows in chosen])
    for rows in (1, 64, 200, 400):
        assert times.after(0)[rows - 1] == pytest.approx(constant + slope * TABLE[rows - 1], rel=0.03)


def test_passes_of_one_size_move_the_whole_table() -> None:
    """Nothing tells the slope then, so the table's own is kept."""
    times = noted([(64, TABLE[63] + 0.002)] * 100)
    assert times.slope == pytest.approx(1.0, abs=0.01)
    assert times.after(0)[63] == pytest.approx(TABLE[63] + 0.002, rel=0.01)


def test_a_capture_is_no_reason_to_stop_guessing() -> None:
    rng = random.Random(2)
    usual = [(rows, TABLE[rows - 1]) for rows in rng.choices(range(1, 300), k=200)]
    calm, disturbed = noted(usual), noted([*usual, (128, 5.0)])
    assert disturbed.after(0).max() <= SURPRISE * calm.after(0).max()
    assert disturbed.slope <= MOST_SLOPE


def test_prompts_beside_take_the_table_s_first_rows() -> None:
    times = PassTimes(TABLE)
    assert np.array_equal(times.after(100), TABLE[100:])
    assert len(times.after(5000)) == 1


def test_a_pass_beyond_the_table_says_nothing() -> None:
    assert np.array_equal(noted([(513, 9.0)]).after(0), TABLE)
