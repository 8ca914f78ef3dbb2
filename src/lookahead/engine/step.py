"""The states of a step: launched, running, finished. `Engine.begin` and `Engine.finish` lead from one to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lookahead.algorithm.verify import Verdict
from lookahead.backends.base import StepInput
from lookahead.engine.batch import ScheduledBatch
from lookahead.engine.logprobs import logprobs_of
from lookahead.engine.request import Event, Request, StepResult, Verifier


@dataclass(slots=True)
class LaunchedPass:
    """A pass that the backend is running: its inputs, and when it was launched."""

    batch: ScheduledBatch
    inputs: list[StepInput]
    time: float
    running: Any


@dataclass(slots=True)
class RunningStep:
    """A step that has begun: its first pass is running. `time` and the backend's `captures` are those at its begin."""

    batches: list[ScheduledBatch]
    time: float = 0.0
    captures: int = 0
    first: LaunchedPass | None = None

    @property
    def has_chunks(self) -> bool:
        """Whether a prompt chunk runs in this step. Accepted tokens that run again are none."""
        return any(
            scheduled.chunk and not scheduled.runs_again for batch in self.batches for scheduled in batch.requests
        )

    def is_one_pass(self, *, chains: bool) -> bool:
        """Whether this step is one forward pass. The chains of several sequences may have several widths."""
        return len(self.batches) == 1 and not (chains and len(self.batches[0].requests) > 1)


NO_STEP = RunningStep([])


@dataclass(slots=True)
class FinishedStep:
    """A finished step whose events have not been sent: accepted tokens, failed requests, and times."""

    accepted: list[tuple[StepResult, Verdict]]
    failed: list[tuple[Request, Exception]]
    absorb_seconds: float
    commit_seconds: float
    time: float

    def __bool__(self) -> bool:
        return bool(self.accepted or self.failed)

    @property
    def mean_tokens(self) -> float:
        """The mean number of tokens that a request got."""
        return sum(len(verdict.tokens) for _, verdict in self.accepted) / (len(self.accepted) + len(self.failed))

    def events(self) -> list[Event]:
        """The event of each request. Call it once: it also updates the requests' statistics."""
        events = []
        for result, verdict in self.accepted:
            request, tree = result.request, result.input.tree
            request.sequence.count_step(tree, verdict)
            times = result.times
            request.sequence.stats.count_times(
                times.propose,
                times.forward + self.commit_seconds,
                self.absorb_seconds + times.accept,
                self.time - request.begin,
            )
            event = Event(request, verdict.tokens, verdict.finish_reason, verdict.path, tree.size - tree.branch)
            if request.sequence.sampling.logprobs is not None:
                event.logprobs = logprobs_of(result, verdict, request.sequence.sampling.logprobs)
            if request.reports_steps:
                event.add_step_details(tree)
            events.append(event)
        return events + [Event(request, [], "error", error=reason) for request, reason in self.failed]


def verdicts_of(results: Sequence[StepResult]) -> list[Verdict | Exception | None]:
    """What each result accepted: by its request's verifier if it has one, otherwise as verified against the targets.

    If a verifier raises, all its requests get the exception.
    """
    verdicts = [result.accepted for result in results if result.request.verifier is None]
    if len(verdicts) == len(results):
        return verdicts
    verdicts = [result.accepted for result in results]
    groups: dict[Verifier, list[int]] = {}
    for index, verifier in enumerate([result.request.verifier for result in results]):
        if verifier is not None:
            groups.setdefault(verifier, []).append(index)
    for verifier, indices in groups.items():
        try:
            found: Sequence[Verdict | Exception] = verifier([results[index] for index in indices])
        except Exception as error:
            found = [error] * len(indices)
        for index, verdict in zip(indices, found, strict=True):
            verdicts[index] = verdict
    return verdicts
