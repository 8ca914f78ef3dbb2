"""How long answers take, and what is left within a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lookahead.bench.run.methods import named
from lookahead.bench.run.models import Models
from lookahead.bench.run.pace import Pace, about_time
from lookahead.bench.run.prompts import Prompt
from lookahead.bench.run.results import Results
from lookahead.bench.run.runner import Job, Runner


def job(name: str, data: str = "builtin", tokens: int = 10, turns: int = 1, number: int = 0) -> Job:
    return Job(data, number, Prompt(f"{data}{number}", ("the quick fox",) * turns), named(name), tokens)


def test_a_slow_baseline_does_not_make_the_others_slow() -> None:
    pace = Pace()
    assert pace.seconds(job("lookahead")) is None
    assert pace.left([job("lookahead")]) is None
    pace.count(job("hf-greedy"), 30.0)
    assert pace.seconds(job("lookahead", tokens=20)) == 60.0, "by what is known: seconds per token that it may have"
    for seconds in (2.0, 4.0):
        pace.count(job("lookahead"), seconds)
    assert pace.left([job("lookahead", number=1), job("hf-greedy", number=1)]) == 33.0
    assert pace.seconds(job("lookahead", "mt-bench", tokens=20, turns=2)) == pytest.approx(12.0), "of another set"
    assert pace.left([]) == 0.0


def test_what_was_measured_before_counts() -> None:
    jobs = [job("lookahead", number=number) for number in range(3)]
    records: dict[str, Any] = {jobs[0].key: {"seconds": 2.0}, jobs[1].key: {"error": "no"}}
    assert Pace(jobs, records).left(jobs[1:]) == 4.0
    assert (about_time(12.4), about_time(700)) == ("about 12 s", "about 12 minutes")


def test_no_answer_begins_that_would_not_end_in_time(lm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("lookahead.bench.run.runner.monotonic", lambda: clock[0])
    run = Runner(Models(lm), Results(tmp_path / "r.jsonl"), brief=True)
    jobs = [job("autoregressive", tokens=2, number=number) for number in range(9)]
    timed, slow = Runner._timed, 10.0

    def slowly(self: Runner, one: Job, longest: int) -> Any:
        done = timed(self, one, longest)
        self.pace = Pace()
        self.pace.count(one, slow)
        clock[0] += slow
        return done

    monkeypatch.setattr(Runner, "_timed", slowly)
    done = list(run.run(run.agreed(jobs), until=39.0))
    assert len(done) == 3, "the fourth would end at 40"
    assert run.missing(jobs) == jobs[3:]
    assert all(
        set(record) >= {"hashes", "seconds"} and "tokens" not in record for record in run.results.records.values()
    )  # type: ignore[union-attr]
    assert len(list(run.run(run.agreed(jobs)))) == 6
