"""Completions over HTTP: the same tokens as the library gives, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from http_server import Running

PROMPT = "the quick brown fox"


def events(server: Running, path: str, **body: Any) -> list[Any]:
    """The data of all events of a stream."""
    found = []
    with server.client.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line.startswith("data: "):
                found.append(line.removeprefix("data: "))
    assert found[-1] == "[DONE]"
    return [json.loads(one) for one in found[:-1]]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.thinned(1, most=1)
def test_a_completion_is_what_the_library_generates(server: Running, temperature: float) -> None:
    expected = server.model.generate(PROMPT, raw=True, max_tokens=30, temperature=temperature, seed=5)
    body = {"prompt": PROMPT, "max_tokens": 30, "temperature": temperature, "seed": 5}
    for lookahead in (True, False):
        reply = server.complete(**body, lookahead=lookahead)
        (choice,) = reply["choices"]
        assert choice["text"] == expected.text
        assert choice["finish_reason"] == {"eos": "stop", "length": "length"}[expected.finish_reason]
        assert reply["usage"]["completion_tokens"] == len(expected.token_ids)
        assert reply["usage"]["lookahead"]["steps"] <= len(expected.token_ids)
    streamed = events(server, "/v1/completions", **body, stream_options={"include_usage": True})
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed[:-1]) == expected.text
    assert streamed[-1]["choices"] == []
    assert streamed[-1]["usage"]["completion_tokens"] == len(expected.token_ids)
    assert len({chunk["id"] for chunk in streamed}) == 1
