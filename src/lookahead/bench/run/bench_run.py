"""One run as the reports see it: what was asked for, and what was measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lookahead.bench.run.jobs import Job
from lookahead.bench.run.models import Models
from lookahead.bench.run.prompts import Prompt
from lookahead.bench.run.results import Record, Results
from lookahead.bench.run.summary import Line, lines


@dataclass
class BenchRun:
    """`max_tokens` are the new tokens of an answer, by set. `step_cost` is a file that stands for a measured t(K)."""

    prompts: dict[str, list[Prompt]]
    jobs: list[Job]
    results: Results
    models: Models
    say: Callable[[str], None]
    max_tokens: dict[str, int]
    step_cost: Path | None = None
    shapes: tuple[str, ...] = ()

    @property
    def lines(self) -> list[Line]:
        return lines(self.jobs, self.results.records)

    def record(self, job: Job) -> Record | None:
        """The job's record, once it was answered without an error."""
        found = self.results.records.get(job.key)
        return None if found is None or "error" in found else found
