"""Rows -> one line per set, temperature and method: medians over repeats, sums over prompts, and the identity check."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lookahead.bench.jobs import Job
from lookahead.bench.methods import Method
from lookahead.bench.results import Row

REFERENCES = ("hf-greedy", "autoregressive")
"""Greedy outputs are compared with the first of these that was run; sampled ones with our own autoregressive's."""


@dataclass(frozen=True)
class Compared:
    """A method against another, on the prompts that both answered: its speedup, and how many answers are the same."""

    speedup: float | None = None
    same: int = 0
    compared: int = 0

    @property
    def identity(self) -> str:
        return f"{self.same}/{self.compared}" if self.compared else "-"


@dataclass
class Line:
    """A method on a set, beside the reference and beside our own autoregressive decoding: the same engine, so what
    lookahead alone gains."""

    data: str
    method: Method
    temperature: float
    prompts: int = 0
    tokens: int = 0
    steps: int = 0
    step_tokens: int = 0
    seconds: float = 0.0
    first_ms: float = 0.0
    reference: Compared = Compared()
    own: Compared = Compared()
    errors: list[str] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)
    accepted_by_source: dict[str, int] = field(default_factory=dict)

    @property
    def compression(self) -> float:
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_step(self) -> float:
        return self.step_tokens / self.steps if self.steps else 0.0

    @property
    def gain(self) -> float | None:
        """Over our own autoregressive decoding if it was run, else over the reference."""
        return self.reference.speedup if self.own.speedup is None else self.own.speedup

    def record(self) -> dict[str, Any]:
        """For `--json`."""
        found = asdict(self)
        for name in ("method", "data", "reference", "own"):
            del found[name]
        return {
            "set": self.data,
            "method": self.method.label,
            **found,
            **asdict(self.reference),
            "own": asdict(self.own),
            "compression": self.compression,
            "tokens_per_second": self.tokens_per_second,
        }


Answers = dict[str, list[Row]]
"""A method's rows on a set, by prompt: one per repeat."""


def lines(jobs: Sequence[Job], rows: Mapping[str, Row]) -> list[Line]:
    """In the order of the jobs."""
    found: dict[tuple[str, float, Method], Answers] = {}
    errors: dict[tuple[str, float, Method], list[str]] = {}
    for job in jobs:
        place = job.data, job.temperature, job.method
        answers = found.setdefault(place, {})
        row = rows.get(job.key)
        if row is None:
            continue
        if "error" in row:
            errors.setdefault(place, []).append(row["error"])
        else:
            answers.setdefault(job.prompt.id, []).append(row)
    made = []
    for place, answers in found.items():
        line = _line(*place, answers, errors.get(place, []))
        line.reference = _compare(answers, _reference(found, *place))
        line.own = _compare(answers, _own(found, *place))
        made.append(line)
    return made


Found = Mapping[tuple[str, float, Method], Answers]


def _reference(found: Found, data: str, temperature: float, _: Method) -> Answers:
    for how in REFERENCES if not temperature else REFERENCES[1:]:
        for (other, warmth, method), answers in found.items():
            if (other, warmth, method.how) == (data, temperature, how) and method.dtype is None and answers:
                return answers
    return {}


def _own(found: Found, data: str, temperature: float, method: Method) -> Answers:
    """Our autoregressive decoding by the same engine: backend and dtype are the method's."""
    for (other, warmth, one), answers in found.items():
        same_place = (other, warmth, one.dtype, one.backend) == (data, temperature, method.dtype, method.backend)
        if same_place and one.how == "autoregressive" and one.ranks == 1:
            return answers
    return {}


def _line(data: str, temperature: float, method: Method, answers: Answers, errors: list[str]) -> Line:
    line = Line(data, method, temperature, prompts=len(answers), errors=errors)
    firsts = []
    for repeats in answers.values():
        first = repeats[0]
        line.tokens += first["generated_tokens"]
        line.steps += first["steps"]
        line.step_tokens += first["step_tokens"]
        line.seconds += median(repeats)
        firsts.append(statistics.median(row["first_token_seconds"] for row in repeats))
        for depth, count in enumerate(first["accepted_by_depth"]):
            line.accepted_by_depth += [0] * (depth + 1 - len(line.accepted_by_depth))
            line.accepted_by_depth[depth] += count
        for source, count in first["accepted_by_source"].items():
            line.accepted_by_source[source] = line.accepted_by_source.get(source, 0) + count
    line.first_ms = 1e3 * statistics.median(firsts) if firsts else 0.0
    return line


def _compare(answers: Answers, reference: Answers) -> Compared:
    ours = theirs = 0.0
    same = compared = 0
    for prompt, repeats in answers.items():
        if prompt in reference:
            first, expected = repeats[0], reference[prompt][0]
            compared += 1
            same += all(row["tokens"] == expected["tokens"] for row in repeats)
            # Seconds per token: where outputs differ, so may their lengths.
            ours += median(repeats) / max(1, first["generated_tokens"])
            theirs += median(reference[prompt]) / max(1, expected["generated_tokens"])
    return Compared(theirs / ours if ours else None, same, compared)


def median(repeats: Sequence[Row]) -> float:
    return float(statistics.median(row["seconds"] for row in repeats))
