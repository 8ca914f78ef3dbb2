"""Tools: how a model is told of functions, how it writes a call, and how calls are read back from its text.

Two ways to write calls are known. A chat template that knows tools shows which is its own: `hermes` (Hermes, Qwen and
many others: JSON between <tool_call> tags) or `llama` (Llama 3: the whole answer is JSON). Where the template knows no
tools, such as that of the embedded model, a system message of ours lists them and asks for `hermes` calls.
"""

from __future__ import annotations

import contextlib
import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lookahead.serve.errors import bad_request
from lookahead.serve.grammar import ANY_OBJECT, embedded_json
from lookahead.serve.nesting import MOST_DEPTH, too_deep
from lookahead.serve.protocol import ChatBody, Message, NamedTool, Tool, text_of
from lookahead.serve.surrogates import is_text

BEGIN, END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
TEXT = r"TEXT: /(.|\n)*/"


@dataclass(frozen=True)
class Call:
    """A function call that a model has written. `arguments` is JSON."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    def record(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class Toolbox:
    """The tools of one request. `must` means that the model has to call; `single` that it may call only once."""

    tools: tuple[Tool, ...] = ()
    style: str = "hermes"
    knows: bool = False
    must: bool = False
    single: bool = False

    @property
    def names(self) -> set[str]:
        return {tool.function.name for tool in self.tools}

    def described(self) -> list[dict[str, Any]]:
        """The tools as chat templates take them."""
        return [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in self.tools]

    def grammar(self, answer: dict[str, Any] | None = None) -> str | None:
        """The grammar of the reply: None where any text will do. `answer` is the schema of a reply that calls nothing.

        A tool that is `strict` holds the model to its schema, once it has begun a call. Where the reply must be a call,
        or an answer that follows a schema, all tools do.
        """
        strict = any(tool.function.strict for tool in self.tools)
        bound = self.must or answer is not None
        if not self.tools or not (bound or (strict and self.style == "hermes")):
            return None
        rules = [f"call_{number}: {self._call(tool)}" for number, tool in enumerate(self.tools)]
        rules.append("body: " + " | ".join(f"call_{number}" for number in range(len(self.tools))))
        start = "start: calls"
        if answer is not None and not self.must:
            if self.style == "llama":  # both are JSON objects, between which a grammar's lexer cannot choose late
                raise bad_request(
                    "response_format and tools do not go together here, as the calls of this model have no tags; drop "
                    "one, or set tool_choice to 'none' or 'required'",
                    "response_format",
                )
            start = "start: answer | calls"
            rules.append(f"answer: {embedded_json(answer)}")
        if self.style == "llama":
            rules.append("calls: body")
        elif bound:
            rules += [f"calls: call{'' if self.single else ' (SEPARATOR call)*'}", f'call: "{BEGIN}" body "{END}"']
            rules.append(r'SEPARATOR: "\n"')
        else:
            rules += ["calls: tagged* TEXT", f'tag[lazy]: TEXT "{BEGIN}"', f'tagged: tag body "{END}"', TEXT]
        return "\n".join(["%llguidance {}", start, *rules])

    def _call(self, tool: Tool) -> str:
        key, before, after = ("parameters", "", "") if self.style == "llama" else ("arguments", "\n", "\n")
        head = f'{before}{{"name": {json.dumps(tool.function.name)}, "{key}": '
        schema = tool.function.parameters or ANY_OBJECT
        return f"{json.dumps(head)} {embedded_json(schema)} {json.dumps('}' + after)}"

    def reader(self) -> CallReader:
        return CallReader(self)


def toolbox(body: ChatBody, template: str) -> Toolbox:
    """The tools that a request offers, as `tool_choice` narrows them down."""
    choice, tools = body.tool_choice, tuple(body.tools or ())
    if not tools:
        if choice not in (None, "none", "auto"):
            raise bad_request("tool_choice asks for a call, and there are no tools; give tools", "tool_choice")
        return Toolbox()
    if choice == "none":
        return Toolbox()
    must = choice == "required" or isinstance(choice, NamedTool)
    if isinstance(choice, NamedTool):
        known = [tool.function.name for tool in tools]
        tools = tuple(tool for tool in tools if tool.function.name == choice.function.name)
        if not tools:
            name = choice.function.name
            raise bad_request(f"tool_choice: no tool {name!r}; there is {', '.join(known)}", "tool_choice")
    style, knows = style_of(template)
    single = isinstance(choice, NamedTool) or body.parallel_tool_calls is False
    return Toolbox(tools, style, knows, must, single)


def style_of(template: str) -> tuple[str, bool]:
    """How a chat template writes calls, and whether it knows tools at all."""
    if not re.search(r"\btools\b", template):
        return "hermes", False
    if BEGIN not in template and ("ipython" in template or PYTHON_TAG in template):
        return "llama", True
    return "hermes", True


def template_messages(messages: Sequence[Message], box: Toolbox, template: str) -> list[dict[str, Any]]:
    """Messages as chat templates take them. Where a template knows no tools, calls and results become text."""
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
    calls = message.tool_calls or ()
    if knows:
        if calls:
            found["tool_calls"] = [_as_object(call.model_dump(exclude={"index"})) for call in calls]
        if message.tool_call_id is not None:
            found["tool_call_id"] = message.tool_call_id
        return found
    written = [f"{BEGIN}\n{_written(call.function.name, call.function.arguments)}\n{END}" for call in calls]
    found["content"] = "\n".join(part for part in (found["content"], *written) if part)
    return found


def _as_object(call: dict[str, Any]) -> dict[str, Any]:
    """Templates write the arguments as JSON themselves, so they take them as an object, if they are one."""
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
    """The system message for models whose template knows no tools."""
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in box.described())
    example = _written("NAME", "{...}")  # small models copy whatever arguments stand here
    return (
        f"You can call these functions, each given as JSON:\n{lines}\n\n"
        f"To call one, write its name and its arguments as JSON between tags:\n{BEGIN}\n{example}\n{END}"
    )


class CallReader:
    """Splits a text that comes in pieces into what is said and what is called.

    Text that may turn out to be a call is held back until that is clear.
    """

    def __init__(self, box: Toolbox) -> None:
        self.box = box
        self.calls: list[Call] = []
        self._held = ""
        self._called = False  # the last thing was a call
        self._said = False  # something was said already: then no `llama` call can come

    def push(self, text: str) -> tuple[str, list[Call]]:
        """More text. Returns what is said, and the calls that are complete."""
        self._held += text
        if self._called:  # line breaks after a call belong to nobody
            self._held = self._held.lstrip("\n")
        if not self.box.tools:
            return self._release(len(self._held)), []
        return self._push_llama() if self.box.style == "llama" else self._push_hermes()

    def finish(self) -> tuple[str, list[Call]]:
        """The text has ended. What was held back is a call, or was none."""
        calls = []
        if self.box.tools and self._held.strip():
            body = self._held.strip().removeprefix(PYTHON_TAG) if self.box.style == "llama" else ""
            if self.box.style == "hermes" and self._held.lstrip().startswith(BEGIN):
                body = self._held.strip().removeprefix(BEGIN)  # cut off before its end tag
            calls = self._parse(body)
        if calls:
            self._held = ""
        return self._release(len(self._held)), self._keep(calls)

    def _push_llama(self) -> tuple[str, list[Call]]:
        start = self._held.lstrip()
        if not self._said and (not start or start[0] == "{" or PYTHON_TAG.startswith(start[: len(PYTHON_TAG)])):
            return "", []
        return self._release(len(self._held)), []

    def _push_hermes(self) -> tuple[str, list[Call]]:
        said, calls = "", list[Call]()
        while True:
            begin = self._held.find(BEGIN)
            if begin < 0:
                pending = next((n for n in range(len(BEGIN) - 1, 0, -1) if self._held.endswith(BEGIN[:n])), 0)
                return said + self._release(len(self._held) - pending), self._keep(calls)
            said += self._release(begin)
            end = self._held.find(END)
            if end < 0:
                return said, self._keep(calls)
            found = self._parse(self._held[len(BEGIN) : end])
            if found:
                calls += found
                self._held = self._held[end + len(END) :].lstrip("\n")
                self._called = True
            else:  # tags around something that is no call
                said += self._release(end + len(END))

    def _keep(self, calls: list[Call]) -> list[Call]:
        if self.box.single:
            calls = calls[: max(0, 1 - len(self.calls))]
        self.calls += calls
        return calls

    def _release(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        self._said = self._said or bool(text.strip())
        self._called = self._called and not text
        return text

    def _parse(self, body: str) -> list[Call]:
        """The calls of a JSON object, or of a list of them. None if it is anything else."""
        try:
            found = None if too_deep(body) else json.loads(body)
        except ValueError:
            return []
        calls = []
        for one in found if isinstance(found, list) else [found]:
            if not isinstance(one, Mapping) or not isinstance(name := one.get("name"), str):
                return []
            if name not in self.box.names:
                return []
            arguments = one.get("arguments", one.get("parameters", {}))
            calls.append(Call(name, _as_text(arguments)))
        return calls


def _as_text(arguments: Any) -> str:
    """Arguments as a client gets them. Half a character, which a model can write as an escape, stays an escape."""
    if isinstance(arguments, str):
        return arguments.encode("utf-8", "replace").decode()
    return json.dumps(arguments, ensure_ascii=not is_text(arguments))
