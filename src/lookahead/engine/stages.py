"""A step on its way: launched, begun, settled, told. `Engine.begin` and `Engine.finish` take it that way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lookahead.algorithm.verify import Verdict
from lookahead.backends.base import StepInput
from lookahead.engine.logprobs import logprobs_of
from lookahead.engine.request import Event, Request, StepResult, Verifier
from lookahead.engine.scheduler import Pass


@dataclass(slots=True)
class Launched:
    """A pass that the backend runs: its inputs, and when it was launched."""

    one: Pass
    inputs: list[StepInput]
    time: float
    running: Any


@dataclass(slots=True)
class Begun:
    """A step that has begun: its passes, when it began, and the backend's `captures` then. The first pass runs."""

    passes: list[Pass]
    time: float = 0.0
    captures: int = 0
    first: Launched | None = None


NOT_BEGUN = Begun([])


@dataclass(slots=True)
class Settled:
    """A step of which nobody has been told yet: what was accepted, which requests failed, and what it took of time."""

    accepted: list[tuple[StepResult, Verdict]]
    failed: list[tuple[Request, Exception]]
    absorb_seconds: float
    commit_seconds: float
    time: float

    def __bool__(self) -> bool:
        return bool(self.accepted or self.failed)

    @property
    def mean_tokens(self) -> float:
        """How many tokens a request got, on average."""
        return sum(len(verdict.tokens) for _, verdict in self.accepted) / (len(self.accepted) + len(self.failed))

    def tell(self) -> list[Event]:
        """What the step gave each request. It is told once."""
        events = []
        for result, verdict in self.accepted:
            request, tree = result.request, result.input.tree
            request.sequence.count(tree, verdict)
            request.sequence.stats.count_times(
                result.propose_seconds,
                result.forward_seconds + self.commit_seconds,
                self.absorb_seconds + result.accept_seconds,
                self.time - request.begin,
            )
            event = Event(request, verdict.tokens, verdict.finish_reason, verdict.path, tree.size - tree.branch)
            if request.sequence.sampling.logprobs is not None:
                event.logprobs = logprobs_of(result, verdict, request.sequence.sampling.logprobs)
            if request.tells_steps:
                event.tell_step(tree)
            events.append(event)
        return events + [Event(request, [], "error", error=reason) for request, reason in self.failed]


def verdicts_of(results: Sequence[StepResult]) -> list[Verdict | Exception | None]:
    """What was accepted: as the requests' verifiers say, or else as is known from the targets.

    All requests of a verifier that raises have its exception.
    """
    verdicts = [result.accepted for result in results]
    if all(result.request.verifier is None for result in results):
        return verdicts
    groups: dict[Verifier, list[int]] = {}
    for place, result in enumerate(results):
        if result.request.verifier is not None:
            groups.setdefault(result.request.verifier, []).append(place)
    for verifier, places in groups.items():
        try:
            found: Sequence[Verdict | Exception] = verifier([results[place] for place in places])
        except Exception as error:
            found = [error] * len(places)
        for place, verdict in zip(places, found, strict=True):
            verdicts[place] = verdict
    return verdicts
