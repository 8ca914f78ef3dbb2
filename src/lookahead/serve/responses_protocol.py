"""The request body of `/v1/responses`: input items, functions, and the text format."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from lookahead.serve.chat_protocol import Effort
from lookahead.serve.protocol import TOKEN_LIMIT, Body, Content, Ignored, LookaheadOptions, text_of

LOGPROBS = "message.output_text.logprobs"


class InputItem(Body):
    """A message, the model's earlier reasoning, a call that it made, or the output of such a call."""

    type: Literal["message", "reasoning", "function_call", "function_call_output"] | None = None
    id: str | None = None
    status: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Content | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Content | None = None
    summary: list[dict[str, Any]] | None = None
    encrypted_content: str | None = None

    @model_validator(mode="after")
    def _required_fields(self) -> InputItem:
        needed = {
            "function_call": ("call_id", "name", "arguments"),
            "function_call_output": ("call_id", "output"),
            "reasoning": (),
        }.get(self.type or "message", ("role", "content"))
        for name in needed:
            if getattr(self, name) is None:
                raise ValueError(f"an item of type {self.type or 'message'!r} needs {name!r}")
        return self

    def as_message(self) -> dict[str, Any]:
        """The item as a chat message; not for reasoning."""
        if self.type == "function_call":
            function = {"name": self.name, "arguments": self.arguments}
            call = {"id": self.call_id, "type": "function", "function": function}
            return {"role": "assistant", "tool_calls": [call]}
        if self.type == "function_call_output":
            return {"role": "tool", "tool_call_id": self.call_id, "content": text_of(self.output)}
        return {"role": self.role, "content": text_of(self.content)}


class FlatFunction(Body):
    """A function whose fields are siblings of its type."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def as_chat(self) -> dict[str, Any]:
        fields = self.model_dump(exclude={"type"}, exclude_none=True)
        return {"type": "function", "function": fields}


class FlatName(Body):
    type: Literal["function"]
    name: str


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextOptions(Body):
    """`verbosity` is ignored."""

    format: TextFormat | None = None
    verbosity: str | None = None

    def as_chat(self) -> dict[str, Any] | None:
        if self.format is None:
            return None
        if self.format.type != "json_schema":
            return {"type": self.format.type}
        return {
            "type": "json_schema",
            "json_schema": {"name": self.format.name or "reply", "schema": self.format.schema_},
        }


class Reasoning(Body):
    """`effort` is passed to the chat template. The others are ignored: reasoning is returned whole, not summarized."""

    effort: Effort | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None


class ResponsesStreamOptions(Body):
    include_obfuscation: bool | None = None


class ResponsesBody(Ignored):
    """The body of `/v1/responses`. `include` adds nothing, since there are no tools of the server's own, and
    `max_tool_calls` limits only those."""

    model: str | None = None
    input: str | Annotated[list[InputItem], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=TOKEN_LIMIT)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=TOKEN_LIMIT)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stream: bool | None = None
    text: TextOptions | None = None
    tools: list[FlatFunction] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatName | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = None
    max_tool_calls: int | None = None
    top_logprobs: Literal[0] | None = None
    stream_options: ResponsesStreamOptions | None = None
    lookahead: bool | LookaheadOptions | None = None
    truncation: str | None = None
    background: bool | None = None

    @field_validator("include")
    @classmethod
    def _include(cls, given: list[str] | None) -> list[str] | None:
        if LOGPROBS in (given or ()):
            raise ValueError(f"{LOGPROBS!r} is not supported; leave it out, or use /v1/chat/completions")
        return given

    def chat_choice(self) -> Any:
        """`tool_choice` in the chat format."""
        if isinstance(self.tool_choice, FlatName):
            return {"type": "function", "function": {"name": self.tool_choice.name}}
        return self.tool_choice
