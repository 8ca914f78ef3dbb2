"""The queue: whom it refuses, and when it says that there will be room."""

from __future__ import annotations

import pytest

from lookahead.serve.errors import ApiError
from lookahead.serve.limits import PATIENCE, RECENT, Queue


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def full(running: int, waiting: int) -> tuple[Queue, Clock]:
    clock = Clock()
    queue = Queue(running, waiting, clock)
    for _ in range(running + waiting):
        queue.enter(1)
    return queue, clock


def leave_and_enter(queue: Queue, clock: Clock, times: int, seconds: float) -> None:
    """One sequence leaves every so many seconds, and another takes its place."""
    for _ in range(times):
        clock.now += seconds
        queue.leave(10.0)
        queue.enter(1)


def test_a_refusal_says_how_long_to_wait() -> None:
    queue, clock = full(4, 8)
    leave_and_enter(queue, clock, 20, 2.5)
    with pytest.raises(ApiError, match="12 sequences run or wait, and it takes 12; try again in 3 s") as raised:
        queue.enter(1)
    assert raised.value.headers == {"Retry-After": "3"}
    assert queue.taken == 12


@pytest.mark.parametrize("seconds", [0.1, 1.0, 7.0])
@pytest.mark.parametrize("times", [1, 5, RECENT - 1, RECENT, 3 * RECENT])
def test_the_wait_is_that_of_the_current_rate(seconds: float, times: int) -> None:
    queue, clock = full(4, 100)
    leave_and_enter(queue, clock, times, seconds)
    for count in (1, 3, 40):
        assert queue.wait(count) == pytest.approx(max(1, count * seconds), abs=1)


def test_a_rate_that_changes_is_followed() -> None:
    queue, clock = full(4, 100)
    leave_and_enter(queue, clock, 200, 0.1)
    assert queue.wait(10) == 1
    leave_and_enter(queue, clock, RECENT, 3.0)
    assert queue.wait(10) == pytest.approx(30, abs=1)
    clock.now += RECENT * 3.0  # nobody leaves any more
    assert queue.wait(10) > 50
    clock.now += 1e6
    assert queue.wait(10) == PATIENCE


def test_before_any_has_left_the_durations_count() -> None:
    """The time in which the server had nothing to do is no rate."""
    clock = Clock()
    queue = Queue(2, 2, clock)
    assert queue.wait(1) == 1
    for _ in range(RECENT):
        queue.enter(1)
        clock.now += 500
        queue.leave(20.0)
    clock.now += 10_000
    queue.enter(4)
    assert queue.wait(1) == 10
    clock.now += 2
    queue.leave(20.0)
    queue.enter(1)
    assert queue.wait(2) == 4


def test_too_many_at_once_can_never_enter() -> None:
    with pytest.raises(ApiError, match="13 sequences in one request, and the server takes 12 in all") as raised:
        Queue(4, 8).enter(13)
    assert raised.value.status == 400
