"""`/v1/responses`: text in, text out, with its own events when streamed. Nothing is stored between requests.

The body is converted to a chat, and the output is formatted as a response.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError

from lookahead.serve.answers import AnswerReader, Part
from lookahead.serve.chat import open_chat
from lookahead.serve.chat_protocol import ChatBody
from lookahead.serve.choices import new_id, now, usage_of
from lookahead.serve.errors import ApiError, explain, most_telling
from lookahead.serve.protocol import text_of
from lookahead.serve.reply import Reply
from lookahead.serve.requests import Piece
from lookahead.serve.responses_protocol import InputItem, ResponsesBody
from lookahead.serve.service import Service
from lookahead.serve.stream import EventStream, collect_outputs, event
from lookahead.serve.tools import Call, toolbox

router = APIRouter()
TEXT = {"format": {"type": "text"}}


@router.post("/v1/responses")
async def responses(body: ResponsesBody, request: Request) -> Response:
    """Answer an input."""
    service: Service = request.app.state.service
    service.check_model(body.model)
    chat = as_chat(body)
    box = toolbox(chat, service.template)
    reply, (reader,) = await open_chat(chat, box, service, request)
    format = Format(service, body, reply, reader)
    if body.stream:
        return EventStream(reply, format, service.settings.keep_alive)
    (pieces,) = await collect_outputs(reply, request)
    for piece in pieces:
        format.add(piece)
    return JSONResponse(format.record())


def as_chat(body: ResponsesBody) -> ChatBody:
    """The same request as a chat."""
    given = [InputItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    messages = as_messages(given)
    if body.instructions is not None:
        messages.insert(0, {"role": "system", "content": body.instructions})
    fields: dict[str, Any] = {
        "messages": messages,
        "max_tokens": body.max_output_tokens,
        "tools": [tool.as_chat() for tool in body.tools or ()] or None,
        "tool_choice": body.chat_choice(),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": None if body.text is None else body.text.as_chat(),
    }
    fields |= body.model_dump(include={"temperature", "top_p", "top_k", "min_p", "seed", "lookahead"})
    fields["reasoning_effort"] = None if body.reasoning is None else body.reasoning.effort
    try:
        return ChatBody.model_validate({name: value for name, value in fields.items() if value is not None})
    except ValidationError as error:
        raise explain(most_telling(error.errors())) from error


def as_messages(items: list[InputItem]) -> list[dict[str, Any]]:
    """The items as chat messages. Reasoning belongs to the message or call that follows it."""
    messages: list[dict[str, Any]] = []
    reasoning = ""
    for item in items:
        if item.type == "reasoning":
            reasoning = text_of(item.content)
            continue
        message = item.as_message()
        if reasoning and message["role"] == "assistant":
            message["reasoning_content"] = reasoning
        reasoning = ""
        messages.append(message)
    return messages


class Format:
    """One response: its output items as they grow, and their events."""

    def __init__(self, service: Service, body: ResponsesBody, reply: Reply, reader: AnswerReader) -> None:
        self.service, self.body, self.reply, self.reader = service, body, reply, reader
        self.id, self.created, self.status = new_id("resp"), now(), "in_progress"
        self.message_id, self.reasoning_id = new_id("msg"), new_id("rs")
        self.why: dict[str, Any] | None = None
        self.error: dict[str, Any] | None = None
        self._sent = 0
        self._reasoned = False  # the events of the reasoning are complete

    # The response object.

    @property
    def said(self) -> str:
        """The message text so far."""
        return self.reader.said

    def add(self, piece: Piece) -> Part:
        """Add text of the model. Returns what it adds to the answer."""
        if piece.finish_reason is not None:
            self.status = "incomplete" if piece.finish_reason == "length" else "completed"
            self.why = {"reason": "max_output_tokens"} if piece.finish_reason == "length" else None
        return self.reader.push(piece)

    def record(self) -> dict[str, Any]:
        body = self.body
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": self.status,
            "model": self.service.name,
            "output": self._output(),
            "error": self.error,
            "incomplete_details": self.why,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": TEXT if body.text is None else body.text.model_dump(by_alias=True, exclude_none=True),
            "tool_choice": body.model_dump()["tool_choice"] or "auto",
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None if self.status == "in_progress" else self._usage(),
            "user": body.user,
        }

    def _output(self) -> list[dict[str, Any]]:
        calls = [self._call_item(call) for call in self.reader.calls]
        ended = "completed" if self.said or calls else self.status
        thoughts = [self._reasoning_item(ended)] if self.reader.reasoning else []
        silent = not self.said and (bool(calls or thoughts) or self.status == "in_progress")
        return [*thoughts, *calls] if silent else [*thoughts, self._message(self.said), *calls]

    def _reasoning_item(self, status: str) -> dict[str, Any]:
        content = [{"type": "reasoning_text", "text": self.reader.reasoning}] if status != "in_progress" else []
        return {"id": self.reasoning_id, "type": "reasoning", "status": status, "summary": [], "content": content}

    def _message(self, text: str, status: str | None = None) -> dict[str, Any]:
        done = self.status if status is None else status
        content = [_part(text)] if text or done != "in_progress" else []
        return {"id": self.message_id, "type": "message", "role": "assistant", "status": done, "content": content}

    def _call_item(self, call: Call) -> dict[str, Any]:
        item = {"id": f"fc_{call.id[5:]}", "type": "function_call", "status": "completed", "call_id": call.id}
        return {**item, "name": call.name, "arguments": call.arguments}

    def _usage(self) -> dict[str, Any]:
        used = usage_of(self.reply.states, self.reader.thoughts.tokens)
        return {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": used["prompt_tokens_details"],
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self.reader.thoughts.tokens},
            "total_tokens": used["total_tokens"],
            "lookahead": used["lookahead"],
        }

    # Its events.

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._sent += 1
        return event({"type": kind, "sequence_number": self._sent - 1, **fields}, kind)

    def first(self) -> bytes:
        begin = self._event("response.created", response=self.record())
        return begin + self._event("response.in_progress", response=self.record())

    def delta(self, piece: Piece) -> bytes:
        thought, begun, called = bool(self.reader.reasoning), bool(self.said), len(self.reader.calls)
        part = self.add(piece)
        found = self._reasoning_events(part.reasoning, thought) if part.reasoning else []
        if self.reader.reasoning and not self._reasoned and (part.said or part.calls):
            found += self._reasoning_end()
        return b"".join([*found, *self._delta_events(part.said, begun, part.calls, called)])

    def last(self) -> bytes:
        ends = self._reasoning_end() if self.reader.reasoning and not self._reasoned else []
        ends += self._message_end() if self.said else []
        return b"".join([*ends, self._event(f"response.{self.status}", response=self.record())])

    def failed(self, error: ApiError) -> bytes:
        self.status, self.error = "failed", {"code": error.code or "server_error", "message": error.message}
        return self._event("response.failed", response=self.record())

    def _delta_events(self, said: str, begun: bool, calls: list[Call], called: int) -> list[bytes]:
        """The events of new message text and new calls. `begun`: the message has text already; `called`: earlier
        calls."""
        found = []
        index = int(bool(self.reader.reasoning))
        where = {"item_id": self.message_id, "output_index": index, "content_index": 0}
        if said and not begun:
            item = self._message("", "in_progress")
            found.append(self._event("response.output_item.added", output_index=index, item=item))
            found.append(self._event("response.content_part.added", **where, part=_part("")))
        if said:
            found.append(self._event("response.output_text.delta", **where, delta=said, logprobs=[]))
        for number, call in enumerate(calls, start=index + called + bool(self.said)):
            item = self._call_item(call)
            empty = {**item, "status": "in_progress", "arguments": ""}
            call_where = {"item_id": item["id"], "output_index": number}
            found.append(self._event("response.output_item.added", output_index=number, item=empty))
            found.append(self._event("response.function_call_arguments.delta", **call_where, delta=call.arguments))
            done = {"name": call.name, "arguments": call.arguments}
            found.append(self._event("response.function_call_arguments.done", **call_where, **done))
            found.append(self._event("response.output_item.done", output_index=number, item=item))
        return found

    def _reasoning_events(self, text: str, begun: bool) -> list[bytes]:
        """The events of new reasoning."""
        where = {"item_id": self.reasoning_id, "output_index": 0, "content_index": 0}
        found = []
        if not begun:
            item = self._reasoning_item("in_progress")
            found.append(self._event("response.output_item.added", output_index=0, item=item))
        return [*found, self._event("response.reasoning_text.delta", **where, delta=text)]

    def _reasoning_end(self) -> list[bytes]:
        self._reasoned = True
        where = {"item_id": self.reasoning_id, "output_index": 0, "content_index": 0}
        done = self._event("response.reasoning_text.done", **where, text=self.reader.reasoning)
        status = "completed" if self.status == "in_progress" else self.status
        item = self._reasoning_item(status)
        return [done, self._event("response.output_item.done", output_index=0, item=item)]

    def _message_end(self) -> list[bytes]:
        index = int(bool(self.reader.reasoning))
        where = {"item_id": self.message_id, "output_index": index, "content_index": 0}
        return [
            self._event("response.output_text.done", **where, text=self.said, logprobs=[]),
            self._event("response.content_part.done", **where, part=_part(self.said)),
            self._event("response.output_item.done", output_index=index, item=self._message(self.said)),
        ]


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
