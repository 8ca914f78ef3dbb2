"""`/v1/chat/completions`: messages through the model's chat template, with tools and structured output."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from lookahead.serve.answers import AnswerReader
from lookahead.serve.chat_protocol import ChatBody, ResponseFormat
from lookahead.serve.choices import Choices, new_id, now, usage_of
from lookahead.serve.errors import bad_request
from lookahead.serve.grammar import ANY_OBJECT
from lookahead.serve.parameters import config_of, rules_of_body, sampling_of, stops_of
from lookahead.serve.prompts import encode_chat
from lookahead.serve.protocol import text_of
from lookahead.serve.reasoning import TAIL, ReasoningReader, stage_of, with_reasoning
from lookahead.serve.reply import Reply
from lookahead.serve.requests import Piece, RequestSpec
from lookahead.serve.service import Service
from lookahead.serve.steps import check_trace, step_fields, trees_of
from lookahead.serve.stream import EventStream, Template, collect_outputs, event
from lookahead.serve.structured import Constraint, compile_grammar, constraint_of
from lookahead.serve.tools import Call, Toolbox, toolbox

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatBody, request: Request) -> Response:
    """Answer a conversation."""
    service: Service = request.app.state.service
    service.check_model(body.model)
    box = toolbox(body, service.template)
    format = Format(service, body, *await open_chat(body, box, service, request))
    if body.stream:
        return EventStream(format.reply, format, service.settings.keep_alive)
    return JSONResponse(format.response(await collect_outputs(format.reply, request)))


async def open_chat(
    body: ChatBody, box: Toolbox, service: Service, request: Request
) -> tuple[Reply, list[AnswerReader]]:
    """Prepare a chat request and submit it to the engine. Returns a reader for each choice, too.

    The schemas of long bodies are read in a worker thread: one of 2 MB takes a second.
    """
    owner = request.state.owner
    check_trace(body, owner)
    size = len(await request.body())
    service.check_room()
    prompt = await service.in_worker(lambda: encode_chat(service.model, service.template, body, box), size)
    begun = text_of(body.messages[-1].content) if body.continue_final_message else ""
    stage = stage_of(service.tags, "" if service.tags is None else service.decode(prompt[-TAIL:]), begun)
    grammar = await service.in_worker(lambda: grammar_of(body, box, service), size)
    await compile_grammar(grammar, service)  # before the reasoning is let in, behind which nothing is checked
    if grammar is not None:
        grammar = with_reasoning(grammar, service.tags, stage, service.grammars.special_token)
        await compile_grammar(grammar, service)
    reply = await service.open(lambda: specs_of(body, prompt, grammar, service, owner), size)
    tags = None if body.separate_reasoning is False else service.tags
    shows = body.include_reasoning is not False
    return reply, [AnswerReader(ReasoningReader(tags, stage), box.reader(), shows) for _ in reply.states]


def grammar_of(body: ChatBody, box: Toolbox, service: Service) -> str | None:
    """The grammar that constrains the answer, or None."""
    wanted = constraint_of(body)
    if body.response_format is not None and (schema := schema_of(body.response_format)) is not None:
        wanted = Constraint(schema=schema)
    if not box.tools:
        return wanted.grammar()
    if wanted.text is not None:
        raise bad_request("a regex, a choice or a grammar does not go with tools; set tool_choice to 'none'", "tools")
    return box.grammar(wanted.schema, service.grammars.special_token)


def schema_of(format: ResponseFormat) -> dict[str, Any] | None:
    """The JSON schema of a response format; None for text."""
    if format.type == "text":
        return None
    return (format.json_schema.schema_ if format.json_schema is not None else None) or ANY_OBJECT


def specs_of(body: ChatBody, prompt: list[int], grammar: str | None, service: Service, owner: Any) -> list[RequestSpec]:
    """One request for each of the `n` choices."""
    model = service.model
    config = config_of(body.lookahead, model)
    most = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    rules, least = rules_of_body(body, prompt, most, model, config, grammar)
    predicted: list[int] = []
    if body.prediction is not None:
        predicted = list(model.tokenizer(text_of(body.prediction.content), add_special_tokens=False)["input_ids"])
    stops = stops_of(body)
    samplings = sampling_of(body, model, (body.top_logprobs or 0) if body.logprobs else None)
    trees = trees_of(body, len(samplings))
    return [
        RequestSpec(
            prompt,
            config,
            sampling,
            rules,
            owner,
            stops,
            mask=None if grammar is None else service.grammars.mask(grammar, least),
            prediction=predicted,
            unsearched=body.min_tokens or 0,
            streams_steps=body.streams_steps,
            trees=trees,
        )
        for sampling in samplings
    ]


class Format(Choices):
    """Formats the choices of one chat as OpenAI's objects, streamed or not."""

    def __init__(self, service: Service, body: ChatBody, reply: Reply, readers: list[AnswerReader]) -> None:
        head = {
            "id": new_id("chatcmpl"),
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": now(),
            "model": service.name,
        }
        super().__init__(head, body.stream_options, reply)
        self.service, self.body, self.readers = service, body, readers
        self._plain: dict[int, Template] = {}  # by choice, where chunks differ only in their text
        self._may_be_plain = not (body.logprobs or body.streams_steps)

    def response(self, pieces: list[list[Piece]]) -> dict[str, Any]:
        choices, format_logprobs = [], self.service.token_formatter.chat_logprobs
        for state, parts, reader in zip(self.reply.states, pieces, self.readers, strict=True):
            reader.push_all(parts)
            text = reader.said
            message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
            if reader.reasoning:
                message |= {"content": text or None, **_reasoning(reader.reasoning)}
            if reader.calls:
                message["content"] = text.strip() or None
                message["tool_calls"] = [call.record() for call in reader.calls]
            joined = (
                [token for part in parts for token in part.tokens],
                [one for part in parts for one in part.logprobs],
            )
            logprobs = {"content": format_logprobs(*joined), "refusal": None} if self.body.logprobs else None
            reason = self._reason(parts[-1], reader)
            choices.append({"index": state.index, "message": message, "logprobs": logprobs, "finish_reason": reason})
        return {**self.head, "choices": choices, "usage": self._usage()}

    def first(self) -> bytes:
        begins = [_chunk(state.index, {"role": "assistant", "content": ""}) for state in self.reply.states]
        return b"".join([event(self._chunk(choice)) for choice in begins])

    def delta(self, piece: Piece) -> bytes:
        index = piece.state.index
        plain = self._plain.get(index)
        if plain is not None and piece.finish_reason is None:
            return plain(piece.text) if piece.text else b""
        reader = self.readers[self.reply.states.index(piece.state)]
        chunks = [self._chunk(choice) for choice in self._chunks(piece, reader)]
        if self._may_be_plain and reader.is_plain:  # from now on only the text changes
            self._plain[index] = Template(partial(self._text_chunk, index))
        if piece.steps:  # a step that produced no text yet is sent, too
            chunks = chunks or [self._chunk(_chunk(index, {}))]
            chunks[0].update(step_fields(piece, self.service.token_formatter))
        return b"".join([event(chunk) for chunk in chunks])

    def _text_chunk(self, index: int, text: str) -> dict[str, Any]:
        return self._chunk(_chunk(index, {"content": text}))

    def _chunks(self, piece: Piece, reader: AnswerReader) -> list[dict[str, Any]]:
        """The chunks of one piece: its reasoning and text, its tool calls, and its finish reason."""
        index, before = piece.state.index, len(reader.calls)
        part = reader.push(piece)
        found = []
        if part.reasoning or part.said or (self.body.logprobs and piece.tokens):
            said = {"content": part.said} if part.said or not part.reasoning else {}
            chunk = _chunk(index, {**_reasoning(part.reasoning), **said} if part.reasoning else said)
            if self.body.logprobs:
                chunk["logprobs"] = {
                    "content": self.service.token_formatter.chat_logprobs(piece.tokens, piece.logprobs),
                    "refusal": None,
                }
            found.append(chunk)
        if part.calls:
            found.append(_chunk(index, {"tool_calls": _numbered(part.calls, before)}))
        if piece.finish_reason is not None:
            found.append({**_chunk(index, {}), "finish_reason": self._reason(piece, reader)})
        return found

    def _usage(self) -> dict[str, Any]:
        return usage_of(self.reply.states, sum(reader.thoughts.tokens for reader in self.readers))

    def _reason(self, last: Piece, reader: AnswerReader) -> str | None:
        return "tool_calls" if reader.calls and last.finish_reason == "stop" else last.finish_reason


def _chunk(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _reasoning(text: str) -> dict[str, Any]:
    """Reasoning under both of vLLM's names: clients read one or the other."""
    return {"reasoning_content": text, "reasoning": text}


def _numbered(calls: list[Call], first: int) -> list[dict[str, Any]]:
    return [{"index": number, **call.record()} for number, call in enumerate(calls, start=first)]
