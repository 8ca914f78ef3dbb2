"""Chats as token ids: messages and tools in the format of chat templates, and the templates' other variables."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Any

from lookahead.generate import LookaheadModel
from lookahead.serve.chat_protocol import Message, TemplateFields
from lookahead.serve.errors import bad_request
from lookahead.serve.nesting import MOST_DEPTH, too_deep
from lookahead.serve.protocol import text_of
from lookahead.serve.surrogates import is_text
from lookahead.serve.tools import BEGIN, END, Toolbox, style_of


def encode_chat(model: LookaheadModel, template: str, body: TemplateFields, box: Toolbox) -> list[int]:
    """The prompt of a chat. Raises a 400 if the template refuses the messages."""
    messages = template_messages(body.messages or (), box, template)
    tools = box.described() if box.tools and box.knows else None
    try:
        return model.encode(messages, tools=tools, template_variables=body.template_variables())
    except ValueError as error:
        raise bad_request(f"messages: {error}", "messages") from error


def template_messages(messages: Sequence[Message], box: Toolbox, template: str) -> list[dict[str, Any]]:
    """Messages in the format of chat templates. If the template has no tools, calls and results become text."""
    knows = style_of(template)[1]
    found = [_template_message(message, knows) for message in messages]
    if box.tools and not knows:
        instructions = instruction(box)
        if found[0]["role"] == "system":
            found[0] = {**found[0], "content": f"{found[0]['content']}\n\n{instructions}"}
        else:
            found.insert(0, {"role": "system", "content": instructions})
    return found


def _template_message(message: Message, knows: bool) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    found: dict[str, Any] = {"role": role, "content": text_of(message.content)}
    if message.name is not None:
        found["name"] = message.name
    reasoning = message.reasoning_content or message.reasoning
    if reasoning:
        found["reasoning_content"] = reasoning
    calls = message.tool_calls or ()
    if knows:
        if calls:
            asked = {"id", "type", "function"}
            found["tool_calls"] = [_as_object(call.model_dump(include=asked)) for call in calls]
        if message.tool_call_id is not None:
            found["tool_call_id"] = message.tool_call_id
        return found
    written = [f"{BEGIN}\n{_written(call.function.name, call.function.arguments)}\n{END}" for call in calls]
    found["content"] = "\n".join(text for text in (found["content"], *written) if text)
    return found


def _as_object(call: dict[str, Any]) -> dict[str, Any]:
    """Templates encode the arguments themselves, so they are passed as an object if they parse as JSON."""
    arguments = call["function"]["arguments"]
    if too_deep(arguments):
        where = "messages[].tool_calls[].function.arguments"
        raise bad_request(f"{where} are nested more than {MOST_DEPTH} levels deep; flatten them", where, "too_deep")
    with contextlib.suppress(ValueError):
        parsed = json.loads(arguments)
        if is_text(parsed):
            call["function"]["arguments"] = parsed
    return call


def _written(name: str, arguments: str) -> str:
    return f'{{"name": {json.dumps(name)}, "arguments": {arguments or "{}"}}}'


def instruction(box: Toolbox) -> str:
    """The system message for models whose template has no tools."""
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in box.described())
    example = _written("NAME", "{...}")  # small models copy the arguments of an example
    return (
        f"You can call these functions, each given as JSON:\n{lines}\n\n"
        f"To call one, write its name and its arguments as JSON between tags:\n{BEGIN}\n{example}\n{END}"
    )
