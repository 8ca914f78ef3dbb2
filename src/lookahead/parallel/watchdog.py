"""Detects which rank has died, stalled, left or failed, so that the others can report it and exit.

Twice a second every rank writes a heartbeat into the store: a counter, its current step, and its state ("run", "knows"
of a failure, "fail", "left"). It reads those of the others at the same time. Two background threads do this, so that
steps do not wait for it. The first rank that finds a failure writes it into the store, and all others report the same
text.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any

BEAT = 0.5
"""Seconds between two heartbeats."""
SUSPECT = 2.0
"""After a connection broke, seconds of silence after which a rank is blamed for it."""
GRACE = 5.0
"""Seconds for this program to notice the failure of another rank before the watchdog ends it."""
FAILED = 1
"""The exit code of such a program."""
NONE = b"-"
"""The value of the key "failure" while there is none."""


class RankError(RuntimeError):
    """Another rank has died, stalled, left or failed; the message names it."""


class Watchdog:
    """Writes this rank's heartbeats and evaluates those of the others.

    The decoding thread sets three fields: `step`, the number of exchanges so far (`per_step` of them make one step);
    `waiting`, the time since which it has waited for the others, or None; and `limit`, the number of seconds it may
    wait. `verdict` is the text of the failure, or None. `store_host` names the process that runs the store.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: float, store_host: str, per_step: int) -> None:
        self.rank, self.size, self.timeout, self.store_host = rank, size, timeout, store_host
        self.step, self._per_step = 0, per_step
        self.waiting: float | None = None
        self.limit = timeout
        self.suspicious = False
        self.verdict: str | None = None
        self._store = store
        self._state = "run"
        self._number = 0
        self._state_written = ""
        self._reported = False
        self._written: str | None = None
        self._gone: float | None = None
        self._since = monotonic()
        now = monotonic()
        self._last_read = now
        self._beats = [(0, 0, "run")] * size
        self._changed = [now] * size
        self._stop, self._wake = threading.Event(), threading.Event()
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._beat_loop, self._judge_loop)]
        for thread in self._threads:
            thread.start()

    # Called by the decoding thread.

    def fail(self, message: str) -> None:
        """Report to the others that this rank has failed."""
        self._state = "fail"
        self._reported = True
        self._decide(f"{self.name(self.rank)} failed after step {self._shown(self.step)}: {message}")
        self._until(lambda: self._written is not None, 2 * BEAT)

    def raise_verdict(self) -> None:
        """Raise RankError if there is a verdict. The rank that runs the store waits until the others have read it."""
        if self.verdict is None:
            return
        self._reported = True
        self._until(lambda: self._written is not None, 2 * BEAT)
        if self.store_host == self.name(self.rank):
            self._until(self._all_know, 2 * SUSPECT)
        raise RankError(self.verdict)

    def suspect(self) -> None:
        """After a connection broke, find the rank that caused it, and raise RankError.

        Returns if all ranks are still alive.
        """
        self.suspicious = True
        self._until(lambda: self.verdict is not None, SUSPECT + 4 * BEAT)
        if found := self._find_failure(monotonic()):
            self._decide(found)
        self.raise_verdict()
        self.suspicious = False

    def broken(self, error: Exception) -> None:
        """Raise RankError for a broken exchange, naming the rank that caused it if it can be found."""
        self.suspect()
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        self._decide(f"the exchange of step {self._shown(self.step)} broke, and all ranks still answer: {first:.200}")
        self.raise_verdict()

    def blame(self, ranks: list[int], what: str) -> None:
        """Raise RankError for ranks that took too long; `what` describes what they did not do."""
        self._decide(f"{self._names(ranks)} {what}")
        self.raise_verdict()

    def has_left(self, rank: int) -> bool:
        """Whether a rank has left the group, as a finished program does."""
        return self._beats[rank][2] == "left"

    def close(self) -> None:
        """Leave the group. The rank that runs the store waits a few seconds for the others to leave first."""
        if self._stop.is_set():
            return
        self._reported = True
        if self.verdict is None:
            self._state = "left"
            self._until(lambda: self._state_written == "left", 4 * BEAT)
            if self.store_host == self.name(self.rank):
                others = [rank for rank in range(self.size) if rank != self.rank]
                self._until(lambda: all(self._beats[rank][2] == "left" for rank in others), GRACE)
        self._stop.set()
        self._wake.set()
        for thread in self._threads:
            thread.join(BEAT)

    # The thread that writes and reads heartbeats. It may hang if the store does.

    def _beat_loop(self) -> None:
        try:
            while not self._stop.is_set():
                self._exchange_beats()
                self._wake.wait(BEAT)
                self._wake.clear()
        except Exception:  # the store is gone; `_find_failure` decides what that means
            self._gone = monotonic()

    def _exchange_beats(self) -> None:
        if self.verdict is not None and self._written is None:
            self._written = self._store.compare_set("failure", NONE.decode(), self.verdict).decode()
        state = "knows" if self.verdict is not None and self._state == "run" else self._state
        self._store.set(f"beat/{self.rank}", f"{self._number} {self._shown(self.step)} {state}")
        self._number, self._state_written = self._number + 1, state
        failure, *beats = self._store.multi_get(["failure", *[f"beat/{rank}" for rank in range(self.size)]])
        now = monotonic()
        self._last_read = now
        for rank, text in enumerate(beats):
            number, step, other = text.decode().split()
            if (int(number), int(step), other) != self._beats[rank]:
                self._beats[rank] = int(number), int(step), other
                self._changed[rank] = now
        if failure != NONE:
            self._written = failure.decode()
            self._decide(self._written)

    # The thread that evaluates them. It only reads fields, so that it never hangs.

    def _judge_loop(self) -> None:
        while not self._stop.wait(BEAT / 2):
            found = self._find_failure(monotonic())
            if found is not None:
                self._decide(found)
            if self.verdict is not None and not self._reported and monotonic() - self._since > GRACE:
                print(f"error: {self.verdict}", file=sys.stderr, flush=True)
                os._exit(FAILED)

    def _find_failure(self, now: float) -> str | None:
        """A description of the failure that this rank sees, or None."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        waited = now - self.waiting if self.waiting is not None else 0.0
        if self._gone is not None:
            left = self.store_host == self.name(0) and self._beats[0][2] == "left"
            end = "left" if left else "died"
            return None if left and not waited else f"{self.store_host} has {end}: its store is gone"
        if now - self._last_read > self.timeout:
            return f"{self.store_host} has given no sign of life for {now - self._last_read:.0f} s"
        silent = [rank for rank in others if self._beats[rank][2] != "left"]
        if silent:
            rank = min(silent, key=lambda rank: self._changed[rank])
            # Not `now`: while the store is silent, nothing is known about the others.
            quiet = self._last_read - self._changed[rank]
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
        """Set the verdict, unless there is one."""
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
        """Wait until `done()`, at most `seconds`, and exchange heartbeats faster meanwhile."""
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
