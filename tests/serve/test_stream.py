"""Streams: a chunk that is written from a template has the bytes that the general way writes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from http_server import Running

from lookahead.serve import chat, completions
from lookahead.serve.stream import Template, as_json, event

TEXTS = ["", "plain", 'a "quoted" \\ text', "line\nbreak\ttab \x00\x1f\x7f", "ä 日本 🦊 \u2028", "</script>", "\ud800"]


@pytest.mark.parametrize("text", TEXTS)
def test_a_template_writes_what_event_writes(text: str) -> None:
    def make(one: str) -> dict[str, Any]:
        return {"id": "x", "choices": [{"index": 0, "delta": {"content": one}, "finish_reason": None}], "model": "m"}

    assert Template(make)(text) == event(make(text))


@pytest.mark.parametrize(
    ("path", "module", "content"),
    [
        ("/v1/completions", completions, {"prompt": "the quick"}),
        ("/v1/chat/completions", chat, {"messages": [{"role": "user", "content": "the quick"}]}),
    ],
)
def test_chunks_are_the_same_with_and_without_templates(
    server: Running, monkeypatch: pytest.MonkeyPatch, path: str, module: Any, content: dict[str, Any]
) -> None:
    monkeypatch.setattr(module, "now", lambda: 1)
    monkeypatch.setattr(module, "new_id", lambda kind: kind)
    body = {**content, "max_tokens": 40, "temperature": 1, "seed": 5, "n": 2, "stream": True, "ignore_eos": True}
    used = []

    def note(template: Template, text: str) -> bytes:
        used.append(text)
        return write(template, text)

    write = Template.__call__
    monkeypatch.setattr(Template, "__call__", note)
    fast = lines(server, path, body)
    assert len(used) > 4
    slow = lines(server, path, {**body, **({"logprobs": 0} if module is completions else {"logprobs": True})})
    for line in slow:
        for choice in line["choices"]:
            choice["logprobs"] = None
    assert joined(fast) == joined(slow)


def lines(server: Running, path: str, body: dict[str, Any]) -> list[Any]:
    """The data of all events. Each must be written as the encoder writes it."""
    found = []
    with server.client.stream("POST", path, json=body) as answer:
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["cache-control"] == "no-store"
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                found.append(json.loads(line[6:]))
                assert line[6:] == as_json(found[-1])
    return found


def joined(chunks: list[Any]) -> list[Any]:
    """Every choice's text and end: two streams of one text may be cut in different places."""
    found: dict[int, list[Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            one = found.setdefault(choice["index"], ["", None])
            one[0] += choice.get("text") or choice.get("delta", {}).get("content") or ""
            one[1] = choice["finish_reason"] or one[1]
    return [found[index] for index in sorted(found)]
