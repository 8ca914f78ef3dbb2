"""The bodies of chats: messages, tools, response formats and predicted outputs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from lookahead.serve.protocol import TOKEN_LIMIT, Body, Content, Generation


class FunctionCall(Body):
    name: str
    arguments: str


class ToolCall(Body):
    """A call of an earlier message. What LiteLLM has noted on it is ignored."""

    id: str
    type: Literal["function"]
    function: FunctionCall
    index: int | None = None
    provider_specific_fields: dict[str, Any] | None = None


class Message(Body):
    """A chat message. `developer` is treated as `system`. Reasoning is what the assistant thought before it; vLLM has
    two names for it. The last two fields are ignored: LiteLLM sends them back in its own messages, and they repeat
    what others say."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    thinking_blocks: list[dict[str, Any]] | None = None
    provider_specific_fields: dict[str, Any] | None = None


class Function(Body):
    name: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[\w.-]+$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


class JsonSchema(Body):
    name: str
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to type 'json_schema', which needs it")
        return self


class Prediction(Body):
    """Text that the output is expected to resemble."""

    type: Literal["content"]
    content: Content


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


RESERVED = {
    *("add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "max_length"),
    *("messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors"),
    *("sanitize_control_tokens", "tokenize", "tokenizer_kwargs", "tools", "truncation"),
}
"""What `apply_chat_template` takes that is not a variable of the template."""


class TemplateFields(Body):
    """Messages, and how the chat template writes them. With `continue_final_message` the last message, which is the
    assistant's, stays open, and the reply continues it."""

    messages: list[Message] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @field_validator("chat_template_kwargs")
    @classmethod
    def _variables(cls, given: dict[str, Any] | None) -> dict[str, Any] | None:
        for name in sorted(RESERVED & (given or {}).keys()):
            raise ValueError(f"{name!r} is not a variable of the chat template; leave it out")
        return given

    @model_validator(mode="after")
    def _continued(self) -> TemplateFields:
        if not self.continue_final_message:
            return self
        if self.add_generation_prompt:
            raise ValueError("continue_final_message continues the last message, and add_generation_prompt begins one")
        if not self.messages or self.messages[-1].role != "assistant" or self.messages[-1].tool_calls:
            raise ValueError("continue_final_message needs a last message of the assistant, without tool calls")
        return self

    def template_variables(self) -> dict[str, Any]:
        """Variables of the chat template, and options of `apply_chat_template`."""
        begins = not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt
        variables = {**(self.chat_template_kwargs or {}), "add_generation_prompt": begins}
        return {**variables, "continue_final_message": True} if self.continue_final_message else variables


class ChatBody(TemplateFields, Generation):
    """The body of `/v1/chat/completions`. `verbosity` is ignored.

    Without `include_reasoning` the reasoning is left out of the reply. Without `separate_reasoning`, SGLang's name, it
    stays in the content as the model wrote it.
    """

    messages: Annotated[list[Message], Field(min_length=1)]
    reasoning_effort: Effort | None = None
    verbosity: str | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=TOKEN_LIMIT)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None
    modalities: list[str] | None = None

    def template_variables(self) -> dict[str, Any]:
        """`reasoning_effort` becomes variables by the names that templates use; they ignore those they do not know."""
        variables: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
        if self.reasoning_effort == "none":
            variables |= thinking(False)
        return {**variables, **super().template_variables()}

    @model_validator(mode="after")
    def _compatible(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens and max_completion_tokens mean the same; give one of them")
        shaped = self.response_format is not None and self.response_format.type != "text"
        if shaped and (given := self.constraints()):
            raise ValueError(f"a reply can follow response_format or {', '.join(given)}; leave out one of them")
        return self


def thinking(on: bool) -> dict[str, Any]:
    """The variables that switch thinking on or off in the templates of Qwen, DeepSeek, Granite and others."""
    return {"enable_thinking": on, "thinking": on}


class TokenizeBody(TemplateFields):
    """Text, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: list[Tool] | None = None

    @model_validator(mode="after")
    def _prompt_or_messages(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self
