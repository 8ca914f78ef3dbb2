"""Tool calling: the grammar of a model's calls, and how they are parsed.

Two call formats are supported, inferred from a chat template with tools: `hermes` (Hermes, Qwen and many others: JSON
between <tool_call> tags) or `llama` (Llama 3: the entire answer is JSON). If the template has no tools, as in the
embedded model, a system message lists them and requests `hermes` calls (see `prompts`).
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lookahead.serve.chat_protocol import ChatBody, NamedTool, Tool
from lookahead.serve.errors import bad_request
from lookahead.serve.grammar import ANY_OBJECT, embedded_json
from lookahead.serve.nesting import too_deep
from lookahead.serve.surrogates import is_text

BEGIN, END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
BEGUN = {
    "hermes": re.compile(rf"\s*{BEGIN}\s*(\{{|$)"),
    "llama": re.compile(rf'\s*({re.escape(PYTHON_TAG)}|\{{\s*"name")'),
}
"""How a call begins."""
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
    """The tools of one request. `knows`: the chat template supports tools; `must`: a call is required; `single`: at
    most one call is allowed."""

    tools: tuple[Tool, ...] = ()
    style: str = "hermes"
    knows: bool = False
    must: bool = False
    single: bool = False

    @property
    def names(self) -> set[str]:
        return {tool.function.name for tool in self.tools}

    def described(self) -> list[dict[str, Any]]:
        """The tools in the format of chat templates."""
        return [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in self.tools]

    def grammar(
        self, answer: dict[str, Any] | None = None, special: Callable[[str], int | None] = lambda tag: None
    ) -> str | None:
        """The grammar of the reply, or None if any text is allowed. `answer` is the schema of a reply without calls,
        and `special` the id of a tag that must be named by it (see `Grammars.special_token`).

        A `strict` tool enforces its schema once a call has started. If the reply must be a call, or an answer with a
        schema, all tools do.
        """
        strict = any(tool.function.strict for tool in self.tools)
        bound = self.must or answer is not None
        if not self.tools or not (bound or (strict and self.style == "hermes")):
            return None
        rules = [f"call_{number}: {self._call(tool)}" for number, tool in enumerate(self.tools)]
        rules.append("body: " + " | ".join(f"call_{number}" for number in range(len(self.tools))))
        start = "start: calls"
        if answer is not None and not self.must:
            if self.style == "llama":  # both are JSON objects, which the lexer cannot tell apart early
                raise bad_request(
                    "response_format and tools cannot be combined for this model, whose calls have no tags; drop "
                    "one, or set tool_choice to 'none' or 'required'",
                    "response_format",
                )
            start = "start: answer | calls"
            rules.append(f"answer: {embedded_json(answer)}")
        begin, end = (json.dumps(tag) if (id := special(tag)) is None else f"<[{id}]>" for tag in (BEGIN, END))
        if self.style == "llama":
            rules.append("calls: body")
        elif bound:
            rules += [f"calls: call{'' if self.single else ' (SEPARATOR call)*'}", f"call: {begin} body {end}"]
            rules.append(r'SEPARATOR: "\n"')
        else:
            tag = f"tag: TEXT {begin}" if special(BEGIN) is not None else f"tag[lazy]: TEXT {begin}"
            rules += ["calls: tagged* TEXT", tag, f"tagged: tag body {end}", TEXT]
        return "\n".join(["%llguidance {}", start, *rules])

    def _call(self, tool: Tool) -> str:
        key, before, after = ("parameters", "", "") if self.style == "llama" else ("arguments", "\n", "\n")
        head = f'{before}{{"name": {json.dumps(tool.function.name)}, "{key}": '
        schema = tool.function.parameters or ANY_OBJECT
        return f"{json.dumps(head)} {embedded_json(schema)} {json.dumps('}' + after)}"

    def reader(self) -> CallReader:
        return CallReader(self)


def toolbox(body: ChatBody, template: str) -> Toolbox:
    """The tools of a request, filtered by `tool_choice`."""
    choice, tools = body.tool_choice, tuple(body.tools or ())
    if not tools:
        if choice not in (None, "none", "auto"):
            raise bad_request("tool_choice requires a call, and there are no tools; give tools", "tool_choice")
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
    """The call format of a chat template, and whether it supports tools at all."""
    if not re.search(r"\btools\b", template):
        return "hermes", False
    if BEGIN not in template and ("ipython" in template or PYTHON_TAG in template):
        return "llama", True
    return "hermes", True


class CallReader:
    """Splits streamed text into message text and tool calls.

    Text that may turn out to be a call is held back until that is decided.
    """

    def __init__(self, box: Toolbox) -> None:
        self.box = box
        self.calls: list[Call] = []
        self._held = ""
        self._called = False  # the last output was a call
        self._said = False  # text was emitted already: no `llama` call can follow

    def push(self, text: str) -> tuple[str, list[Call]]:
        """Add text. Returns the message text, and the calls that are complete."""
        self._held += text
        if self._called:  # drop line breaks after a call
            self._held = self._held.lstrip("\n")
        if not self.box.tools:
            return self._release(len(self._held)), []
        return self._push_llama() if self.box.style == "llama" else self._push_hermes()

    def finish(self, cut: bool = False) -> tuple[str, list[Call]]:
        """The text has ended: what was held back is either a call or text. Half a call is neither, and dropped: `cut`
        says that the text has ended early."""
        calls = []
        if self.box.tools and self._held.strip():
            body = self._held.strip().removeprefix(PYTHON_TAG) if self.box.style == "llama" else ""
            if self.box.style == "hermes" and self._held.lstrip().startswith(BEGIN):
                body = self._held.strip().removeprefix(BEGIN)  # cut off before its end tag
            calls = self._parse(body)
        if calls or self.box.must or (cut and self.box.tools and BEGUN[self.box.style].match(self._held)):
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
            else:  # tags around something that is not a call
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
        """The calls in a JSON object or a list of objects; empty if it is anything else."""
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
    """Arguments as sent to the client. A lone surrogate, which a model can write as an escape, stays an escape."""
    if isinstance(arguments, str):
        return arguments.encode("utf-8", "replace").decode()
    return json.dumps(arguments, ensure_ascii=not is_text(arguments))
