"""Request bodies. Unknown fields and unsupported values are refused by name. A null field counts as absent."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

MOST_STOPS = 16
MOST_BIASES = 1024
MOST_CHOICES = 64
MOST_BUDGET = 1024
TOKEN_LIMIT = 1 << 31
"""Token ids and lengths are 32-bit integers."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "truncation": ("disabled",),
    "best_of": (1,),
    "background": (False,),
    "suffix": ("",),
}
"""OpenAI fields that are accepted only with values that have no effect."""


class Body(BaseModel):
    """Base of all bodies. Types are strict: "5" is not a number."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, populate_by_name=True)

    @model_validator(mode="before")
    @classmethod
    def _neutral(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for name in NEUTRAL.keys() & cls.model_fields.keys():
            if values.get(name) is not None and values[name] not in NEUTRAL[name]:
                raise ValueError(f"{name}={values[name]!r:.40} is not supported; leave it out")
        return values


class StreamOptions(Body):
    include_usage: bool | None = None


class LookaheadOptions(Body):
    """W, N, G, K and the sources, as in `LookaheadConfig`."""

    window: Annotated[int, Field(ge=0, le=256)] | None = None
    ngram: Annotated[int, Field(ge=2, le=64)] | None = None
    guesses: Annotated[int, Field(ge=0, le=256)] | None = None
    budget: Annotated[int, Field(ge=1, le=MOST_BUDGET)] | None = None
    sources: list[str] | None = None


class StreamedLookahead(LookaheadOptions):
    """Adds per-step details to a stream: statistics with `steps`, and the token tree with `trace`."""

    steps: bool | None = None
    trace: bool | None = None


class TextPart(Body):
    """A text part of a message's content. Images, audio and files are not supported."""

    type: Literal["text", "input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


Content = str | list[TextPart]


class Generation(Body):
    """Fields that completions and chats share."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=TOKEN_LIMIT)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=TOKEN_LIMIT)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: str | Annotated[list[str], Field(max_length=MOST_STOPS)] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MOST_BIASES)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=TOKEN_LIMIT)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    lookahead: bool | StreamedLookahead | None = None
    store: bool | None = None
    service_tier: str | None = None

    @field_validator("stop")
    @classmethod
    def _stops(cls, stop: str | list[str] | None) -> str | list[str] | None:
        if stop == "" or (isinstance(stop, list) and "" in stop):
            raise ValueError("a stop string must not be empty")
        return stop

    @model_validator(mode="after")
    def _options(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options belongs to stream=true; leave it out")
        if self.streams_steps and not self.stream:
            raise ValueError("lookahead.steps and lookahead.trace belong to stream=true; leave them out")
        return self

    @property
    def streams_steps(self) -> bool:
        """Whether the stream has per-step details."""
        return isinstance(self.lookahead, StreamedLookahead) and bool(self.lookahead.steps or self.lookahead.trace)

    @property
    def traced(self) -> bool:
        """Whether they include the token trees."""
        return isinstance(self.lookahead, StreamedLookahead) and bool(self.lookahead.trace)


class CompletionBody(Generation):
    """The body of `/v1/completions`."""

    prompt: str | list[str] | list[Annotated[int, Field(ge=0, lt=TOKEN_LIMIT)]] | list[list[int]]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    max_tokens: Annotated[int, Field(ge=0, lt=TOKEN_LIMIT)] | None = None
    best_of: int | None = None
    suffix: str | None = None

    @model_validator(mode="after")
    def _max_tokens(self) -> CompletionBody:
        if self.max_tokens == 0 and (self.stream or not self.echo or self.logprobs is None):
            raise ValueError("max_tokens=0 is for echo with logprobs, not streamed; otherwise give at least 1")
        return self


class FunctionCall(Body):
    name: str
    arguments: str


class ToolCall(Body):
    id: str
    type: Literal["function"]
    function: FunctionCall
    index: int | None = None


class Message(Body):
    """A chat message. `developer` is treated as `system`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None


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


class ChatBody(Generation):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=TOKEN_LIMIT)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None
    modalities: list[str] | None = None

    @model_validator(mode="after")
    def _compatible(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens and max_completion_tokens mean the same; give one of them")
        return self


class TokenizeBody(Body):
    """Text, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _prompt_or_messages(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0, lt=TOKEN_LIMIT)]]


def text_of(content: Content | None) -> str:
    """A content's text."""
    if content is None:
        return ""
    return content if isinstance(content, str) else "".join(part.text for part in content)
