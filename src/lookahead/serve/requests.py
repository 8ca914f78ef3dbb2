"""One engine request of an HTTP request: its parameters, and its state while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

from lookahead.algorithm.sequence import DecodingSequence
from lookahead.config import LookaheadConfig, SamplingParams, StopRules
from lookahead.engine.request import Event, Request, TokenLogprobs, TokenMask
from lookahead.engine.request_stream import RequestStream
from lookahead.engine.text import SharedTokenizer, StopStrings, TextStream
from lookahead.generate import LookaheadModel
from lookahead.serve.keys import Owner


@dataclass
class RequestSpec:
    """The parameters of one engine request: a prompt, and how to continue it.

    `prediction` is text that the output may resemble. The text of the first `unsearched` tokens is not searched for
    stop strings. `output` holds tokens that another engine has already generated. Requests of the same `conversation`
    share a long prefix: see `ray`. With `streams_steps` its pieces carry per-step details, and the first `trees` steps
    include their token tree. With `scores` its output is the rest of the prompt (see `scoring`).
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
    scores: bool = False


@dataclass
class Step:
    """One step of a request with `streams_steps`: the text it completed, and the engine's event."""

    number: int
    text: str
    event: Event


@dataclass
class Piece:
    """The output of a request since its last piece: text, tokens, and the finish reason once it has ended."""

    state: RequestState
    text: str
    tokens: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: str | None
    steps: Sequence[Step] = ()


class RequestState:
    """A request in flight. `index` is its choice index in the response."""

    def __init__(self, model: LookaheadModel, tokenizer: SharedTokenizer, spec: RequestSpec, index: int) -> None:
        self.spec, self.index = spec, index
        self.request = self._request(model, tokenizer)
        self.sequence = self.request.sequence
        self.request.reports_steps, self.request.trees = spec.streams_steps, spec.trees
        self.text = TextStream(tokenizer, spec.stops, spec.unsearched)
        self.stream: RequestStream | None = None
        self.begin = perf_counter()
        self.first_token_time = self.last_token_time = 0.0
        self.counted = 0  # tokens already counted by the metrics
        self.tried = 0
        self.steps_sent = 0
        self.over = False

    def _request(self, model: LookaheadModel, tokenizer: SharedTokenizer) -> Request:
        """The engine's request. Output that exists already counts as output, not as prompt."""
        spec, ends = self.spec, None
        if spec.stops.stops:  # the engine's thread searches its own copy of the text
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
        """Turn events into a piece, in the event loop's thread. EOS tokens are dropped."""
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
        """The text that is ready, or all that is left if the request has ended."""
        return self.text.take() if reason is None else self.text.finish()


REASONS = {"eos": "stop", "stop": "stop", "length": "length", "error": "error"}
"""OpenAI's finish reason for each of the engine's."""
