"""Find out which rank has died, stalled, left or failed, so that the others can name it and end.

Twice a second every rank writes a beat into the store: a counter, the step it has come to, and its state ("run",
"knows" of a failure, "fail", "left"). It reads the beats of the others at the same time. Two threads beside the
decoding do this, so a step does not wait for it. The first rank that finds a failure writes it into the store, and all
others report the same text.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any

BEAT = 0.5
"""Seconds between two beats."""
SUSPECT = 2.0
"""After a connection has broken, a rank that has been silent for this many seconds is held to have broken it."""
GRACE = 5.0
"""If another rank has failed and this program does not notice within this many seconds, the watch ends it."""
FAILED = 1
"""The exit code of such a program."""
NONE = b"-"
"""What the store holds under "failure" while there is none."""


class RankError(RuntimeError):
    """Another rank has died, stalled, left or failed; the message names it."""


class Watch:
    """Writes this rank's beats and judges those of the others.

    The decoding thread sets three fields: `step`, the number of exchanges that this rank has come to (`per_step` of
    them make one step); `waiting`, the time since which it has waited for the others, or None; and `limit`, the number
    of seconds it may wait. `verdict` is the text of the failure, once there is one. `keeper` is who runs the store.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: float, keeper: str, per_step: int) -> None:
        self.rank, self.size, self.timeout, self.keeper = rank, size, timeout, keeper
        self.step, self._per_step = 0, per_step
        self.waiting: float | None = None
        self.limit = timeout
        self.suspicious = False
        self.verdict: str | None = None
        self._store = store
        self._state = "run"
        self._number = 0
        self._spoken = ""
        self._told = False
        self._written: str | None = None
        self._gone: float | None = None
        self._since = monotonic()
        now = monotonic()
        self._heard = now
        self._beats = [(0, 0, "run")] * size
        self._changed = [now] * size
        self._stop, self._wake = threading.Event(), threading.Event()
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._speak, self._judge)]
        for thread in self._threads:
            thread.start()

    # What the decoding thread asks for.

    def fail(self, message: str) -> None:
        """Tell the others that this rank has failed."""
        self._state = "fail"
        self._told = True
        self._decide(f"{self.name(self.rank)} failed after step {self._shown(self.step)}: {message}")
        self._until(lambda: self._written is not None, 2 * BEAT)

    def check(self) -> None:
        """Raise RankError if there is a verdict. The rank that runs the store first lets the others read it."""
        if self.verdict is None:
            return
        self._told = True
        self._until(lambda: self._written is not None, 2 * BEAT)
        if self.keeper == self.name(self.rank):
            self._until(self._all_know, 2 * SUSPECT)
        raise RankError(self.verdict)

    def suspect(self) -> None:
        """After a connection broke, wait until it is known which rank broke it, and raise RankError.

        Returns if all ranks still give signs of life.
        """
        self.suspicious = True
        self._until(lambda: self.verdict is not None, SUSPECT + 4 * BEAT)
        if found := self._look(monotonic()):
            self._decide(found)
        self.check()
        self.suspicious = False

    def broken(self, error: Exception) -> None:
        """Raise RankError for an exchange that broke: with the rank that broke it, if one can be found."""
        self.suspect()
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        self._decide(f"the exchange of step {self._shown(self.step)} broke, and all ranks still answer: {first:.200}")
        self.check()

    def blame(self, ranks: list[int], what: str) -> None:
        """Raise RankError for ranks that this one has waited for too long; `what` says for what."""
        self._decide(f"{self._names(ranks)} {what}")
        self.check()

    def has_left(self, rank: int) -> bool:
        """Whether a rank has left the group, as a program does that has come to its end."""
        return self._beats[rank][2] == "left"

    def close(self) -> None:
        """Leave the group. The rank that runs the store waits a few seconds for the others to leave first."""
        if self._stop.is_set():
            return
        self._told = True
        if self.verdict is None:
            self._state = "left"
            self._until(lambda: self._spoken == "left", 4 * BEAT)
            if self.keeper == self.name(self.rank):
                others = [rank for rank in range(self.size) if rank != self.rank]
                self._until(lambda: all(self._beats[rank][2] == "left" for rank in others), GRACE)
        self._stop.set()
        self._wake.set()
        for thread in self._threads:
            thread.join(BEAT)

    # The thread that writes and reads beats. It may hang if the store does.

    def _speak(self) -> None:
        try:
            while not self._stop.is_set():
                self._exchange_beats()
                self._wake.wait(BEAT)
                self._wake.clear()
        except Exception:  # the store is gone; `_look` decides what that means
            self._gone = monotonic()

    def _exchange_beats(self) -> None:
        if self.verdict is not None and self._written is None:
            self._written = self._store.compare_set("failure", NONE.decode(), self.verdict).decode()
        state = "knows" if self.verdict is not None and self._state == "run" else self._state
        self._store.set(f"beat/{self.rank}", f"{self._number} {self._shown(self.step)} {state}")
        self._number, self._spoken = self._number + 1, state
        failure, *beats = self._store.multi_get(["failure", *[f"beat/{rank}" for rank in range(self.size)]])
        now = monotonic()
        self._heard = now
        for rank, text in enumerate(beats):
            number, step, other = text.decode().split()
            if (int(number), int(step), other) != self._beats[rank]:
                self._beats[rank] = int(number), int(step), other
                self._changed[rank] = now
        if failure != NONE:
            self._written = failure.decode()
            self._decide(self._written)

    # The thread that judges. It only reads fields, so that it never hangs.

    def _judge(self) -> None:
        while not self._stop.wait(BEAT / 2):
            found = self._look(monotonic())
            if found is not None:
                self._decide(found)
            if self.verdict is not None and not self._told and monotonic() - self._since > GRACE:
                print(f"error: {self.verdict}", file=sys.stderr, flush=True)
                os._exit(FAILED)

    def _look(self, now: float) -> str | None:
        """What has gone wrong, as far as this rank can tell; None if nothing has."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        waited = now - self.waiting if self.waiting is not None else 0.0
        if self._gone is not None:
            left = self.keeper == self.name(0) and self._beats[0][2] == "left"
            return None if left and not waited else f"{self.keeper} has {'left' if left else 'died'}: its store is gone"
        if now - self._heard > self.timeout:
            return f"{self.keeper} has given no sign of life for {now - self._heard:.0f} s"
        silent = [rank for rank in others if self._beats[rank][2] != "left"]
        if silent:
            rank = min(silent, key=lambda rank: self._changed[rank])
            quiet = (
                self._heard - self._changed[rank]
            )  # not `now`: while the store is silent, nothing is known of the others
            if quiet > (SUSPECT if self.suspicious else self.timeout):
                where = f"step {self._shown(self.step)}" if self.step else "the start"
                return f"{self.name(rank)} has died or is stopped: no sign of life for {quiet:.0f} s, at {where}"
        here = f"the others wait at step {self._shown(self.step)}"
        if waited > 2 * BEAT:
            gone = [rank for rank in others if self._beats[rank][2] == "left"]
            if gone:
                return f"{self._names(gone)} left (the program has ended), and {here}"
        if waited > self.limit:
            behind = [rank for rank in others if self._beats[rank][1] < self.step]
            where = ", ".join(str(self._shown(self._beats[rank][1])) for rank in behind)
            who = self._names(behind) if behind else "no rank in particular"
            return f"{who} did not answer for {waited:.0f} s: at step {where}, and {here}"
        return None

    def _decide(self, verdict: str) -> None:
        """Set the verdict. The first one stands."""
        if self.verdict is None:
            self._since = monotonic()
            self.verdict = verdict

    def _all_know(self) -> bool:
        """Whether every other rank has read the verdict, or is silent."""
        now = monotonic()
        return all(
            beat[2] in ("knows", "left", "fail") or now - self._changed[rank] > SUSPECT
            for rank, beat in enumerate(self._beats)
            if rank != self.rank
        )

    def _until(self, done: Callable[[], bool], seconds: float) -> None:
        """Wait until `done()`, at most this many seconds, and exchange beats faster meanwhile."""
        end = monotonic() + seconds
        while not done() and monotonic() < end and self._gone is None:
            self._wake.set()
            sleep(0.02)

    def _shown(self, exchange: int) -> int:
        """The number of the step that an exchange belongs to."""
        return -(-exchange // self._per_step)

    def name(self, rank: int) -> str:
        return f"rank {rank}"

    def _names(self, ranks: list[int]) -> str:
        return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
