"""The `anthropic` package as people use it, where it is installed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from forced import saying
from http_server import Running

anthropic: Any = pytest.importorskip("anthropic")

ADD: Any = {
    "name": "add",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def client(json_server: Running) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=json_server.url, api_key="none", max_retries=0) as made:
        yield made


def asked(server: Running, **more: Any) -> dict[str, Any]:
    body = {"model": server.service.name, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 100}
    return {**body, "extra_body": {"temperature": 0}, **more}


def test_messages_whole_and_streamed(client: Any, json_server: Running) -> None:
    made = client.messages.create(**asked(json_server), system="Be brief.")
    assert made.usage.output_tokens > 0
    with client.messages.stream(**asked(json_server), system="Be brief.") as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == made.content[0].text
    assert final.stop_reason == made.stop_reason
    counted = client.messages.count_tokens(
        model=json_server.service.name, messages=[{"role": "user", "content": "hello"}], system="Be brief."
    )
    used = made.usage
    assert counted.input_tokens == used.input_tokens + used.cache_read_input_tokens


def test_tools_there_and_back(client: Any, json_server: Running) -> None:
    only: Any = {"tools": [ADD], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    made = client.messages.create(**asked(json_server), **only)
    (block,) = made.content
    assert made.stop_reason == block.type == "tool_use"
    assert block.input["a"] in (1, 2)
    with client.messages.stream(**asked(json_server), **only) as stream:
        assert stream.get_final_message().content[0].input == block.input
    history = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": made.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "3"}]},
    ]
    assert client.messages.create(**asked(json_server, messages=history, max_tokens=4), tools=[ADD]).content


def test_the_tool_runner(client: Any, json_server: Running) -> None:
    """It would rather store the conversation on the server, and does without."""

    @anthropic.beta_tool
    def add(a: int) -> str:
        """Adds.

        Args:
            a: A number.
        """
        results.append(a)
        return "3"

    results: list[int] = []
    with saying(json_server, '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'):
        runner = client.beta.messages.tool_runner(**asked(json_server), tools=[add], max_iterations=2)
        assert [message.stop_reason for message in runner] == ["tool_use", "tool_use"]
    assert results[:1] == [2]


def test_stops_and_errors(client: Any, json_server: Running) -> None:
    with saying(json_server, "one two"):
        made = client.messages.create(**asked(json_server), stop_sequences=["two"])
    assert (made.stop_reason, made.stop_sequence) == ("stop_sequence", "two")
    with pytest.raises(anthropic.NotFoundError, match=json_server.service.name) as caught:
        client.messages.create(**asked(json_server, model="claude"))
    assert caught.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="unknown field 'magic'"):
        client.messages.create(**asked(json_server, extra_body={"magic": 1}))
    assert json.loads(caught.value.response.text)["type"] == "error"
