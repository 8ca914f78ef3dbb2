"""A request as the engine knows it: a sequence on its way, by an id. The engine knows nothing of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.tree import StepOutput
from lookahead.algorithm.verify import Verdict
from lookahead.backends.base import StepInput


@dataclass(eq=False, slots=True)
class Request:
    """One sequence on its way through the engine.

    `verifier` is for rules that look at the text so far, such as a repetition penalty. `slot` is the backend's; a given
    one may hold the K/V of the sequence's first tokens already. `finished` is called when the sequence has ended, while
    the backend still holds its K/V. `begin` is when its clock started.
    """

    sequence: DecodingSequence
    verifier: Verifier | None = None
    slot: int = -1
    finished: Callable[[Request], None] | None = None
    begin: float = field(default_factory=perf_counter)
    id: int = -1


@dataclass(slots=True)
class StepResult:
    """One request's part of a step that ran: what went in, what came out."""

    request: Request
    input: StepInput
    output: StepOutput


Verifier = Callable[[Sequence[StepResult]], list[Verdict]]
"""Verifies a step from its logits, in place of the sequences themselves (see `processors`). Requests that must move
together share one verifier, which is then called with all of them."""


@dataclass(slots=True)
class Event:
    """What a step gave one request: a whole accepted block. `finish_reason` is None while the request goes on."""

    request: Request
    tokens: list[int]
    finish_reason: str | None
