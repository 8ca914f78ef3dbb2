"""Libraries that people point at the server, where they are installed: LangChain, LiteLLM, instructor, Pydantic AI.

Each is tried with a plain reply, a stream, tools, a structured reply, and what it reads from the usage.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from forced import saying
from http_server import Running
from pydantic import BaseModel

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


# instructor


@pytest.fixture
def bare(json_server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{json_server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def asking(server: Running) -> dict[str, Any]:
    named = {"model": server.service.name, "messages": HELLO, "max_tokens": 100}
    return {**named, "response_model": Person, "max_retries": 0}


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_instructor_by_schema(bare: openai.OpenAI, json_server: Running, mode: str) -> None:
    instructor = pytest.importorskip("instructor")
    client = instructor.from_openai(bare, mode=instructor.Mode[mode])
    made, raw = client.create_with_completion(**asking(json_server), temperature=0)
    assert isinstance(made, Person)
    assert raw.usage.completion_tokens > 0
    *_, last = client.create_partial(**asking(json_server), temperature=0)
    assert last.model_dump() == made.model_dump()


@pytest.mark.parametrize("mode", ["JSON", "MD_JSON"])
def test_instructor_by_prompt(bare: openai.OpenAI, json_server: Running, mode: str) -> None:
    """The schema stands in the prompt alone. What does not fit goes back to the model with the complaint."""
    instructor = pytest.importorskip("instructor")
    client = instructor.from_openai(bare, mode=instructor.Mode[mode])
    wrong, right = '{"name": "bob"}', '{"name": "bob", "old": false}'
    with saying(json_server, *(f"```json\n{one}\n```" if mode == "MD_JSON" else one for one in (wrong, right))):
        made = client.create(**{**asking(json_server), "max_retries": 1})
    assert (made.name, made.old) == ("bob", False)


def test_instructor_over_responses(bare: openai.OpenAI, json_server: Running) -> None:
    instructor = pytest.importorskip("instructor")
    client = instructor.from_openai(bare, mode=instructor.Mode.RESPONSES_TOOLS)
    asked = asking(json_server)
    del asked["max_tokens"]
    assert isinstance(client.create(**asked, temperature=0, max_output_tokens=100), Person)


def test_instructor_over_anthropics_api(json_server: Running) -> None:
    instructor, anthropic = pytest.importorskip("instructor"), pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=json_server.url, api_key="none", max_retries=0) as bare:
        assert isinstance(instructor.from_anthropic(bare).create(**asking(json_server)), Person)


# Pydantic AI


def pydantic_ai_model(server: Running, api: str) -> Any:
    """Made in the event loop that uses it: its connections belong to one."""
    pytest.importorskip("pydantic_ai")
    name = server.service.name
    if api == "messages":
        models = pytest.importorskip("pydantic_ai.models.anthropic")
        providers, anthropic = pytest.importorskip("pydantic_ai.providers.anthropic"), pytest.importorskip("anthropic")
        client = anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0)
        return models.AnthropicModel(name, provider=providers.AnthropicProvider(anthropic_client=client))
    models = pytest.importorskip("pydantic_ai.models.openai")
    providers = pytest.importorskip("pydantic_ai.providers.openai")
    provider = providers.OpenAIProvider(base_url=f"{server.url}/v1", api_key="none")
    kind = models.OpenAIChatModel if api == "chat" else models.OpenAIResponsesModel
    return kind(name, provider=provider)


APIS = pytest.mark.parametrize("api", ["chat", "responses", "messages"])


@APIS
def test_pydantic_ai_whole_and_streamed(json_server: Running, api: str) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai")

    async def ask() -> None:
        settings = {"max_tokens": 100}
        agent = pydantic_ai.Agent(
            pydantic_ai_model(json_server, api), instructions="Be brief.", model_settings=settings
        )
        whole = await agent.run("hello")
        assert whole.output == TEXT
        assert whole.usage.output_tokens > 0
        async with agent.run_stream("hello", message_history=whole.all_messages()) as run:
            assert "".join([text async for text in run.stream_text(delta=True)]) == TEXT
        assert run.usage.output_tokens == whole.usage.output_tokens

    with saying(json_server, TEXT):
        asyncio.run(ask())


@APIS
@pytest.mark.parametrize("streamed", [False, True])
def test_pydantic_ai_tool_and_typed_result(json_server: Running, api: str, streamed: bool) -> None:
    """The result is a call, too: of a tool that the agent adds."""
    pydantic_ai = pytest.importorskip("pydantic_ai")
    seen: list[int] = []

    async def ask() -> Any:
        agent = pydantic_ai.Agent(pydantic_ai_model(json_server, api), output_type=Person, tools=[look])
        if not streamed:
            return (await agent.run("hello", model_settings={"max_tokens": 100})).output
        async with agent.run_stream("hello", model_settings={"max_tokens": 100}) as run:
            return await run.get_output()

    def look(a: Literal[1, 2]) -> str:
        """Looks."""
        seen.append(a)
        return "ann"

    first = CALL.replace("add", "look")
    last = '<tool_call>\n{"name": "final_result", "arguments": {"name": "ann", "old": true}}\n</tool_call>'
    with saying(json_server, first, last):
        assert asyncio.run(ask()) == Person(name="ann", old=True)
    assert seen == [2]


@pytest.mark.parametrize(("api", "native"), [("chat", False), ("chat", True), ("responses", True), ("messages", False)])
def test_pydantic_ai_follows_the_schema(json_server: Running, api: str, native: bool) -> None:
    """Nothing is forced but what the request says: a required call, or a JSON schema."""
    pydantic_ai = pytest.importorskip("pydantic_ai")

    async def ask() -> Any:
        output = pydantic_ai.NativeOutput(Person) if native else Person
        agent = pydantic_ai.Agent(pydantic_ai_model(json_server, api), output_type=output, retries=0)
        return (await agent.run("hello", model_settings={"max_tokens": 200, "temperature": 0})).output

    assert isinstance(asyncio.run(ask()), Person)
