"""Records -> one line per set, temperature and method: medians over repeats, sums over prompts, and identity."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from lookahead.bench.run.intervals import Interval, ratio_interval
from lookahead.bench.run.methods import Method
from lookahead.bench.run.results import Record, Results, same
from lookahead.bench.run.runner import Job
from lookahead.stats import Stats

REFERENCES = ("hf-greedy", "autoregressive")
"""Greedy outputs are compared with the first of these that was run; sampled ones with our own autoregressive's."""


@dataclass(frozen=True)
class Compared:
    """A method against another, on the prompts that both answered: its speedup with its 95% interval, and how many
    answers are the same."""

    speedup: float | None = None
    interval: Interval | None = None
    same: int = 0
    compared: int = 0

    @property
    def identity(self) -> str:
        return f"{self.same}/{self.compared}" if self.compared else "-"


@dataclass
class Line:
    """A method on a set: its counters, summed over prompts, and how it compares. `counts` are the tokens and steps of
    each prompt.

    `reference` compares with transformers' greedy search, `own` with our autoregressive decoding, which runs on the
    same engine: what lookahead alone gains.
    """

    data: str
    method: Method
    temperature: float
    prompts: int = 0
    stats: Stats = field(default_factory=Stats)
    first_ms: float = 0.0
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)
    reference: Compared = Compared()
    own: Compared = Compared()
    errors: list[str] = field(default_factory=list)

    @property
    def compression(self) -> float:
        return self.stats.compression

    @property
    def s_interval(self) -> Interval | None:
        """The 95% interval of S."""
        return ratio_interval(list(self.counts.values()))

    @property
    def gain(self) -> float | None:
        """Over our own autoregressive decoding if it was run, else over the reference."""
        return self.reference.speedup if self.own.speedup is None else self.own.speedup

    def record(self) -> dict[str, Any]:
        counted = ("steps", "step_tokens", "seconds", "accepted_by_depth", "accepted_by_source")
        rates = ("compression", "tokens_per_second")
        return {
            "set": self.data,
            "method": self.method.label,
            **{name: getattr(self, name) for name in ("temperature", "prompts", "first_ms", "errors")},
            "tokens": self.stats.generated_tokens,
            **{name: getattr(self.stats, name) for name in (*counted, *rates)},
            "s_interval": self.s_interval,
            **asdict(self.reference),
            "own": asdict(self.own),
        }


Answers = dict[str, list[Record]]
"""A method's records on a set, by prompt: one per repeat."""
Cell = tuple[str, float, Method]
"""Set, temperature and method."""


def lines(jobs: Sequence[Job], records: Mapping[str, Record]) -> list[Line]:
    found: dict[Cell, Answers] = {}
    errors: dict[Cell, list[str]] = {}
    for job in jobs:
        cell = job.data, job.temperature, job.method
        answers = found.setdefault(cell, {})
        record = records.get(job.key, {})
        if "error" in record:
            errors.setdefault(cell, []).append(record["error"])
        elif record:
            answers.setdefault(job.prompt.id, []).append(record)
    made = []
    for cell, answers in found.items():
        line = _line(cell, answers, errors.get(cell, []))
        line.reference = _compare(answers, _reference(found, cell))
        method = cell[2]  # our autoregressive decoding by the same engine: backend and dtype are the method's
        line.own = _compare(answers, _answers(found, cell, "autoregressive", method.dtype, method.backend, 1))
        made.append(line)
    return made


def _reference(found: Mapping[Cell, Answers], cell: Cell) -> Answers:
    hows = REFERENCES if not cell[1] else REFERENCES[1:]
    return next((answers for how in hows if (answers := _answers(found, cell, how, None))), {})


def _answers(found: Mapping[Cell, Answers], cell: Cell, *wanted: Any) -> Answers:
    """The answers on the same set of the first method with this how, dtype, backend and ranks, those that are given."""
    for (data, temperature, one), answers in found.items():
        if (data, temperature) == cell[:2] and (one.how, one.dtype, one.backend, one.ranks)[: len(wanted)] == wanted:
            return answers
    return {}


def _line(cell: Cell, answers: Answers, errors: list[str]) -> Line:
    data, temperature, method = cell
    names = [one.name for one in fields(Stats)]
    stats = Stats.total(
        Stats(**{name: repeats[0][name] for name in names if name in repeats[0]}) for repeats in answers.values()
    )
    stats.seconds = sum(map(seconds_of, answers.values()))
    firsts = [statistics.median(one["first_token_seconds"] for one in repeats) for repeats in answers.values()]
    first_ms = 1e3 * statistics.median(firsts) if firsts else 0.0
    counts = {prompt: (repeats[0]["generated_tokens"], repeats[0]["steps"]) for prompt, repeats in answers.items()}
    return Line(data, method, temperature, len(answers), stats, first_ms, counts, errors=errors)


def _compare(answers: Answers, reference: Answers) -> Compared:
    paces, equal, compared = list[tuple[float, float]](), 0, 0
    for prompt, repeats in answers.items():
        if prompt in reference:
            first, expected = repeats[0], reference[prompt][0]
            compared += 1
            equal += all(same(one, expected) for one in repeats)
            # Seconds per token: where outputs differ, so may their lengths.
            ours = seconds_of(repeats) / max(1, first["generated_tokens"])
            paces.append((seconds_of(reference[prompt]) / max(1, expected["generated_tokens"]), ours))
    theirs, ours = (sum(values) for values in zip(*paces, strict=True)) if paces else (0.0, 0.0)
    return Compared(theirs / ours if ours else None, ratio_interval(paces), equal, compared)


def seconds_of(repeats: Sequence[Record]) -> float:
    return float(statistics.median(one["seconds"] for one in repeats))


@dataclass
class BenchRun:
    """What was asked for, and what was measured."""

    jobs: list[Job]
    results: Results

    @property
    def lines(self) -> list[Line]:
        return lines(self.jobs, self.results.records)

    @property
    def runs(self) -> list[tuple[Record, int]]:
        """The facts of the runs that gave these answers, and how many each gave."""
        results = self.results
        counts = Counter(results.run_of[job.key] for job in self.jobs if job.key in results.run_of)
        return [(results.runs[number], counts[number]) for number in sorted(counts)]

    @property
    def split_prompts(self) -> tuple[int, int]:
        """How many prompts have answers of more than one run, and how many have answers."""
        found: dict[tuple[str, str], set[int]] = {}
        for job in self.jobs:
            if job.key in self.results.run_of:
                found.setdefault((job.data, job.prompt.id), set()).add(self.results.run_of[job.key])
        return sum(len(runs) > 1 for runs in found.values()), len(found)

    def record(self, job: Job) -> Record | None:
        found = self.results.records.get(job.key)
        return None if found is None or "error" in found else found
