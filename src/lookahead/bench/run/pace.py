"""How long answers take: what is left of a run, and whether one more answer fits into its time."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from lookahead.bench.run.results import Record

if TYPE_CHECKING:
    from lookahead.bench.run.runner import Job

WARM_UP_ANSWERS = 2
"""A method that has not run yet needs the time of this many answers for its first: it is warmed up by another one."""


class Pace:
    """Seconds of answers so far, by set, temperature and method; where there are none, by method, or by all of them,
    per token that an answer may have."""

    def __init__(self, jobs: Iterable[Job] = (), records: Mapping[str, Record] | None = None) -> None:
        self._sums: dict[Hashable, tuple[float, int, int]] = {}  # seconds, answers, tokens that they might have had
        for job in jobs:
            record = (records or {}).get(job.key, {})
            if "seconds" in record:
                self.count(job, record["seconds"])

    def count(self, job: Job, seconds: float) -> None:
        for cell in _cells(job):
            before = self._sums.get(cell, (0.0, 0, 0))
            self._sums[cell] = before[0] + seconds, before[1] + 1, before[2] + _tokens(job)

    def seconds(self, job: Job) -> float | None:
        """What an answer will take; None before the first of all."""
        same, *others = _cells(job)
        if same in self._sums:
            return self._sums[same][0] / self._sums[same][1]
        found = next((self._sums[cell] for cell in others if cell in self._sums), None)
        return None if found is None else found[0] / found[2] * _tokens(job)

    def left(self, jobs: Iterable[Job]) -> float | None:
        """What these answers will take."""
        each = [self.seconds(job) for job in jobs]
        return None if None in each else sum(seconds or 0.0 for seconds in each)


def _cells(job: Job) -> Sequence[Hashable]:
    return (job.data, job.temperature, job.method), job.method, None


def _tokens(job: Job) -> int:
    return job.max_tokens * len(job.prompt.turns)


def about_time(seconds: float) -> str:
    """As it is said of a run: "about 12 minutes"."""
    return f"about {seconds:.0f} s" if seconds < 100 else f"about {seconds / 60:.0f} minutes"
