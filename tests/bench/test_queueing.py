"""The queueing simulation, against formulas that are known."""

from __future__ import annotations

import pytest
import queueing


def test_one_server_is_pollaczek_and_khinchine() -> None:
    """One slot: with answers of one length the mean wait is rho / 2 (1 - rho) service times, else twice as long."""
    arrivals = queueing.poisson(0.7, 60_000)
    for exactly, expected in ((True, 0.7 / 0.6), (False, 0.7 / 0.3)):
        load = queueing.Load(base=1.0, each=0.0, tokens=1, exactly=exactly, slots=1, queue=10**9)
        found = queueing.simulate(load, 1, arrivals)
        assert found["mean_wait"] == pytest.approx(expected, rel=0.06)
        assert found["refused"] == 0


def test_sequences_that_share_a_replica_get_slower() -> None:
    load = queueing.Load(base=0.0, each=0.01, tokens=10, slots=8)
    assert queueing.simulate(load, 1, [0.0])["mean"] == pytest.approx(0.1)
    assert queueing.simulate(load, 1, [0.0] * 4)["mean"] == pytest.approx(0.4)
    # The second comes when the first has half of its tokens: 5 tokens at half speed, then the rest of the second alone.
    found = queueing.simulate(load, 1, [0.0, 0.05])
    assert found["mean"] == pytest.approx((0.05 + 0.1 + 0.1 + 0.05) / 2)
    assert queueing.simulate(load, 4, [0.0] * 4)["p95"] <= 0.4


def test_measured_steps_are_joined_by_lines() -> None:
    load = queueing.Load(0.0, 0.0, points=((1, 1.0), (4, 2.5), (8, 3.5)))
    assert [load.step(n) for n in (1, 2, 4, 6, 8, 12)] == [1.0, 1.5, 2.5, 3.0, 3.5, 4.5]


def test_a_full_queue_refuses() -> None:
    load = queueing.Load(base=1.0, each=0.0, tokens=1, slots=2, queue=3)
    found = queueing.simulate(load, 2, [0.0] * 10)
    assert (found["replies"], found["refused"]) == (7, 3)


def test_more_requests_need_more_replicas() -> None:
    load = queueing.Load(base=0.004, each=0.0001, tokens=50, exactly=False, slots=8)
    few, many = (queueing.enough(load, part * load.capacity, 2.0, 30.0) for part in (0.5, 5.0))
    assert few == 1
    assert many >= 5
