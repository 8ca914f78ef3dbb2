"""The engine's input and output: requests and events. The engine knows token ids, but no text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lookahead.algorithm.output import StepOutput
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.sources import source_of
from lookahead.algorithm.tree import TokenTree
from lookahead.algorithm.verify import Verdict
from lookahead.backends.base import StepInput
from lookahead.config import SamplingParams


@dataclass(eq=False, slots=True)
class Request:
    """One sequence in the engine.

    `verifier` is for rules that need the text so far and the logits, such as transformers' logits processors. `slot` is
    the backend's handle for the K/V; the engine opens one when it admits the request. A request submitted with a slot,
    which may already hold the K/V of its first tokens, keeps it to its end and shares it with no other. `noise` draws
    the tokens instead of the sequence's uniforms. `mask` restricts the tokens, for grammars. `finished` is called
    when the sequence has ended, before its K/V are freed. `begin` is the time from which `stats.seconds` counts. Only
    requests with the same `salt` share the K/V of a common prefix; `cached` is how many tokens were cached when the
    request was last admitted, `inexact` whether its trees may be too large or too deep to be exact, and `plain` whether
    the backend alone can choose its tokens, from logits as they are (all three are set by the scheduler). With
    `reports_steps` an event has the time of its step and the sources of its accepted tokens, and the events of the next
    `trees` steps also have the step's tree. `recipe` is the data from which other
    ranks build the same request (see `parallel.leader`); the engine does not use it.
    """

    sequence: DecodingSequence
    verifier: Verifier | None = None
    noise: Noise | None = None
    mask: TokenMask | None = None
    slot: int = -1
    finished: Callable[[Request], None] | None = None
    begin: float = field(default_factory=perf_counter)
    salt: str = ""
    id: int = -1
    queued_at: float = 0.0
    keeps_slot: bool = False
    inexact: bool = False
    plain: bool = False
    cached: int = 0
    reports_steps: bool = False
    trees: int = 0
    recipe: Any = None


@dataclass(slots=True)
class PassTimes:
    """How long the stages of a forward pass took, the two of the host per request."""

    propose: float = 0.0
    forward: float = 0.0
    accept: float = 0.0


@dataclass(slots=True)
class StepResult:
    """A request's result of a forward pass: its input, its output, and the times of the pass.

    `accepted` is what its targets confirm, before stop rules are applied, or the exception that verifying raised; None
    if it has not been verified. It is created while the device runs, and its output and `accepted` are set later.
    """

    request: Request
    input: StepInput
    output: StepOutput
    accepted: Verdict | Exception | None = None
    times: PassTimes = field(default_factory=PassTimes)


class Noise(Protocol):
    """Draws tokens as `torch.multinomial` does, with noise that the backend holds (see `StepInput.noise`)."""

    sampling: SamplingParams

    def rows(self, tree: TokenTree) -> Sequence[int]:
        """The row of the backend's noise for each needed node of the tree, filled before; -1 for the argmax."""
        ...

    def draw_ahead(self) -> None:
        """Fill lines that the next tree may need, while the device runs the current step."""
        ...


class TokenMask(Protocol):
    """The tokens that a request may choose. It follows the text: `accept` gets every accepted token once, in order."""

    def rows(self, tree: TokenTree, sequence: DecodingSequence) -> npt.NDArray[np.uint32] | None:
        """The allowed tokens after each needed node of the tree, or None if all are allowed after all of them.

        uint32 [len(tree.needed), ceil(V / 32)]: bit t % 32 of word t // 32 says whether token t is allowed. The tree's
        root is the last token of the text. The mask walks the draft tokens below it itself (`tree.draft_children`;
        `tree.needed_index` is the row of one). Only the root's row must allow some token. The rows of the window, and
        those below a draft token that is not allowed itself, are ignored: no such draft token is accepted.
        """
        ...

    def accept(self, tokens: Sequence[int]) -> None:
        """Add the tokens that a step accepted."""
        ...


Verifier = Callable[[Sequence[StepResult]], list[Verdict]]
"""Verifies a step instead of `DecodingSequence.verify` (see `processors`). Requests that must step together share one
verifier, which is called once with all their results."""


@dataclass(slots=True)
class TokenLogprobs:
    """The log-probability of an accepted token, and the likeliest tokens at its position with theirs, best first.

    They are those of the model's logits, before penalties, bias, mask and temperature.
    """

    logprob: float
    top: list[tuple[int, float]]


@dataclass(slots=True)
class Event:
    """A request's result of a step: accepted tokens, the nodes of accepted draft tokens, and how many were tried.

    `finish_reason` is None while the request continues. It is "error" if proposing or verifying raised `error`.
    `logprobs` aligns with the tokens, and is None unless the request's sampling has `logprobs`. `seconds` (since the
    request's begin), `sources` (of the accepted draft tokens) and `tree` are set only if the request `reports_steps`.
    """

    request: Request
    tokens: list[int]
    finish_reason: str | None
    path: Sequence[int] = ()
    tried: int = 0
    error: Exception | None = None
    logprobs: list[TokenLogprobs] | None = None
    seconds: float = 0.0
    sources: Sequence[str] = ()
    tree: TokenTree | None = None

    @property
    def accepted(self) -> int:
        """How many of the tried draft tokens were accepted."""
        return len(self.path)

    def add_step_details(self, tree: TokenTree) -> None:
        """Set the fields of a request that `reports_steps`."""
        request = self.request
        self.seconds = request.sequence.stats.seconds
        self.sources = [source_of(tree.origins[node - tree.branch]) for node in self.path]
        if request.trees > 0:
            request.trees -= 1
            self.tree = tree


def raise_errors(events: Sequence[Event]) -> Sequence[Event]:
    """Return the events, or raise the error of one that has failed."""
    for event in events:
        if event.error is not None:
            raise event.error
    return events
