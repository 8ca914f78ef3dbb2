"""Presets on one loaded model, one after another, into one file of results; within a given time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import monotonic

from lookahead.bench.paper.options import BenchOptions
from lookahead.bench.run.models import Models
from lookahead.bench.run.pace import Pace, about_time
from lookahead.bench.run.results import Record, Results
from lookahead.bench.run.runner import Job, Runner
from lookahead.bench.run.summary import BenchRun


@dataclass(frozen=True)
class Part:
    """A preset of a series, the jobs that it lacks, and when it must stop."""

    options: BenchOptions
    jobs: list[Job]
    todo: list[Job]
    runner: Runner
    until: float | None

    @property
    def run(self) -> BenchRun:
        assert self.runner.results is not None, "a rank that follows has no results"
        return BenchRun(self.jobs, self.runner.results)

    def answers(self) -> Iterator[tuple[Job, Record]]:
        return self.runner.run(self.todo, self.until)

    @property
    def existing(self) -> str:
        """One line about what was measured before; empty without it."""
        done = len(self.jobs) - len(self.todo)
        left = self.runner.pace.left(self.todo)
        rest = f"; the others take {about_time(left)}" if left else ""
        return f"{done} of {len(self.jobs)} answers exist already{rest}" if done else ""

    def progress(self, number: int) -> str:
        """One line after `number` answers."""
        left = self.runner.pace.left(self.todo[number:])
        return f"{number} of {len(self.todo)} answers" + ("" if left is None else f", {about_time(left)} left")


class Series:
    """`results` None is a rank that follows. `until` is a time of `monotonic`: what is left until then is shared among
    the presets that are not done. `brief`: records as `Runner` makes them."""

    def __init__(
        self,
        runs: Sequence[BenchOptions],
        models: Models,
        results: Results | None,
        until: float | None = None,
        *,
        brief: bool = False,
    ) -> None:
        self.runs, self.until = runs, until
        self.jobs = [options.jobs(models.own.device.type) for options in runs]
        self.runners = [Runner(models, results, warm=options.starts_warm, brief=brief) for options in runs]
        self._results = results

    @property
    def plan(self) -> list[str]:
        """The amount of work of each preset. Presets share common answers, which are generated once."""
        found = []
        for options, jobs in zip(self.runs, self.jobs, strict=True):
            tokens = sum(job.max_tokens * len(job.prompt.turns) for job in jobs)
            found.append(f"{options.preset.name}: {len(jobs):,} answers, at most {tokens:,} new tokens")
        return found

    def parts(self) -> Iterator[Part]:
        for number, (options, jobs, runner) in enumerate(zip(self.runs, self.jobs, self.runners, strict=True)):
            todo, until = runner.agreed(jobs), self.until
            if until is not None and self._results is not None:
                later = zip(self.runners[number + 1 :], self.jobs[number + 1 :], strict=True)
                open_later = sum(bool(one.missing(own)) for one, own in later)
                until = monotonic() + (until - monotonic()) / (1 + open_later)
            yield Part(options, jobs, todo, runner, until)

    def to_go(self) -> str:
        """What is left, such as "3 of 8 answers to go, about 20 s"; empty if nothing is."""
        missing = [runner.missing(jobs) for runner, jobs in zip(self.runners, self.jobs, strict=True)]
        left = {job.key: job for jobs in missing for job in jobs}
        if not left:
            return ""
        every = {job.key: job for jobs in self.jobs for job in jobs}
        seconds = Pace(every.values(), self._results.records if self._results else {}).left(left.values())
        return f"{len(left)} of {len(every)} answers to go" + ("" if seconds is None else f", {about_time(seconds)}")
