"""The `openai` package as people use it, against a real server: sync, async, streams, tools, parsing, responses."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from http_server import Running
from pydantic import BaseModel

SAID: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def client(json_server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{json_server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


class Person(BaseModel):
    name: Literal["ann", "bob"]
    old: bool


ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}


def test_models_and_completions(client: openai.OpenAI, json_server: Running) -> None:
    name = client.models.list().data[0].id
    assert client.models.retrieve(name).id == name == json_server.service.name
    made = client.completions.create(model=name, prompt="add", max_tokens=8, temperature=0, logprobs=1)
    assert made.usage is not None
    assert made.usage.completion_tokens == 8
    stream = client.completions.create(model=name, prompt="add", max_tokens=8, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == made.choices[0].text


def test_chats_whole_streamed_and_async(client: openai.OpenAI, json_server: Running) -> None:
    name = json_server.service.name
    asked: Any = {"model": name, "messages": SAID, "max_tokens": 12, "temperature": 0}
    text = client.chat.completions.create(**asked).choices[0].message.content
    stream = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage is not None

    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=f"{json_server.url}/v1", api_key="none") as other:
            whole = await other.chat.completions.create(**asked)
            parts = [
                chunk.choices[0].delta.content or ""
                async for chunk in await other.chat.completions.create(**asked, stream=True)
            ]
            assert "".join(parts) == whole.choices[0].message.content
            return "".join(parts)

    assert asyncio.run(ask()) == text


def test_parsed_and_called(client: openai.OpenAI, json_server: Running) -> None:
    asked: Any = {"model": json_server.service.name, "messages": SAID, "max_tokens": 100, "temperature": 0}
    parsed = client.chat.completions.parse(**asked, response_format=Person).choices[0].message.parsed
    assert parsed is not None
    assert parsed.name in ("ann", "bob")
    made = client.chat.completions.create(**asked, tools=[ADD], tool_choice="required", parallel_tool_calls=False)
    (call,) = made.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert json.loads(call.function.arguments)["a"] in (1, 2)
    only: Any = {"tools": [ADD], "tool_choice": "required", "parallel_tool_calls": False}
    with client.chat.completions.stream(**asked, **only) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.tool_calls
    said = [*SAID, made.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
    after: Any = {**asked, "messages": said, "max_tokens": 4}
    assert client.chat.completions.create(**after, tools=[ADD]).choices


def test_responses(client: openai.OpenAI, json_server: Running) -> None:
    name = json_server.service.name
    asked: Any = {"model": name, "input": "hello", "max_output_tokens": 12, "temperature": 0}
    made = client.responses.create(**asked, instructions="Be brief.", metadata={"for": "test"})
    chat = client.chat.completions.create(
        model=name,
        messages=[{"role": "system", "content": "Be brief."}, *SAID],
        max_tokens=12,
        temperature=0,
    )
    assert made.output_text == chat.choices[0].message.content
    assert made.status in ("completed", "incomplete")
    assert made.usage is not None
    assert made.usage.output_tokens == chat.usage.completion_tokens  # type: ignore[union-attr]
    kinds, text = [], ""
    for one in client.responses.create(**asked, stream=True):
        kinds.append(one.type)
        assert one.sequence_number == len(kinds) - 1
        text += one.delta if one.type == "response.output_text.delta" else ""
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")
    assert text == client.responses.create(**asked).output_text
    parsed = client.responses.parse(**{**asked, "max_output_tokens": 60}, text_format=Person)
    assert parsed.output_parsed is not None
    tool: Any = {"type": "function", **ADD["function"], "strict": True}
    asked["max_output_tokens"] = 100
    called = client.responses.create(**asked, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    (item,) = called.output
    assert item.type == "function_call"
    assert json.loads(item.arguments)["a"] in (1, 2)
    history: Any = [
        {"role": "user", "content": "hello"},
        item.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": item.call_id, "output": "3"},
    ]
    assert client.responses.create(**{**asked, "input": history, "max_output_tokens": 4}).output
    with client.responses.stream(**asked, tools=[tool], tool_choice="required") as stream:
        assert any(one.type == "response.function_call_arguments.done" for one in stream)


def test_fields_without_effect(client: openai.OpenAI, json_server: Running) -> None:
    asked: Any = {"model": json_server.service.name, "temperature": 0}
    said: Any = {**asked, "messages": SAID, "max_tokens": 8}
    plain = client.chat.completions.create(**said)
    more = client.chat.completions.create(
        **said,
        reasoning_effort="low",
        verbosity="low",
        prompt_cache_key="key",
        prompt_cache_retention="24h",
        safety_identifier="someone",
        service_tier="flex",
        store=True,
        user="someone",
        metadata={"a": "b"},
    )
    assert more.choices == plain.choices
    question: Any = {**asked, "input": "hello", "max_output_tokens": 8}
    answer = client.responses.create(
        **question,
        include=["reasoning.encrypted_content"],
        reasoning={"effort": "low", "summary": "auto"},
        text={"verbosity": "low"},
        max_tool_calls=3,
        store=True,
        prompt_cache_key="key",
        safety_identifier="someone",
    )
    assert answer.output_text == client.responses.create(**question).output_text
    with pytest.raises(openai.BadRequestError, match="nothing is stored; send the earlier items in input"):
        client.responses.create(**question, previous_response_id=answer.id)


def test_errors_have_openai_types(client: openai.OpenAI, json_server: Running) -> None:
    with pytest.raises(openai.NotFoundError, match=json_server.service.name):
        client.chat.completions.create(model="gpt-9", messages=SAID)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=json_server.service.name, messages=SAID, temperature=-1)
    with pytest.raises(
        openai.BadRequestError, match="web_search_options is not supported: this server searches nothing"
    ):
        client.chat.completions.create(model=json_server.service.name, messages=SAID, web_search_options={})


def test_curl(json_server: Running) -> None:
    body = json.dumps({"messages": SAID, "max_tokens": 4})
    url = f"{json_server.url}/v1/chat/completions"
    command = ["curl", "-sS", "--max-time", "30", url, "-H", "Content-Type: application/json", "-d", body]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["object"] == "chat.completion"
