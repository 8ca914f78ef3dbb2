"""The embedded model behind the server, asked by the `openai` package: what it says, calls, and how an edit flies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from http_server import Running, running
from pydantic import BaseModel

import lookahead
from lookahead import LookaheadConfig

pytestmark = [pytest.mark.model, pytest.mark.slow]
CODE = """def total(prices):
    result = 0
    for price in prices:
        result = result + price
    return result
"""


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running(lookahead.load(config=LookaheadConfig(window=0, guesses=4, budget=12))) as server:
        yield server


@pytest.fixture(scope="module")
def client(served: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made


class Answer(BaseModel):
    colour: Literal["blue", "green"]
    sure: bool


def test_a_chat_and_its_stream(served: Running, client: openai.OpenAI) -> None:
    asked: Any = {
        "model": served.service.name,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 12,
        "temperature": 0,
    }
    text = client.chat.completions.create(**asked).choices[0].message.content
    assert text == served.model.generate(asked["messages"], max_tokens=12).text
    assert "Paris" in (text or "")
    chunks = client.chat.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text


@pytest.mark.slow
def test_it_parses_and_calls(served: Running, client: openai.OpenAI) -> None:
    asked: Any = {"model": served.service.name, "max_tokens": 40, "temperature": 0}
    sky: Any = [{"role": "user", "content": "Which colour has the sky, and are you sure? Answer as JSON."}]
    found = client.chat.completions.parse(messages=sky, response_format=Answer, **asked).choices[0].message.parsed
    assert found is not None
    town = {"type": "object", "properties": {"town": {"enum": ["Paris", "Rome"]}}, "required": ["town"]}
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": town}}
    paris: Any = [{"role": "user", "content": "How is the weather in Paris?"}]
    only: Any = {"tool_choice": "required", "parallel_tool_calls": False}
    made = client.chat.completions.create(messages=paris, tools=[tool], **only, **asked)
    (call,) = made.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert json.loads(call.function.arguments)["town"] in ("Paris", "Rome")


@pytest.mark.slow
def test_a_predicted_edit_flies(served: Running) -> None:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": f"Repeat this code, but call the function add_up:\n{CODE}"}],
        "max_tokens": 40,
        "temperature": 0,
    }
    config = {"window": 0, "budget": 17, "sources": ["suffix"]}
    plain = served.post("/v1/chat/completions", **body, lookahead=False).json()
    text = plain["choices"][0]["message"]["content"]
    edited = text.replace("price", "cost", 1)
    reply = served.post(
        "/v1/chat/completions", **body, lookahead=config, prediction={"type": "content", "content": edited}
    ).json()
    assert reply["choices"] == plain["choices"]
    assert reply["usage"]["lookahead"]["compression"] > 4
    details = reply["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > reply["usage"]["completion_tokens"] / 2
