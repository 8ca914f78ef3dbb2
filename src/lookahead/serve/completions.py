"""`/v1/completions`: prompts as text or token ids, continued as they are."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from lookahead.serve.asks import config_of, rules_of, sampling_of, stops_of
from lookahead.serve.errors import bad_request
from lookahead.serve.jobs import Ask, Piece
from lookahead.serve.protocol import CompletionBody
from lookahead.serve.replies import new_id, now, usage_of
from lookahead.serve.reply import Reply
from lookahead.serve.service import Service
from lookahead.serve.steps import told, trees_of
from lookahead.serve.stream import COMMENT, EventStream, event, guarded, whole

router = APIRouter()
DEFAULT_TOKENS = 16
"""OpenAI's."""
MOST_PROMPTS = 64


@router.post("/v1/completions")
async def completions(body: CompletionBody, request: Request) -> Response:
    """Continue one prompt or several."""
    service: Service = request.app.state.service
    service.check_model(body.model)
    if body.echo and body.logprobs is not None:
        raise bad_request("echo with logprobs is not supported: there are none of the prompt; drop one", "echo")
    owner = request.state.owner
    reply = await service.open(lambda: asks_of(body, service, owner), len(await request.body()))
    format = Format(service, body, reply)
    if body.stream:
        return EventStream(reply, guarded(format.events()))
    return JSONResponse(format.whole(await whole(reply, request)))


def asks_of(body: CompletionBody, service: Service, owner: Any) -> list[Ask]:
    """`n` asks for each prompt."""
    model = service.model
    config, stops = config_of(body.lookahead, model), stops_of(body)
    asks = []
    prompts = prompts_of(body, service)
    trees = trees_of(body, owner, len(prompts) * (body.n or 1))
    for ids in prompts:
        most = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
        rules = rules_of(ids, most, model, config, bool(body.ignore_eos), body.min_tokens or 0)
        samplings = sampling_of(body, model, body.logprobs)
        asks += [
            Ask(ids, config, sampling, rules, owner, stops, tells_steps=body.tells_steps, trees=trees)
            for sampling in samplings
        ]
    return asks


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


class Format:
    """The replies to one request, as OpenAI writes them."""

    def __init__(self, service: Service, body: CompletionBody, reply: Reply) -> None:
        self.service, self.body, self.reply = service, body, reply
        self.head = {"id": new_id("cmpl"), "object": "text_completion", "created": now(), "model": service.name}
        self._offsets: dict[int, int] = {}

    def whole(self, pieces: list[list[Piece]]) -> dict[str, Any]:
        choices = []
        for job, parts in zip(self.reply.jobs, pieces, strict=True):
            joined = Piece(
                job,
                "".join(part.text for part in parts),
                [token for part in parts for token in part.tokens],
                [one for part in parts for one in part.logprobs],
                parts[-1].finish_reason,
            )
            choices.append(self._choice(joined, first=True))
        return {**self.head, "choices": choices, "usage": usage_of(self.reply.jobs)}

    async def events(self) -> AsyncIterator[bytes]:
        begun: set[int] = set()
        options = self.body.stream_options
        async for piece in self.reply.pieces(self.service.settings.keep_alive):
            if piece is None:
                yield COMMENT
                continue
            first = piece.job.index not in begun
            begun.add(piece.job.index)
            echoed = first and self.body.echo
            about_steps = told(piece, self.service.spelling)
            logprobs = self.body.logprobs is not None and piece.tokens
            if piece.text or piece.finish_reason or echoed or logprobs or about_steps:
                yield event({**self.head, "choices": [self._choice(piece, first)], **about_steps})
        if options is not None and options.include_usage:
            yield event({**self.head, "choices": [], "usage": usage_of(self.reply.jobs)})

    def _choice(self, piece: Piece, first: bool) -> dict[str, Any]:
        text, logprobs = piece.text, None
        if self.body.echo and first:
            given = self.body.prompt
            ids = piece.job.ask.prompt
            text = (given if isinstance(given, str) else self.service.decode(ids)) + text
        if self.body.logprobs is not None:
            offset = self._offsets.get(piece.job.index, 0)
            logprobs = self.service.spelling.completion(piece.tokens, piece.logprobs, offset)
            self._offsets[piece.job.index] = offset + sum(map(len, logprobs["tokens"]))
        return {"index": piece.job.index, "text": text, "logprobs": logprobs, "finish_reason": piece.finish_reason}
