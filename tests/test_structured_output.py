"""Schemas and tools through the server, on a CPU and on a GPU: what is written fits, streamed and not, alone and among
others.

The GPU's machine may have neither a network nor all packages, so requests are made with the standard library. The model
is the embedded one where it has been fetched, and a tiny one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen

import pytest
import torch

from lookahead import LookaheadConfig
from lookahead.cache import cache_dir
from lookahead.loading.embedded import EMBEDDED, MANIFEST

if TYPE_CHECKING:
    from http_server import Running

NEEDED = ("fastapi", "uvicorn", "httptools", "prometheus_client", "llguidance")
ON_CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
FETCHED = pytest.mark.skipif(not (cache_dir() / EMBEDDED / MANIFEST).is_file(), reason="the model is not in the cache")

FILM = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 12},
        "genre": {"enum": ["drama", "comedy"]},
        "year": {"type": "integer", "minimum": 1900, "maximum": 2099},
        "seen": {"type": "boolean"},
    },
    "required": ["title", "genre", "year", "seen"],
}
TOWN = {"type": "object", "properties": {"town": {"enum": ["Paris", "Rome"]}}, "required": ["town"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": TOWN}},
    {"type": "function", "function": {"name": "film", "parameters": FILM}},
]
SCHEMA = {"response_format": {"type": "json_schema", "json_schema": {"name": "film", "schema": FILM}}}
WEATHER = {"type": "function", "function": {"name": "weather"}}
KINDS: dict[str, dict[str, Any]] = {
    "schema": SCHEMA,
    "sampled schema": {**SCHEMA, "temperature": 0.9, "seed": 11},
    "plain schema": {**SCHEMA, "lookahead": False},
    "object": {"response_format": {"type": "json_object"}},
    "required": {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
    "named": {"tools": TOOLS, "tool_choice": WEATHER, "temperature": 0.9, "seed": 5},
}
PROMPTS = ("Tell me of a film that you like, as JSON.", "How is the weather in Rome today?")


@pytest.fixture(
    scope="module",
    params=[
        "cpu-tiny",
        pytest.param("cuda-tiny", marks=ON_CUDA),
        pytest.param("cuda-embedded", marks=[*ON_CUDA, FETCHED]),
    ],
)
def served(request: pytest.FixtureRequest, settings: LookaheadConfig) -> Iterator[Running]:
    for package in NEEDED:
        pytest.importorskip(package, reason=f"the server needs {package}")
    from http_server import running
    from json_model import json_model

    import lookahead

    device, name = request.param.split("-")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # tf32 has too few bits to compare tokens
    try:
        made = (
            json_model(settings, device=device)
            if name == "tiny"
            else lookahead.load(device=device, dtype="float32", config=settings)
        )
        assert made.device.type == device
        with running(made) as server:
            yield server
    finally:
        torch.set_float32_matmul_precision(before)


def body_of(kind: str, prompt: str, stream: bool) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    return {"messages": messages, "max_tokens": 400, "temperature": 0, "stream": stream, **KINDS[kind]}


def ask(server: Running, body: dict[str, Any]) -> tuple[str, list[tuple[str, str]], str]:
    """What is said, what is called with which arguments, and why it ended."""
    data = json.dumps(body).encode()
    posted = Request(f"{server.url}/v1/chat/completions", data, {"Content-Type": "application/json"})
    with urlopen(posted, timeout=300) as answer:  # it raises for a status from 400 on
        lines = answer.read().decode().splitlines()
    if not body["stream"]:
        (choice,) = json.loads("".join(lines))["choices"]
        message = choice["message"]
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
        return message["content"] or "", calls, choice["finish_reason"]
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert not any("error" in event for event in events), events[-1]
    choices = [choice for event in events for choice in event["choices"]]
    made: dict[int, list[str]] = {}
    for choice in choices:
        for call in choice["delta"].get("tool_calls") or ():
            name_and_arguments = made.setdefault(call["index"], ["", ""])
            name_and_arguments[0] += call["function"].get("name") or ""
            name_and_arguments[1] += call["function"].get("arguments") or ""
    said = "".join(choice["delta"].get("content") or "" for choice in choices)
    return said, [(name, arguments) for name, arguments in made.values()], choices[-1]["finish_reason"]


def check_film(found: Any) -> None:
    assert set(found) == set(FILM["required"])
    assert isinstance(found["title"], str)
    assert len(found["title"]) <= 12
    assert found["genre"] in ("drama", "comedy")
    assert type(found["year"]) is int
    assert 1900 <= found["year"] <= 2099
    assert type(found["seen"]) is bool


def check_fits(kind: str, said: str, calls: list[tuple[str, str]], reason: str) -> None:
    if "tools" not in KINDS[kind]:
        assert not calls
        assert reason == "stop"
        found = json.loads(said)
        assert isinstance(found, dict)
        if kind != "object":
            check_film(found)
        return
    assert reason == "tool_calls"
    assert not said
    ((name, arguments),) = calls
    if kind == "named":
        assert name == "weather"
    if name == "weather":
        assert json.loads(arguments) in ({"town": "Paris"}, {"town": "Rome"})
    else:
        assert name == "film"
        check_film(json.loads(arguments))


@pytest.mark.parametrize(
    "kinds",
    [("schema", "plain schema", "required"), pytest.param(tuple(KINDS), marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_replies_fit_alone_streamed_and_in_a_crowd(served: Running, kinds: tuple[str, ...]) -> None:
    prompts = PROMPTS if served.model.device.type == "cuda" else PROMPTS[:1]
    asked = [(kind, prompt, stream) for kind in kinds for prompt in prompts for stream in (False, True)]
    alone = {}
    for kind, prompt, stream in asked:
        reply = alone[kind, prompt, stream] = ask(served, body_of(kind, prompt, stream))
        check_fits(kind, *reply)
        assert reply == alone[kind, prompt, False]  # in one piece it is the same
    for prompt in prompts:  # and with guesses the same as without
        assert alone["schema", prompt, False] == alone["plain schema", prompt, False]
    with ThreadPoolExecutor(len(asked)) as pool:
        crowd = list(pool.map(lambda one: ask(served, body_of(*one)), asked))
    assert crowd == [alone[one] for one in asked]
