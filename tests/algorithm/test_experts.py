"""What a mixture's pass costs: learned from the experts that its passes read."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lookahead.algorithm.cost import CostCurve, PassCost
from lookahead.algorithm.experts import PRIOR_SPREAD, ExpertCost, seconds_per_expert

TOTAL, ONE = 1280, 80.0
SIZES = (1, 2, 4, 8, 16, 32, 64)
EACH, BASE = 1e-6, 1e-3


def independent(rows: float) -> float:
    """The experts that this many rows read, if they choose on their own."""
    return TOTAL * (1 - (1 - ONE / TOTAL) ** rows)


def seconds(reads: float) -> float:
    return BASE + EACH * reads


def curve() -> CostCurve:
    """Measured on random tokens, which choose on their own."""
    reads = tuple(independent(size) for size in SIZES)
    return CostCurve(SIZES, tuple(map(seconds, reads)), reads=reads, experts=TOTAL)


def cost() -> PassCost:
    return PassCost(curve().table(64), curve().expert_cost(64))


def test_the_time_of_an_expert_is_found() -> None:
    made = curve()
    assert seconds_per_expert(made.sizes, made.seconds, made.reads) == pytest.approx(EACH)
    assert seconds_per_expert((1, 2), (2.0, 1.0), (8.0, 16.0)) == 0
    assert seconds_per_expert((1,), (1.0,), (8.0,)) == 0


@pytest.mark.parametrize("spread", [0.0, 0.5, 0.7, 1.0])
def test_the_text_s_own_spread_is_learned(spread: float) -> None:
    """From passes of 4 and 16 rows; the sizes between and around them follow."""
    experts = curve().expert_cost(64)
    assert experts is not None
    for _ in range(300):
        for rows in (4, 16):
            experts.record(rows, independent(rows**spread))
    expected = experts.expected()
    assert expected[0] == pytest.approx(ONE)
    for rows in (2, 4, 8, 16, 64):
        assert expected[rows - 1] == pytest.approx(independent(rows**spread), rel=0.02)


def test_without_a_pass_rows_share_some_experts() -> None:
    experts = curve().expert_cost(64)
    assert experts is not None
    assert experts.expected()[15] == pytest.approx(independent(16**PRIOR_SPREAD))


@pytest.mark.parametrize("reads", [0.0, TOTAL, 0.99 * TOTAL, 5 * TOTAL])
def test_passes_that_tell_nothing_are_not_counted(reads: float) -> None:
    """Nothing read, as on a backend that does not count; all read; more than there are, after another engine's pass."""
    experts = ExpertCost(TOTAL, [ONE, 2 * ONE], EACH)
    experts.record(8, reads)
    experts.record(1, ONE)
    assert experts.expected().tolist() == ExpertCost(TOTAL, [ONE, 2 * ONE], EACH).expected().tolist()


def test_a_pass_costs_what_its_text_reads() -> None:
    """A text whose rows share all their experts makes rows nearly free; others are as dear as measured."""
    shared, apart = cost(), cost()
    for _ in range(200):
        for rows in (1, 8, 32):
            shared.record_pass(rows, seconds(ONE), ONE)
            apart.record_pass(rows, seconds(independent(rows)), independent(rows))
    assert shared.seconds(32) == pytest.approx(seconds(ONE), rel=0.02)
    assert apart.seconds(32) == pytest.approx(seconds(independent(32)), rel=0.02)
    assert shared.seconds(1) == pytest.approx(apart.seconds(1), rel=0.02)
    assert bool((np.diff(apart.table) >= 0).all())


def test_a_pass_s_own_reads_explain_its_time() -> None:
    """Times that scatter because of the experts do not change the line through them."""
    made = cost()
    for turn in range(400):
        reads = independent(16 ** (0.5 + 0.4 * math.sin(turn)))
        made.record_pass(16, seconds(reads), reads)
    assert made.slope == pytest.approx(1.0, abs=0.05)
    assert made.constant == pytest.approx(0.0, abs=0.05 * BASE)


def test_curves_keep_their_experts() -> None:
    made = curve()
    assert made.with_faster(CostCurve(SIZES, (1.0,) * len(SIZES))).reads == made.reads
    assert made.across(2).experts == TOTAL
    with pytest.raises(ValueError, match="experts of each size, not 2 for 1"):
        CostCurve((1,), (1.0,), reads=(1.0, 2.0), experts=4)
