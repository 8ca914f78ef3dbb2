"""Libraries that people point at the server, where they are installed: LangChain and LiteLLM.

Each is tried with a plain reply, a stream, tools, a structured reply, and what it reads from the usage.
`test_typed_clients.py` has instructor and Pydantic AI.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from forced import saying
from http_server import Running, running
from json_model import json_model, json_tokenizer
from pydantic import BaseModel

from lookahead import LookaheadConfig

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
TEXT = "one two three"
HELLO: Any = [{"role": "user", "content": "hello"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds one.",
        "parameters": {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]},
    },
}


class Person(BaseModel):
    """Somebody."""

    name: Literal["ann", "bob"]
    old: bool


def add(a: Literal[1, 2]) -> int:
    """Adds one."""
    return a + 1


@pytest.fixture
def thinking_server(settings: LookaheadConfig) -> Iterator[Running]:
    tokenizer = json_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"], special_tokens=False)
    with running(json_model(settings, tokenizer)) as server:
        yield server


# LangChain


@pytest.fixture
def langchain(json_server: Running) -> Any:
    package = pytest.importorskip("langchain_openai")
    url = f"{json_server.url}/v1"
    return package.ChatOpenAI(
        model=json_server.service.name, base_url=url, api_key="none", temperature=0, max_tokens=100, max_retries=0
    )


def test_langchain_whole_and_streamed(langchain: Any, json_server: Running) -> None:
    with saying(json_server, TEXT):
        whole = langchain.invoke([("system", "Be brief."), ("human", "hello")])
        chunks = list(langchain.stream("hello", stream_usage=True))
        other = asyncio.run(langchain.ainvoke("hello", stop=["three"]))
    assert whole.content == TEXT
    assert whole.response_metadata["finish_reason"] == "stop"
    assert whole.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.content for chunk in chunks) == TEXT
    (used,) = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert used["output_tokens"] == whole.usage_metadata["output_tokens"]
    assert other.content == "one two "


def test_langchain_tools_there_and_back(langchain: Any, json_server: Running) -> None:
    messages = pytest.importorskip("langchain_core.messages")
    forced = langchain.bind_tools([add], tool_choice="any", parallel_tool_calls=False, strict=True)
    made = forced.invoke("hello")
    (call,) = made.tool_calls
    assert call["name"] == "add"
    assert call["args"]["a"] in (1, 2)
    free = langchain.bind_tools([add])
    with saying(json_server, CALL):
        chunks = list(free.stream("hello"))
    final = chunks[0]
    for chunk in chunks[1:]:
        final += chunk
    assert [(one["name"], one["args"]) for one in final.tool_calls] == [("add", {"a": 2})]
    with saying(json_server, TEXT):
        history = [messages.HumanMessage("hello"), made, messages.ToolMessage("3", tool_call_id=call["id"])]
        assert free.invoke(history).content == TEXT


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_structured(langchain: Any, method: str) -> None:
    made = langchain.with_structured_output(Person, method=method).invoke("hello")
    assert isinstance(made, Person)


def test_langchain_over_responses(langchain: Any, json_server: Running) -> None:
    """It prefers that API where it is told to, and for some of OpenAI's own features."""
    over = langchain.model_copy(update={"use_responses_api": True})
    with saying(json_server, TEXT):
        made = over.invoke("hello")
        streamed = list(over.stream("hello"))
    assert made.text == TEXT
    assert "".join(chunk.text for chunk in streamed) == TEXT
    assert made.usage_metadata["output_tokens"] > 0
    called = over.bind_tools([add], tool_choice="any", parallel_tool_calls=False).invoke("hello")
    assert called.tool_calls[0]["args"]["a"] in (1, 2)
    assert over.with_structured_output(Person).invoke("hello").name in ("ann", "bob")


# LiteLLM


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would fetch its table of prices
    return pytest.importorskip("litellm")


def over_openai(server: Running, prefix: str = "openai", **more: Any) -> dict[str, Any]:
    asked = {"model": f"{prefix}/{server.service.name}", "api_base": f"{server.url}/v1", "api_key": "none"}
    return {**asked, "messages": HELLO, "max_tokens": 100, "temperature": 0, "num_retries": 0, **more}


@pytest.mark.parametrize("prefix", ["openai", "hosted_vllm"])
def test_litellm_whole_and_streamed(litellm: Any, json_server: Running, prefix: str) -> None:
    asked = over_openai(json_server, prefix)
    with saying(json_server, TEXT):
        whole = litellm.completion(**asked)
        chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
        other = asyncio.run(litellm.acompletion(**asked))
    assert whole.choices[0].message.content == other.choices[0].message.content == TEXT
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == TEXT
    (used,) = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
    assert used.completion_tokens == whole.usage.completion_tokens > 0


def test_litellm_tools_and_structured(litellm: Any, json_server: Running) -> None:
    asked = over_openai(json_server)
    made = litellm.completion(**asked, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    (call,) = made.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["a"] in (1, 2)
    with saying(json_server, CALL):
        chunks = list(litellm.completion(**asked, tools=[TOOL], stream=True))
    built = litellm.stream_chunk_builder(chunks)
    assert json.loads(built.choices[0].message.tool_calls[0].function.arguments) == {"a": 2}
    assert built.choices[0].finish_reason == "tool_calls"
    result = {"role": "tool", "tool_call_id": call.id, "name": "add", "content": "3"}
    history = [*HELLO, made.choices[0].message, result]
    with saying(json_server, TEXT):
        assert litellm.completion(**{**asked, "messages": history}).choices[0].message.content == TEXT
    shaped = litellm.completion(**asked, response_format=Person)
    assert Person.model_validate_json(shaped.choices[0].message.content)


def test_litellm_over_anthropics_api(litellm: Any, json_server: Running) -> None:
    asked = over_openai(json_server, "anthropic", api_base=json_server.url)
    with saying(json_server, TEXT):
        whole = litellm.completion(**asked)
        chunks = list(litellm.completion(**asked, stream=True))
    assert whole.choices[0].message.content == TEXT
    assert whole.usage.completion_tokens > 0
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
    made = litellm.completion(**asked, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    (call,) = made.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["a"] in (1, 2)
    with saying(json_server, CALL):
        streamed = litellm.stream_chunk_builder(list(litellm.completion(**asked, tools=[TOOL], stream=True)))
    assert json.loads(streamed.choices[0].message.tool_calls[0].function.arguments) == {"a": 2}
    result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
    history = [*HELLO, made.choices[0].message, result]
    with saying(json_server, TEXT):
        after = litellm.completion(**{**asked, "messages": history}, tools=[TOOL])
    assert after.choices[0].message.content == TEXT


def test_litellm_errors(litellm: Any, json_server: Running) -> None:
    with pytest.raises(litellm.NotFoundError, match="gpt-9"):
        litellm.completion(**over_openai(json_server, model="openai/gpt-9"))
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**over_openai(json_server, temperature=-1))


def test_litellm_sends_its_own_messages_back(litellm: Any, thinking_server: Running) -> None:
    """They carry its notes on the reasoning, which are not OpenAI's."""
    asked = over_openai(thinking_server, tools=[TOOL])
    with saying(thinking_server, f"<think>so</think>{CALL}", f"<think>then</think>{TEXT}"):
        first = litellm.completion(**asked).choices[0].message
        result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "3"}
        history = [*HELLO, first, result]
        second = litellm.completion(**{**asked, "messages": history}).choices[0].message
        assert (first.reasoning_content, second.reasoning_content) == ("so", "then")
        history += [second.model_dump(), *HELLO]
        assert litellm.completion(**{**asked, "messages": history}).choices[0].message.content == TEXT
