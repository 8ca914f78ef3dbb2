"""The bodies of `/v1/messages`, Anthropic's API: blocks, tools, thinking, and the same request as a chat."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from lookahead.serve.chat_protocol import Effort, thinking
from lookahead.serve.protocol import MOST_STOPS, TOKEN_LIMIT, Body, LookaheadOptions

NEEDED = {
    "text": ("text",),
    "thinking": ("thinking",),
    "redacted_thinking": (),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
}
"""The fields of each type of block. What they say about caches, citations, signatures and callers is ignored."""


class TextBlock(Body):
    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = None
    citations: list[Any] | None = None


class Block(Body):
    """A block of a message. Images and documents are not supported."""

    type: Literal["text", "thinking", "redacted_thinking", "tool_use", "tool_result"]
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    signature: str | None = None
    data: str | None = None
    cache_control: dict[str, Any] | None = None
    citations: list[Any] | None = None
    caller: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _required_fields(self) -> Block:
        for name in NEEDED[self.type]:
            if getattr(self, name) is None:
                raise ValueError(f"a block of type {self.type!r} needs {name!r}")
        return self


class InputMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]

    def as_chat(self) -> list[dict[str, Any]]:
        """The message in the format of chats: each tool result is a message of its own."""
        blocks = [Block(type="text", text=self.content)] if isinstance(self.content, str) else self.content
        text = "\n".join(block.text or "" for block in blocks if block.type == "text")
        found: dict[str, Any] = {"role": self.role, "content": text}
        thoughts = "\n".join(block.thinking or "" for block in blocks if block.type == "thinking")
        if thoughts:
            found["reasoning_content"] = thoughts
        calls = [_call(block) for block in blocks if block.type == "tool_use"]
        if calls:
            found["tool_calls"] = calls
        results = [_result(block) for block in blocks if block.type == "tool_result"]
        return [*results, found] if text or not results else results


def _call(block: Block) -> dict[str, Any]:
    function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
    return {"id": block.id, "type": "function", "function": function}


def _result(block: Block) -> dict[str, Any]:
    """A tool's result. Chats cannot mark one as an error, so its text says it."""
    text = text_of_blocks(block.content)
    return {
        "role": "tool",
        "tool_call_id": block.tool_use_id,
        "content": f"Error: {text}" if block.is_error else text,
    }


def text_of_blocks(content: str | list[TextBlock] | None) -> str:
    """The text of a content, with a line for each block."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(block.text for block in content)


class MessagesTool(Body):
    """A function of the client's. Tools of Anthropic's servers are not supported."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None
    eager_input_streaming: bool | None = None
    input_examples: list[dict[str, Any]] | None = None

    def as_chat(self) -> dict[str, Any]:
        fields = {"name": self.name, "description": self.description, "strict": self.strict}
        function = {name: value for name, value in fields.items() if value is not None}
        return {"type": "function", "function": {**function, "parameters": self.input_schema}}


class MessagesToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def as_chat(self) -> Any:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name or ""}}
        return {"auto": "auto", "any": "required", "none": "none"}[self.type]


class Thinking(Body):
    """A budget cannot be kept, so it is ignored: `max_tokens` counts the reasoning, too."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    effort: Effort | None = None
    format: OutputFormat | None = None


class CountBody(Body):
    """The body of `/v1/messages/count_tokens`: what makes the prompt. The last seven fields are ignored."""

    model: str | None = None
    messages: Annotated[list[InputMessage], Field(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    diagnostics: dict[str, Any] | None = None
    inference_geo: str | None = None
    speed: str | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None

    @property
    def thinks(self) -> bool:
        """Whether the client wants the model to think, and to see it."""
        return self.thinking is not None and self.thinking.type != "disabled"

    def chat_fields(self) -> dict[str, Any]:
        """The fields of the same request as a chat. A last message of the assistant is continued."""
        messages: list[dict[str, Any]] = []
        if system := text_of_blocks(self.system):
            messages.append({"role": "system", "content": system})
        for message in self.messages:
            for one in message.as_chat():
                _append(messages, one)
        config, choice = self.output_config or OutputConfig(), self.tool_choice
        fields = {
            "messages": messages,
            "continue_final_message": True if self.messages[-1].role == "assistant" else None,
            "tools": [tool.as_chat() for tool in self.tools or ()] or None,
            "tool_choice": None if choice is None else choice.as_chat(),
            "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
            "chat_template_kwargs": {**thinking(self.thinks), **(self.chat_template_kwargs or {})},
            "reasoning_effort": config.effort,
        }
        if config.format is not None:
            schema = {"name": "reply", "schema": config.format.schema_}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return fields


def _append(messages: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Add a message. Turns of the same role that follow each other are one: templates expect them to alternate."""
    last = messages[-1] if messages else {}
    if message["role"] not in ("user", "assistant") or last.get("role") != message["role"]:
        messages.append(message)
        return
    for name in ("content", "reasoning_content"):
        if texts := [text for text in (last.get(name), message.get(name)) if text]:
            last[name] = "\n".join(texts)
    if calls := [*last.get("tool_calls", ()), *message.get("tool_calls", ())]:
        last["tool_calls"] = calls


class MessagesBody(CountBody):
    """The body of `/v1/messages`. `seed`, `min_p` and `lookahead` are this server's."""

    max_tokens: Annotated[int, Field(ge=1, lt=TOKEN_LIMIT)]
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=TOKEN_LIMIT)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop_sequences: Annotated[list[str], Field(max_length=MOST_STOPS)] | None = None
    stream: bool | None = None
    lookahead: bool | LookaheadOptions | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    thread: dict[str, Any] | None = None

    def chat_fields(self) -> dict[str, Any]:
        names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed")
        shows = self.thinks and self.thinking is not None and self.thinking.display != "omitted"
        return {
            **super().chat_fields(),
            **{name: getattr(self, name) for name in names},
            "stop": self.stop_sequences,
            "lookahead": self.lookahead.model_dump() if isinstance(self.lookahead, Body) else self.lookahead,
            "include_reasoning": shows,
        }
