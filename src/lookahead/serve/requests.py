"""One sequence of a reply: what is asked for, and what has come of it so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

from lookahead.algorithm.sequence import DecodingSequence
from lookahead.config import LookaheadConfig, SamplingParams, StopRules
from lookahead.engine.front import Ticket
from lookahead.engine.request import Event, Request, TokenLogprobs, TokenMask
from lookahead.engine.text import SharedTokenizer, StopStrings, TextStream
from lookahead.generate import LookaheadModel
from lookahead.serve.keys import Owner


@dataclass
class RequestSpec:
    """One sequence that is asked for: a prompt, and how to continue it. `prediction` is text that it may resemble. The
    text of the first `unsearched` tokens is not searched for stop strings. `output` is the beginning of the answer, if
    another engine has generated it already. Asks of the same `conversation` share a long beginning: see `ray`.

    With `streams_steps` its pieces say what each step did, and the first `trees` steps show their tree.
    """

    prompt: list[int]
    config: LookaheadConfig
    sampling: SamplingParams
    rules: StopRules
    owner: Owner
    stops: StopStrings = field(default_factory=StopStrings)
    mask: TokenMask | None = None
    prediction: Sequence[int] = ()
    unsearched: int = 0
    streams_steps: bool = False
    trees: int = 0
    output: Sequence[int] = ()
    conversation: str = ""


@dataclass
class Step:
    """One step of a job that tells its steps: the text that became ready with it, and what the engine said."""

    number: int
    text: str
    event: Event


@dataclass
class Piece:
    """What a job gave since the piece before: text, tokens, and why it ended, if it did."""

    state: RequestState
    text: str
    tokens: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: str | None
    steps: Sequence[Step] = ()


class RequestState:
    """One sequence on its way. `index` is its place in the reply."""

    def __init__(self, model: LookaheadModel, tokenizer: SharedTokenizer, spec: RequestSpec, index: int) -> None:
        self.spec, self.index = spec, index
        self.request = self._request(model, tokenizer)
        self.sequence = self.request.sequence
        self.request.tells_steps, self.request.trees = spec.streams_steps, spec.trees
        self.text = TextStream(tokenizer, spec.stops, spec.unsearched)
        self.ticket: Ticket | None = None
        self.begin = perf_counter()
        self.last_token_time = 0.0  # when the last token came
        self.counted = 0  # tokens that the metrics have counted
        self.tried = 0
        self.steps_sent = 0
        self.over = False

    def _request(self, model: LookaheadModel, tokenizer: SharedTokenizer) -> Request:
        """What the engine gets. The output that there is already counts as output for everything that follows it."""
        spec, ends = self.spec, None
        if spec.stops.stops:  # the engine's thread looks for stop strings in a text of its own
            searched = TextStream(tokenizer, spec.stops, spec.unsearched)
            searched.push_tokens(spec.output)
            ends = searched.push_token
        if spec.mask is not None and spec.output:
            spec.mask.accept(spec.output)
        sequence = DecodingSequence(
            spec.prompt,
            spec.config,
            spec.sampling,
            spec.rules,
            ends=ends,
            memory=spec.owner.memory,
            prediction=spec.prediction,
            output=spec.output,
        )
        return Request(sequence, model.verifier(sequence), mask=spec.mask, salt=spec.owner.salt)

    def read(self, events: Sequence[Event]) -> Piece:
        """Take what steps have given, in the event loop's thread. An EOS is no text."""
        tokens: list[int] = []
        logprobs: list[TokenLogprobs] = []
        steps: list[Step] = []
        reason = None
        for event in events:
            reason = event.finish_reason
            kept = event.tokens[:-1] if reason == "eos" else event.tokens
            self.text.push_tokens(kept)
            tokens += kept
            logprobs += (event.logprobs or [])[: len(kept)]
            self.tried += event.tried
            if self.spec.streams_steps:
                self.steps_sent += 1
                steps.append(Step(self.steps_sent, self._take(reason), event))
        text = self._take(reason)
        if steps:
            text = "".join(step.text for step in steps) + text
        return Piece(self, text, tokens, logprobs, REASONS.get(reason) if reason else None, steps)

    def _take(self, reason: str | None) -> str:
        """The text that is ready, or all that is left if there is a reason to end."""
        return self.text.take() if reason is None else self.text.finish()


REASONS = {"eos": "stop", "stop": "stop", "length": "length", "error": "error"}
"""Why a sequence ended, in OpenAI's words."""
