"""One answer: a request's events from the engine, turned into text, as a whole or piece by piece."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from inspect import GEN_CLOSED, getgeneratorstate

from lookahead.algorithm.sequence import DecodingSequence
from lookahead.config import LookaheadConfig
from lookahead.engine.client import EngineClient
from lookahead.engine.request import Event, Request, TokenLogprobs
from lookahead.engine.request_stream import RequestStream
from lookahead.engine.text import TextStream
from lookahead.stats import Stats


@dataclass(frozen=True)
class Completion:
    """An answer. `finish_reason` is 'eos', 'stop' (a stop string), 'length', or 'interrupted' (closed early).

    `logprobs` aligns with `token_ids`, and is None unless it was requested.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    stats: Stats = field(repr=False)
    method: str
    config: LookaheadConfig = field(repr=False)
    seed: int
    logprobs: list[TokenLogprobs] | None = field(default=None, repr=False)


class Piece(str):
    """A piece of streamed text. `token_ids` are the tokens accepted since the piece before it.

    `logprobs` aligns with them, and is None unless it was requested.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None

    def __new__(cls, text: str, token_ids: list[int], logprobs: list[TokenLogprobs] | None = None) -> Piece:
        piece = super().__new__(cls, text)
        piece.token_ids, piece.logprobs = token_ids, logprobs
        return piece


class Answer:
    """An answer that is being generated: the engine's request, and what was read of it so far."""

    def __init__(self, request: Request, text: TextStream, method: str) -> None:
        self.request, self.text, self.method = request, text, method
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = None
        if request.sequence.sampling.logprobs is not None:
            self.logprobs = []
        self.finish_reason: str | None = None
        self.stream: RequestStream | None = None

    @property
    def sequence(self) -> DecodingSequence:
        return self.request.sequence

    def read(self, tokens: Sequence[int], finish_reason: str | None) -> None:
        """Add the next tokens and the finish reason. An EOS token adds no text."""
        self.tokens += tokens
        self.finish_reason = finish_reason
        for token in tokens[:-1] if finish_reason == "eos" else tokens:
            self.text.push_token(token)

    def read_logprobs(self, event: Event) -> None:
        """Add the log-probabilities of an event, if they were requested."""
        if self.logprobs is not None:
            self.logprobs += event.logprobs or []

    def completion(self) -> Completion:
        self.text.finish()
        reason = self.finish_reason or "interrupted"
        return Completion(
            text=self.text.text,
            token_ids=self.tokens,
            finish_reason="stop" if self.text.stop is not None and reason != "eos" else reason,
            stats=self.sequence.stats,
            method=self.method,
            config=self.sequence.config,
            seed=self.sequence.sampling.seed,
            logprobs=self.logprobs,
        )


class Stream(Iterator[Piece]):
    """The text of one answer, piece by piece as steps accept tokens. After the last one, read `completion`.

    Generation continues even if the stream is not read. It ends when the stream is closed or garbage-collected.
    """

    def __init__(self, client: EngineClient, answer: Answer) -> None:
        self._answer = answer
        self._pieces = _pieces(client, answer)
        self._completion: Completion | None = None

    def __next__(self) -> Piece:
        return next(self._pieces)

    @property
    def completion(self) -> Completion:
        """The whole answer. It is available once the stream is exhausted or closed."""
        if getgeneratorstate(self._pieces) != GEN_CLOSED:
            raise RuntimeError("the answer is still being generated; exhaust the stream, or close() it")
        if self._completion is None:
            self._completion = self._answer.completion()
        return self._completion

    def close(self) -> None:
        """Stop early; `completion` then holds what was read so far."""
        self._pieces.close()
        if self._answer.stream is not None:
            self._answer.stream.join()


def _pieces(client: EngineClient, answer: Answer) -> Generator[Piece, None, None]:
    """Run one answer to its end. Every accepted token is in a piece; the last piece may have no text."""
    tokens: list[int] = []
    answer.stream = client.submit(answer.request)
    try:
        for event in answer.stream:
            answer.read(event.tokens, event.finish_reason)
            answer.read_logprobs(event)
            tokens += event.tokens
            text = answer.text.finish() if event.finish_reason else answer.text.take()
            if text or event.finish_reason:
                logprobs = answer.logprobs
                yield Piece(text, tokens, None if logprobs is None else logprobs[len(logprobs) - len(tokens) :])
                tokens = []
    finally:
        client.cancel(answer.stream)
