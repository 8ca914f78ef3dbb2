"""Pace: guessing goes on where it pays, pauses where it does not, and is tried again."""

from __future__ import annotations

from collections.abc import Callable

from lookahead.engine.pace import CLEAR, ENOUGH, EVERY, LONGEST, SHORTEST, Pace


def run(pace: Pace, steps: int, guessed: Callable[[int], tuple[float, float]], plain: float = 1.0) -> list[bool]:
    """So many steps; `guessed` tells tokens and seconds of a step with guesses. Returns which steps had some."""
    had = []
    for number in range(steps):
        had.append(pace.guesses)
        pace.record(pace.guesses, *(guessed(number) if pace.guesses else (1.0, plain)))
    return had


def test_guessing_that_pays_goes_on() -> None:
    had = run(Pace(), 400, lambda _: (1.5, 1.2))
    assert all(had[:ENOUGH])
    assert had.count(False) <= 2 * (400 // EVERY + 1)  # the comparisons


def test_guessing_that_clearly_pays_is_compared_once() -> None:
    had = run(Pace(), 1000, lambda _: (CLEAR * 1.5, 1.2))
    assert had.count(False) == 2


def test_guessing_that_does_not_pay_stops_and_is_tried_again() -> None:
    had = run(Pace(), 3000, lambda _: (1.1, 1.5))
    assert had.count(True) < 0.1 * len(had)
    assert any(had[1500:])
    first = had.index(False)
    assert first <= EVERY
    assert max(len(run) for run in "".join(map("PG".__getitem__, had)).split("G")) <= LONGEST + 2


def test_a_text_that_changes() -> None:
    """It is dull at first; once guessing pays, it goes on again within a pause."""
    pace = Pace()
    run(pace, 100, lambda _: (1.0, 1.5))
    assert any(run(pace, 4 * SHORTEST, lambda _: (3.0, 1.5))[-ENOUGH:])
    assert all(run(pace, EVERY, lambda _: (3.0, 1.5))[-ENOUGH:])


def test_steps_without_guesses_of_their_own_count_as_plain() -> None:
    """Where no source had a guess, nothing was lost either."""
    pace = Pace()
    for _ in range(300):
        pace.record(False, 1.0, 1.0)
    assert pace.guesses or pace._compare
