"""`/v1/messages`: Anthropic's API, for its clients. The body is converted to a chat, and the output to blocks."""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError

from lookahead.serve.answers import AnswerReader
from lookahead.serve.chat import open_chat
from lookahead.serve.chat_protocol import ChatBody
from lookahead.serve.choices import new_id, usage_of
from lookahead.serve.errors import ApiError, bad_request, explain, most_telling
from lookahead.serve.messages_errors import messages_error
from lookahead.serve.messages_protocol import CountBody, MessagesBody
from lookahead.serve.prompts import encode_chat
from lookahead.serve.reply import Reply
from lookahead.serve.requests import Piece
from lookahead.serve.service import Service
from lookahead.serve.stream import EventStream, collect_outputs, event
from lookahead.serve.tools import Call, toolbox

router = APIRouter()
NO_THREADS = "thread_unsupported_request"
"""Anthropic's code, at which the tool runner of its client sends whole conversations instead."""


@router.post("/v1/messages")
async def messages(body: MessagesBody, request: Request) -> Response:
    """Answer a conversation."""
    service: Service = request.app.state.service
    service.check_model(body.model)
    if body.thread is not None:
        raise bad_request("thread: nothing is stored; send all messages", "thread", NO_THREADS)
    chat = as_chat(body)
    reply, (reader,) = await open_chat(chat, toolbox(chat, service.template), service, request)
    format = Format(service, reply, reader)
    if body.stream:
        return EventStream(reply, format, service.settings.keep_alive)
    (pieces,) = await collect_outputs(reply, request)
    return JSONResponse(format.response(pieces))


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountBody, request: Request) -> dict[str, int]:
    """How many tokens the prompt of a conversation has."""
    service: Service = request.app.state.service
    service.check_model(body.model)
    chat = as_chat(body)
    box = toolbox(chat, service.template)
    size = len(await request.body())
    prompt = await service.in_worker(lambda: encode_chat(service.model, service.template, chat, box), size)
    return {"input_tokens": len(prompt)}


def as_chat(body: CountBody) -> ChatBody:
    """The same request as a chat."""
    last = body.messages[-1]
    blocks = () if isinstance(last.content, str) else last.content
    if last.role == "assistant" and any(block.type == "tool_use" for block in blocks):
        raise bad_request("the last message has a 'tool_use' block; add a user message with its 'tool_result'")
    try:
        return ChatBody.model_validate({name: value for name, value in body.chat_fields().items() if value is not None})
    except ValidationError as error:
        raise explain(most_telling(error.errors())) from error


class Format:
    """One message: its blocks, streamed or not. White space alone makes no text block."""

    def __init__(self, service: Service, reply: Reply, reader: AnswerReader) -> None:
        self.service, self.reply, self.reader = service, reply, reader
        self.id = new_id("msg")
        self._open = ""  # the type of the block that is being streamed
        self._index = -1
        self._space = ""  # white space that may precede more text; in front of a call it is dropped
        self._ending: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}

    def response(self, pieces: list[Piece]) -> dict[str, Any]:
        self.reader.push_all(pieces)
        self._end(pieces[-1])
        text = self.reader.said.rstrip() if self.reader.calls else self.reader.said
        content: list[dict[str, Any]] = []
        if self.reader.reasoning:
            content.append({"type": "thinking", "thinking": self.reader.reasoning, "signature": ""})
        if text.strip():
            content.append({"type": "text", "text": text})
        content += [{**_tool_use(call), "input": _arguments(call)} for call in self.reader.calls]
        return self._message(content)

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self.service.name}
        return {**head, "content": content, **self._ending, "usage": self._usage()}

    def _usage(self) -> dict[str, Any]:
        """Anthropic counts cached tokens of the prompt apart from the others."""
        used = usage_of(self.reply.states, self.reader.thoughts.tokens)
        cached = used["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": used["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": used["completion_tokens"],
            "lookahead": used["lookahead"],
        }

    def _end(self, last: Piece) -> None:
        stop = last.state.text.stop
        reason = "max_tokens" if last.finish_reason == "length" else "end_turn"
        if reason == "end_turn" and self.reader.calls:
            reason = "tool_use"
        elif stop is not None:
            reason, self._ending["stop_sequence"] = "stop_sequence", stop
        self._ending["stop_reason"] = reason

    # Its events.

    def first(self) -> bytes:
        return _event("message_start", message=self._message([]))

    def delta(self, piece: Piece) -> bytes:
        part = self.reader.push(piece)
        found = b""
        if part.reasoning:
            found += self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            found += self._delta("thinking_delta", thinking=part.reasoning)
        said = self._space + part.said
        text = said.rstrip()
        self._space = said[len(text) :]
        if text:
            found += self._begin("text", {"type": "text", "text": ""}) + self._delta("text_delta", text=text)
        for call in part.calls:
            self._space = ""
            found += self._close() + self._begin("tool_use", {**_tool_use(call), "input": {}})
            found += self._delta("input_json_delta", partial_json=json.dumps(_arguments(call), ensure_ascii=False))
            found += self._close()
        if piece.finish_reason is not None:
            self._end(piece)
        return found

    def last(self) -> bytes:
        space = self._delta("text_delta", text=self._space) if self._space and self._open == "text" else b""
        ending = _event("message_delta", delta=self._ending, usage=self._usage())
        return space + self._close() + ending + _event("message_stop")

    def failed(self, error: ApiError) -> bytes:
        return event(messages_error(error.status, error.message, error.code), "error")

    def _begin(self, kind: str, block: dict[str, Any]) -> bytes:
        """Begin a block, unless one of this type is open."""
        if self._open == kind:
            return b""
        closed = self._close()
        self._open = kind
        self._index += 1
        return closed + _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, kind: str, **fields: Any) -> bytes:
        return _event("content_block_delta", index=self._index, delta={"type": kind, **fields})

    def _close(self) -> bytes:
        if not self._open:
            return b""
        self._open = ""
        return _event("content_block_stop", index=self._index)


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)


def _tool_use(call: Call) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{call.id.removeprefix('call_')}", "name": call.name}


def _arguments(call: Call) -> dict[str, Any]:
    """The arguments of a call as an object, which they are unless the model wrote something else."""
    try:
        found = json.loads(call.arguments)
    except ValueError:
        found = call.arguments
    return found if isinstance(found, dict) else {"arguments": found}
