"""What goes into the engine and comes out of it: requests and events. The engine knows token ids, but no text."""

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
    """One sequence on its way through the engine.

    `verifier` is for rules that need the text so far and the logits, such as transformers' processors. `slot` is the
    backend's handle for the K/V: the engine opens one when the request's turn comes. A request that comes with a slot,
    which may already hold the K/V of its first tokens, keeps it to its end, and never shares it. `noise` draws the
    tokens in place of the sequence's uniforms. `mask` says which tokens may be chosen, for grammars. `finished` is
    called when the sequence has ended, before its K/V are freed. `begin` is the time from which `stats.seconds` counts.
    Only requests with the same `salt` share the K/V of a common beginning: `cached` tokens were there when the request
    was last admitted. With `reports_steps` its events say when their step ended and which sources were right, and those
    of its next `trees` steps carry the step's tree. `recipe` is what other ranks make the same request from, if it has
    to run on several (see `parallel.leader`); the engine does not look at it.
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
    queued: float = 0.0
    keeps_slot: bool = False
    cached: int = 0
    reports_steps: bool = False
    trees: int = 0
    recipe: Any = None


@dataclass(slots=True)
class StepResult:
    """One request's part of a step that has run: its input, its output, and how long each stage took.

    `accepted` is what its targets confirm, before any rule may end it, or why that cannot be told; None if nobody has
    looked.
    """

    request: Request
    input: StepInput
    output: StepOutput
    accepted: Verdict | Exception | None = None
    propose_seconds: float = 0.0
    forward_seconds: float = 0.0
    accept_seconds: float = 0.0


class Noise(Protocol):
    """Draws tokens as `torch.multinomial` does, with noise that the backend holds (see `StepInput.noise`)."""

    sampling: SamplingParams

    def lines(self, tree: TokenTree) -> Sequence[int]:
        """The lines of noise of the tree's needed nodes, filled, or -1 for the argmax."""
        ...

    def draw_ahead(self) -> None:
        """Fill lines that the next tree may need, while the device runs the last one's step."""
        ...


class TokenMask(Protocol):
    """Says which tokens a request may choose. It follows the text: it is told every accepted token once, in order."""

    def rows(self, tree: TokenTree, sequence: DecodingSequence) -> npt.NDArray[np.uint32] | None:
        """The allowed tokens after each needed node of the tree, or None if all are allowed after all of them.

        uint32 [len(tree.needed), ceil(V / 32)]: bit t % 32 of word t // 32 says whether token t is allowed. The tree's
        root is the last token of the text. The object walks the guesses below it by itself (`tree.guesses_below`;
        `tree.place` tells a guess's row). Only the root's row must allow some token. What stands in the rows of the
        window, and below a guess that is not allowed itself, does not matter: no such guess is accepted.
        """
        ...

    def accept(self, tokens: Sequence[int]) -> None:
        """Take the tokens that a step accepted."""
        ...


Verifier = Callable[[Sequence[StepResult]], list[Verdict]]
"""Verifies a step in place of `DecodingSequence.verify` (see `processors`). Requests that must move together share one
verifier, which is called once with all their results."""


@dataclass(slots=True)
class TokenLogprobs:
    """The log-probability of an accepted token, and the likeliest tokens in its place with theirs, best first.

    They are the model's own: of its logits, before penalties, bias, mask and temperature.
    """

    logprob: float
    top: list[tuple[int, float]]


@dataclass(slots=True)
class Event:
    """What a step gave one request: the accepted tokens, the nodes of the accepted guesses, and how many were tried.

    `finish_reason` is None while the request continues. It is "error" if proposing or verifying raised `error`.
    `logprobs` has one item per token if the request's sampling asks for log-probabilities, and else is None. `seconds`
    (since the request's begin), `sources` (of the accepted guesses) and `tree` are only there if the request asks.
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
        """How many of the tried guesses were accepted."""
        return len(self.path)

    def add_step_details(self, tree: TokenTree) -> None:
        """Add what a request with `reports_steps` wants to know of its step."""
        request = self.request
        self.seconds = request.sequence.stats.seconds
        self.sources = [source_of(tree.origins[node - tree.branch]) for node in self.path]
        if request.trees > 0:
            request.trees -= 1
            self.tree = tree


def raise_errors(events: Sequence[Event]) -> Sequence[Event]:
    """The events, unless one of their requests has failed: then its error is raised."""
    for event in events:
        if event.error is not None:
            raise event.error
    return events
