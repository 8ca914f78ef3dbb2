"""What goes into the engine and comes out of it: requests and events. The engine knows token ids, but no text."""

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

    `verifier` is for rules that look at the text so far, such as a repetition penalty. `slot` is the backend's handle
    for the K/V; the engine opens one, unless the caller gives a slot that already holds the K/V of the first tokens.
    `finished` is called when the sequence has ended, before its K/V are freed. `begin` is the time from which
    `stats.seconds` counts.
    """

    sequence: DecodingSequence
    verifier: Verifier | None = None
    slot: int = -1
    finished: Callable[[Request], None] | None = None
    begin: float = field(default_factory=perf_counter)
    id: int = -1


@dataclass(slots=True)
class StepResult:
    """One request's part of a step that has run: its input and its output."""

    request: Request
    input: StepInput
    output: StepOutput


Verifier = Callable[[Sequence[StepResult]], list[Verdict]]
"""Verifies a step in place of `DecodingSequence.verify` (see `processors`). Requests that must move together share one
verifier, which is called once with all their results."""


@dataclass(slots=True)
class Event:
    """What a step gave one request: the accepted tokens, and the nodes of the accepted guesses.

    `finish_reason` is None while the request continues."""

    request: Request
    tokens: list[int]
    finish_reason: str | None
    path: Sequence[int] = ()
