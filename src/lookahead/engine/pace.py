"""Whether guessing pays, found out from the times of the steps themselves.

The curve of step costs says what a step should take, and the sources' rates what it should give. Both can be wrong: the
machine was busy when the curve was measured, or a text is like nothing before it. `Pace` compares what steps with
guesses gave per second with what steps without gave, and stops guessing for a while where it does not pay.
"""

from __future__ import annotations

from collections import deque

KEPT = 16
"""Steps of each kind that are remembered."""
ENOUGH = 8
"""Steps with guesses after which they are judged."""
COMPARED = 2
"""Steps without guesses in a row, taken to compare with. The first one after others may find cold caches."""
EVERY, CLEAR = 64, 2.0
"""Comparisons are this many steps apart, and are left out while guessing gives so many times as many tokens."""
SHORTEST, LONGEST = 32, 512
"""Steps of a pause from guessing. It grows twice as long each time that guessing has not paid again."""


class Pace:
    """Judges the steps of one model at one batch size. It may live longer than a call."""

    def __init__(self) -> None:
        self._guessed: deque[tuple[float, float]] = deque(maxlen=KEPT)  # (tokens per sequence, seconds)
        self._plain: deque[tuple[float, float]] = deque(maxlen=KEPT)
        self._pause, self._paused = SHORTEST, 0
        self._compare, self._since = 0, EVERY - ENOUGH  # the first comparison comes early

    @property
    def guesses(self) -> bool:
        """Whether the next step should carry guesses."""
        return not self._paused and not self._compare

    def record(self, guessed: bool, tokens: float, seconds: float) -> None:
        """Learn from a step that gave each sequence this many tokens."""
        (self._guessed if guessed else self._plain).append((tokens, seconds))
        if self._paused:
            self._paused -= 1
            return
        if self._compare:
            self._compare -= 1
        self._since += 1
        if self._since >= EVERY and not self._is_clear():
            self._compare, self._since = COMPARED, 0
        if len(self._guessed) >= ENOUGH and self._plain and not self._compare:
            if rate(self._guessed) < rate(self._plain):
                self._paused, self._pause = self._pause, min(2 * self._pause, LONGEST)
                self._guessed.clear()
            elif len(self._guessed) == KEPT:
                self._pause = SHORTEST

    def _is_clear(self) -> bool:
        return bool(self._plain and self._guessed) and rate(self._guessed) > CLEAR * rate(self._plain)


def rate(steps: deque[tuple[float, float]]) -> float:
    """Tokens per second of these steps."""
    return sum(tokens for tokens, _ in steps) / max(1e-9, sum(seconds for _, seconds in steps))
