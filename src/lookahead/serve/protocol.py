"""Request bodies. Unknown fields and unsupported values are refused by name. A null field counts as absent."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

MOST_STOPS = 16
MOST_STOP_IDS = 1024
MOST_OPTIONS = 1024
MOST_BIASES = 1024
MOST_CHOICES = 64
MOST_BUDGET = 1024
TOKEN_LIMIT = 1 << 31
"""Token ids and lengths are 32-bit integers."""

TokenId = Annotated[int, Field(ge=0, lt=TOKEN_LIMIT)]

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "truncation": ("disabled",),
    "best_of": (1,),
    "background": (False,),
    "suffix": ("",),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "include_stop_str_in_output": (False,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "continuous_usage_stats": (False,),
}
"""Fields of OpenAI's and vLLM's clients that are accepted only with values that have no effect."""

INSTEAD: dict[str, str] = {
    "functions": "give tools",
    "function_call": "give tool_choice",
    "audio": "this server writes text only; leave it out",
    "web_search_options": "this server searches nothing; give a tool of your own",
    "moderation": "this server moderates nothing; leave it out",
    "previous_response_id": "nothing is stored; send the earlier items in input",
    "conversation": "nothing is stored; send the earlier items in input",
    "context_management": "nothing is shortened; leave it out, and send fewer items",
    "chat_template": "the model's own template is used; give chat_template_kwargs for its variables",
    "guided_whitespace_pattern": "white space is fixed; leave it out",
    "structural_tag": "give tools, or a Lark grammar",
}
"""Fields that would change the reply and are not supported: what to do instead."""


class Body(BaseModel):
    """Base of all bodies. Types are strict: "5" is not a number."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, populate_by_name=True)

    @model_validator(mode="before")
    @classmethod
    def _neutral(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for name in INSTEAD.keys() & values.keys() - cls.model_fields.keys():
            if values[name] is not None:
                raise ValueError(f"{name} is not supported: {INSTEAD[name]}")
            values = {key: value for key, value in values.items() if key != name}
        for name in NEUTRAL.keys() & cls.model_fields.keys():
            if values.get(name) is not None and values[name] not in NEUTRAL[name]:
                raise ValueError(f"{name}={values[name]!r:.40} is not supported; leave it out")
        return values


class Ignored(Body):
    """Fields of ordinary clients that change nothing in a reply. They are accepted and ignored."""

    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    priority: int | None = None
    request_id: str | None = None


class StreamOptions(Body):
    """`include_obfuscation` is ignored: nothing is padded."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


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
    """A text part of a message's content. Images, audio and files are not supported. What it says about caches is
    ignored."""

    type: Literal["text", "input_text", "output_text", "reasoning_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    cache_control: dict[str, Any] | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None


Content = str | list[TextPart]


Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MOST_OPTIONS)]


class StructuredOutputs(Body):
    """vLLM's constraints on a reply, of which one may be given. What JSON may contain besides the schema and how it is
    spaced is fixed, so that the last two are ignored."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_fallback: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None


class Generation(Ignored):
    """Fields that completions and chats share. The `guided` ones are vLLM's older names for `structured_outputs`."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=TOKEN_LIMIT)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=TOKEN_LIMIT)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: str | Annotated[list[str], Field(max_length=MOST_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MOST_STOP_IDS)] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MOST_BIASES)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=TOKEN_LIMIT)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    lookahead: bool | StreamedLookahead | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: str | None = None

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
        if len(given := self.constraints()) > 1:
            raise ValueError(f"a reply can follow one of {' and '.join(sorted(given))}; leave out the others")
        return self

    def constraints(self) -> dict[str, Any]:
        """The constraints on the reply by their kind: json, json_object, regex, choice or grammar."""
        whole = self.structured_outputs or StructuredOutputs()
        given = {"json_object": whole.json_object or None}
        for kind in ("json", "regex", "choice", "grammar"):
            own, older = getattr(whole, "json_" if kind == "json" else kind), getattr(self, f"guided_{kind}")
            if own is not None and older is not None:
                raise ValueError(f"structured_outputs.{kind} and guided_{kind} mean the same; give one of them")
            given[kind] = older if own is None else own
        return {kind: value for kind, value in given.items() if value is not None}

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

    prompt: str | list[str] | list[TokenId] | list[list[int]]
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


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[TokenId]


def text_of(content: Content | None) -> str:
    """A content's text."""
    if content is None:
        return ""
    return content if isinstance(content, str) else "".join(part.text for part in content)
