"""How many draft tokens pay: what a curve makes of a config, equal shares, and the guard."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace

import pytest

from lookahead.algorithm.budget import FLAT, DraftGuard, equal_share, fit_config, weighing_curve, without_cost
from lookahead.algorithm.cost import CostCurve
from lookahead.algorithm.draft import Candidates, Limits
from lookahead.algorithm.search import PythonDrafter
from lookahead.algorithm.successors import SuccessorTables
from lookahead.config import LookaheadConfig
from lookahead.loading.timing import TIMED_SIZES

# What suits a machine.

DEFAULT = LookaheadConfig()


def curve(at_window: float, at_budget: float) -> CostCurve:
    """Times of the default's window (20 tokens) and budget (128), in units of one token's."""
    return CostCurve((1, 20, 128), (1.0, at_window, at_budget))


@pytest.mark.parametrize("end", [1.0, 1.1, FLAT])
def test_with_a_flat_curve_one_sequence_has_the_whole_budget_and_several_share_it(end: float) -> None:
    config = fit_config(DEFAULT, curve(1.0, end))
    assert replace(config, step_cost=None) == DEFAULT
    assert weighing_curve(config) is None
    assert [equal_share(config, sequences, pads=False) for sequences in (2, 8, 200)] == [64, 16, 1]


def test_a_steep_curve_goes_into_the_config_and_drops_the_window() -> None:
    cost = CostCurve((1, 2, 8), (0.05, 0.1, 0.12))
    config = fit_config(DEFAULT, cost)
    assert (config.window, config.budget, config.step_cost) == (0, 12, cost.table(12))
    assert config.adapted(window=5, budget=128, step_cost=None) == DEFAULT


@pytest.mark.parametrize(
    ("largest", "budget", "window"), [(1, 2, 0), (2, 3, 0), (16, 24, 5), (64, 96, 5), (128, 128, 5)]
)
def test_a_step_is_never_larger_than_times_are_known_for(largest: int, budget: int, window: int) -> None:
    """Times are extrapolated to the next size at most: who knows what 128 tokens cost, if 4 were measured."""
    sizes = [size for size in TIMED_SIZES if size <= largest]
    config = fit_config(DEFAULT, CostCurve(tuple(sizes), (1.0,) * len(sizes)))
    assert (config.budget, config.window) == (budget, window)
    steep = fit_config(DEFAULT, CostCurve(tuple(sizes), tuple(map(float, sizes))))
    assert steep.budget == budget
    assert steep.step_cost is None or len(steep.step_cost) == budget


@pytest.mark.parametrize(("at_window", "window"), [(1.0, 5), (1.09, 5), (1.11, 0)])
def test_a_window_that_is_nearly_free_stays(at_window: float, window: int) -> None:
    config = fit_config(DEFAULT, curve(at_window, 2.0))
    assert config.window == window
    assert weighing_curve(config) == config.step_cost is not None


def test_a_step_of_one_token_suits_every_machine() -> None:
    plain = LookaheadConfig.autoregressive()
    assert fit_config(plain, CostCurve((1, 2), (1.0, 9.0))) == plain


def test_the_curve_decides_how_many_draft_tokens_are_taken() -> None:
    taken = []
    for slope in (0.001, 0.1, 1.0):
        config = fit_config(DEFAULT, CostCurve((1, 101), (1.0, 1.0 + 100 * slope)))
        candidates = Candidates.after([1], array("d", [0.7]))
        candidates.add_chain([2] * 20, [0] * 20)
        taken.append(len(PythonDrafter().search(candidates, Limits(60, 60, weighing_curve(config))).tokens))
    assert taken[0] == 20 > taken[1] > taken[2] == 0


def test_recycled_draft_tokens_get_a_bonus() -> None:
    """A nearly flat step takes draft tokens with hardly a chance, if later ones are made from their successors."""
    taken, drafter = [], PythonDrafter()
    for slope in (0.001, 0.1):
        for recycled in (False, True):
            candidates = Candidates.after([1], array("d", [0.001] * 200))
            candidates.add_chain([2] * 20, [0] * 20)
            if recycled:
                candidates.tables = SuccessorTables(drafter.new_table(), drafter.new_table(), None, 0)
                for token in range(1, 5):
                    candidates.tables.own.put((token,), (3, 4, 0, 0))
            limits = Limits(60, 60, [1 + slope * k for k in range(100)])
            taken.append(len(drafter.search(candidates, limits).tokens))
    assert taken == [0, 60, 0, 0]


# Equal shares.


def test_an_equal_share_is_a_part_of_the_budget() -> None:
    alone = LookaheadConfig(window=0, budget=8)
    for pads in (False, True):
        assert [equal_share(alone, sequences, pads=pads) for sequences in (2, 9)] == [8, 8]
        shares = [equal_share(without_cost(alone), sequences, pads=pads) for sequences in (2, 3, 4, 8, 9)]
        assert shares == [4, 2, 2, 1, 1]


def test_an_equal_share_is_what_is_nearly_free() -> None:
    """Up to 8 rows a pass takes 1.0, from there on 0.05 more for each."""
    times = tuple(max(1.0, 1 + 0.05 * (size - 8)) for size in range(1, 65))
    config = LookaheadConfig(window=0, budget=64, step_cost=times)
    for pads in (False, True):
        shares = [equal_share(config, sequences, pads=pads) for sequences in (2, 4, 5, 8, 16, 64, 65)]
        assert shares == [5, 2, 2, 1, 1, 1, 1]  # of 10 rows in all, 1.1
    assert equal_share(replace(config, step_cost=times[:6]), 3, pads=True) == 2  # no more was measured


def test_only_padding_makes_a_share_of_a_flat_curve_smaller() -> None:
    times = tuple(1.0 + 0.3 * k / 127 for k in range(128))
    config = LookaheadConfig(window=0, budget=128, step_cost=times)
    assert (equal_share(config, 4, pads=False), equal_share(config, 4, pads=True)) == (32, 11)


# The guard.


def run(guard: DraftGuard, steps: int, drafted: Callable[[int], tuple[float, float]], plain: float = 1.0) -> list[bool]:
    """So many steps; `drafted` tells tokens and seconds of a step with draft tokens. Returns which steps had some."""
    had = []
    for number in range(steps):
        had.append(guard.drafts)
        guard.record(guard.drafts, *(drafted(number) if guard.drafts else (1.0, plain)))
    return had


def test_drafting_that_pays_goes_on() -> None:
    had = run(DraftGuard(), 400, lambda _: (1.5, 1.2))
    assert all(had[: DraftGuard.FIRST])
    assert had.count(False) <= 2 * (400 // DraftGuard.EVERY + 1)  # the comparisons


def test_drafting_that_clearly_pays_is_compared_once() -> None:
    had = run(DraftGuard(), 1000, lambda _: (DraftGuard.CLEAR * 1.5, 1.2))
    assert had.count(False) == 2


def test_drafting_that_does_not_pay_stops_and_is_tried_again() -> None:
    had = run(DraftGuard(), 3000, lambda _: (1.1, 1.5))
    assert had.count(True) < 0.1 * len(had)
    assert any(had[1500:])
    first = had.index(False)
    assert first <= DraftGuard.EVERY
    assert max(len(run) for run in "".join(map("PG".__getitem__, had)).split("G")) <= DraftGuard.LONGEST + 2


def test_a_text_that_changes() -> None:
    """It is dull at first; once drafting pays, it goes on again within a pause."""
    guard = DraftGuard()
    run(guard, 100, lambda _: (1.0, 1.5))
    assert any(run(guard, 4 * DraftGuard.SHORTEST, lambda _: (3.0, 1.5))[-DraftGuard.MIN_STEPS :])
    assert all(run(guard, DraftGuard.EVERY, lambda _: (3.0, 1.5))[-DraftGuard.MIN_STEPS :])


def test_steps_without_draft_tokens_of_their_own_count_as_plain() -> None:
    """Where no source had a draft token, nothing was lost either."""
    guard = DraftGuard()
    for _ in range(300):
        guard.record(False, 1.0, 1.0)
    assert guard.drafts or guard._compare
