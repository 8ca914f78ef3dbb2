"""Libraries that make a typed object of a reply, where they are installed: instructor and Pydantic AI."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from forced import saying
from http_server import Running
from pydantic import BaseModel

CALL = '<tool_call>\n{"name": "look", "arguments": {"a": 2}}\n</tool_call>'
RESULT = '<tool_call>\n{"name": "final_result", "arguments": {"name": "ann", "old": true}}\n</tool_call>'
TEXT = "one two three"
HELLO: Any = [{"role": "user", "content": "hello"}]


class Person(BaseModel):
    """Somebody."""

    name: Literal["ann", "bob"]
    old: bool


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

    with saying(json_server, CALL, RESULT):
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
