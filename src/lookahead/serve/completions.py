"""`/v1/completions`: prompts as text or token ids, without a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from lookahead.engine.request import TokenLogprobs
from lookahead.serve.choices import Choices, new_id, now, usage_of
from lookahead.serve.errors import bad_request
from lookahead.serve.parameters import config_of, rules_of, rules_of_body, sampling_of, stops_of
from lookahead.serve.protocol import CompletionBody
from lookahead.serve.reply import Reply
from lookahead.serve.requests import Piece, RequestSpec
from lookahead.serve.scoring import SCORING, scores_of, scoring_spec
from lookahead.serve.service import Service
from lookahead.serve.steps import check_trace, step_fields, trees_of
from lookahead.serve.stream import EventStream, Template, collect_outputs, event
from lookahead.serve.structured import compile_grammar, constraint_of

router = APIRouter()
DEFAULT_TOKENS = 16
"""OpenAI's default."""
MOST_PROMPTS = 64


@router.post("/v1/completions")
async def completions(body: CompletionBody, request: Request) -> Response:
    """Continue one prompt or several."""
    service: Service = request.app.state.service
    service.check_model(body.model)
    owner, size = request.state.owner, len(await request.body())
    check_trace(body, owner)
    scored: list[Scored] = []
    if body.echo and body.logprobs is not None:
        scored = await score(body, service, request)
        if body.max_tokens == 0:
            return JSONResponse(only_scores(body, service, scored))
    grammar = await service.in_worker(lambda: constraint_of(body).grammar(), size)
    await compile_grammar(grammar, service)
    reply = await service.open(lambda: specs_of(body, grammar, service, owner), size)
    format = Format(service, body, reply, scored)
    if body.stream:
        return EventStream(reply, format, service.settings.keep_alive)
    return JSONResponse(format.response(await collect_outputs(reply, request)))


def specs_of(body: CompletionBody, grammar: str | None, service: Service, owner: Any) -> list[RequestSpec]:
    """`n` requests for each prompt."""
    model = service.model
    config, stops = config_of(body.lookahead, model), stops_of(body)
    specs = []
    prompts = prompts_of(body, service)
    trees = trees_of(body, len(prompts) * (body.n or 1))
    for ids in prompts:
        most = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
        rules, least = rules_of_body(body, ids, most, model, config, grammar)
        samplings = sampling_of(body, model, body.logprobs)
        specs += [
            RequestSpec(
                ids,
                config,
                sampling,
                rules,
                owner,
                stops,
                mask=None if grammar is None else service.grammars.mask(grammar, least),
                unsearched=body.min_tokens or 0,
                streams_steps=body.streams_steps,
                trees=trees,
            )
            for sampling in samplings
        ]
    return specs


def prompts_of(body: CompletionBody, service: Service) -> list[list[int]]:
    given: Any = body.prompt
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = [given]
    if not given:
        raise bad_request("prompt: give at least one", "prompt")
    if len(given) > MOST_PROMPTS:
        raise bad_request(f"prompt: {len(given)} prompts, and one request may have {MOST_PROMPTS}", "prompt")
    try:
        return [service.model.encode(one, raw=True) for one in given]
    except ValueError as error:
        raise bad_request(f"prompt: {error}", "prompt") from error


class Scored(NamedTuple):
    """A prompt, and the log-probabilities of all its tokens but the first."""

    prompt: list[int]
    logprobs: list[TokenLogprobs]


async def score(body: CompletionBody, service: Service, request: Request) -> list[Scored]:
    """The log-probabilities of every prompt's tokens."""
    size = len(await request.body())
    prompts = await service.in_worker(lambda: prompts_of(body, service), size)
    owner, count = request.state.owner, body.logprobs or 0
    for prompt in prompts:
        rules_of(prompt, None, service.model, SCORING)  # raises if the prompt leaves no room
    specs = [scoring_spec(prompt, count, owner, service) for prompt in prompts if len(prompt) > 1]
    found = iter(await collect_outputs(await service.open(lambda: specs, size), request) if specs else ())
    return [Scored(prompt, scores_of(next(found)) if len(prompt) > 1 else []) for prompt in prompts]


def only_scores(body: CompletionBody, service: Service, scored: Sequence[Scored]) -> dict[str, Any]:
    """The response to `max_tokens=0`: the prompts with their log-probabilities."""
    choices = []
    for index in range(len(scored) * (body.n or 1)):
        prompt, found = scored[index // (body.n or 1)]
        logprobs = service.token_formatter.completion_logprobs(prompt, [None, *found], 0)
        choices.append(_record(index, echoed(body, service, prompt), logprobs, "length"))
    tokens = sum(len(one.prompt) for one in scored)
    usage = {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens}
    return {**head(service), "choices": choices, "usage": usage}


def echoed(body: CompletionBody, service: Service, prompt: list[int]) -> str:
    return body.prompt if isinstance(body.prompt, str) else service.decode(prompt)


def head(service: Service) -> dict[str, Any]:
    return {"id": new_id("cmpl"), "object": "text_completion", "created": now(), "model": service.name}


class Format(Choices):
    """Formats the choices as OpenAI's objects, streamed or not. `scored` holds the prompts if they are echoed with
    log-probabilities."""

    def __init__(self, service: Service, body: CompletionBody, reply: Reply, scored: Sequence[Scored] = ()) -> None:
        super().__init__(head(service), body.stream_options, reply)
        self.service, self.body, self.scored = service, body, scored
        self._offsets: dict[int, int] = {}
        self._begun: set[int] = set()
        self._plain: dict[int, Template] = {}

    def response(self, pieces: list[list[Piece]]) -> dict[str, Any]:
        choices = []
        for state, parts in zip(self.reply.states, pieces, strict=True):
            joined = Piece(
                state,
                "".join(part.text for part in parts),
                [token for part in parts for token in part.tokens],
                [one for part in parts for one in part.logprobs],
                parts[-1].finish_reason,
            )
            choices.append(self._choice(joined, first=True))
        return {**self.head, "choices": choices, "usage": usage_of(self.reply.states)}

    def first(self) -> bytes:
        return b""

    def delta(self, piece: Piece) -> bytes:
        index = piece.state.index
        if index in self._plain and piece.finish_reason is None:
            return self._plain[index](piece.text) if piece.text else b""
        begins = index not in self._begun
        self._begun.add(index)
        if self.body.logprobs is None and not self.body.streams_steps:  # from now on only the text changes
            self._plain[index] = Template(lambda text: self._chunk(_record(index, text)))
        has_text = piece.text or piece.finish_reason or (begins and self.body.echo)
        has_logprobs = self.body.logprobs is not None and piece.tokens
        if not (has_text or has_logprobs or piece.steps):
            return b""
        return event({**self._chunk(self._choice(piece, begins)), **step_fields(piece, self.service.token_formatter)})

    def _choice(self, piece: Piece, first: bool) -> dict[str, Any]:
        index, text, logprobs = piece.state.index, piece.text, None
        if self.body.echo and first:
            text = echoed(self.body, self.service, piece.state.spec.prompt) + text
        if self.body.logprobs is not None:
            tokens, found = piece.tokens, list[TokenLogprobs | None](piece.logprobs)
            if self.scored and first:
                prompt, before = self.scored[index // (self.body.n or 1)]
                tokens, found = [*prompt, *tokens], [None, *before, *found]
            offset = self._offsets.get(index, 0)
            logprobs = self.service.token_formatter.completion_logprobs(tokens, found, offset)
            self._offsets[index] = offset + sum(map(len, logprobs["tokens"]))
        return _record(index, text, logprobs, piece.finish_reason)


def _record(index: int, text: str, logprobs: Any = None, finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
