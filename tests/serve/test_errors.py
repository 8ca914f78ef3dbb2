"""Whatever a client sends, it gets OpenAI's error object with a line that says what to change, and never a 5xx."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import httpx2 as httpx
import pytest
from http_server import Running, running, soon

CHAT = "/v1/chat/completions"
SAID = [{"role": "user", "content": "hello"}]


def error_of(answer: Any, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert "Traceback" not in answer.text
    assert "\n" not in error["message"]
    return error


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"frobnicate": 1}, "frobnicate", "unknown field 'frobnicate'"),
        ({"temperature": -0.5}, "temperature", "greater than or equal to 0"),
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": 2.5}, "max_tokens", "valid integer"),
        ({"n": 1000}, "n", "less than or equal to 64"),
        ({"top_p": -0.1}, "top_p", "greater than or equal to 0"),
        ({"stop": ["x"] * 100}, "stop", "at most 16 items"),
        ({"stop": ""}, "stop", "must not be empty"),
        ({"logit_bias": {str(i): 1.0 for i in range(10_000)}}, "logit_bias", "at most 1024 items"),
        ({"logit_bias": {"no": 1}}, "logit_bias", "'no' is not a token id"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "'99999' is not a token id"),
        ({"logit_bias": {"5": 1000}}, "logit_bias", "between -100 and 100"),
        ({"top_logprobs": 3}, "top_logprobs", "top_logprobs needs logprobs=true"),
        ({"modalities": ["audio"]}, "modalities", "modalities=['audio'] is not supported"),
        ({"functions": []}, "functions", "functions is not supported: give tools"),
        ({"stop_token_ids": [99999]}, "stop_token_ids", "99999 is not one of the model's 0 to"),
        ({"chat_template": "x"}, "chat_template", "give chat_template_kwargs"),
        ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs", "'tokenize' is not a variable"),
        ({"continue_final_message": True}, "continue_final_message", "needs a last message of the assistant"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "add_generation_prompt begins one",
        ),
        ({"reasoning_effort": "enormous"}, "reasoning_effort", "'none', 'minimal'"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "belongs to stream=true"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "'system', 'developer'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
            "image_url",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]}]},
            "messages[0].content[0].type",
            "messages[0].content[0] is of type 'image_url', and this model reads no images; send text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "x"}}]}]},
            "messages[0].content[0].type",
            "this model reads no audio; send text",
        ),
        ({"max_tokens": 3, "max_completion_tokens": 3}, "max_tokens", "mean the same"),
        ({"lookahead": {"steps": True}}, "lookahead.steps", "belong to stream=true"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema belongs to type"),
        ({"messages": [{"role": "user", "content": {"a": 1}}]}, "messages[0].content", "valid string (got an object)"),
        ({"stop": 5}, "stop", "valid string (got 5)"),
        ({"min_tokens": 50, "max_tokens": 5}, "min_tokens", "more than the 5 tokens"),
        ({"lookahead": {"window": 5000}}, "lookahead.window", "less than or equal to 256"),
    ],
)
def test_a_wrong_field_is_named(server: Running, body: Any, param: str | None, says: str) -> None:
    error = error_of(server.post(CHAT, **{"messages": SAID, **body}), 400)
    assert says in error["message"]
    assert error["param"] == param
    assert "got dict" not in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        ("/v1/responses", {"input": [{"role": "user"}]}, "input[0].content", "of type 'message' needs 'content'"),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:x"}]}]},
            "input[0].content[0].type",
            "this model reads no images; send text",
        ),
        ("/v1/completions", {"prompt": "x", "max_tokens": 0}, "max_tokens", "max_tokens=0 is for echo"),
        ("/tokenize", {"prompt": "x", "messages": SAID}, None, "give either prompt or messages"),
    ],
)
def test_a_wrong_field_of_another_body_is_named(
    server: Running, path: str, body: Any, param: str | None, says: str
) -> None:
    error = error_of(server.post(path, **body), 400)
    assert says in error["message"]
    assert error["param"] == param
    assert "(got" not in error["message"]


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b'{"messages": [', "not valid JSON"),
        (b"", "missing"),
        (b"[1, 2]", "object"),
        (b'{"messages": "\xff\xfe"}', "not UTF-8"),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, "nested more than 64"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', "finite number"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}', "finite number"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}], "max_tokens": 2}', r"a lone surrogate (\ud800)"),
        ('{"messages": [{"role": "user", "content": "x"}]}'.encode("utf-16-le"), "it has zero bytes"),
    ],
)
def test_a_broken_body_is_refused(server: Running, raw: bytes, says: str) -> None:
    answer = server.client.post(CHAT, content=raw, headers={"Content-Type": "application/json"})
    assert says in error_of(answer, 400)["message"]


def test_unknown_paths_methods_and_types(server: Running) -> None:
    assert "/v1/nothing" in error_of(server.client.get("/v1/nothing"), 404)["message"]
    assert "does not take GET" in error_of(server.client.get(CHAT), 405)["message"]
    answer = server.client.post(CHAT, content=b"x", headers={"Content-Type": "text/plain"})
    assert "application/json" in error_of(answer, 415)["message"]
    error = error_of(server.post(CHAT, model="other", messages=SAID), 404)
    assert server.service.name in error["message"]


def test_too_long_a_prompt_is_told_both_numbers(server: Running) -> None:
    error = error_of(server.post("/v1/completions", prompt=[5] * 600), 400)
    assert "600 tokens" in error["message"]
    assert "512" in error["message"]
    assert error["code"] == "context_length_exceeded"


def test_a_body_beyond_the_limit(server: Running) -> None:
    error = error_of(server.post(CHAT, messages=[{"role": "user", "content": "x" * (5 << 20)}]), 413)
    assert str(server.service.settings.max_body) in error["message"]

    def endless() -> Any:
        for _ in range(100):
            yield b"x" * (1 << 20)

    with suppress(httpx.TransportError):  # the server hangs up at last, while the client still sends
        answer = server.client.post(CHAT, content=endless(), headers={"Content-Type": "application/json"})
        assert answer.status_code == 413
    assert server.client.get("/health").status_code == 200


def test_a_full_queue_is_429_with_a_time_to_wait(loaded: Any) -> None:
    with running(loaded, max_concurrency=1, max_queue=1) as server:
        assert error_of(server.post(CHAT, messages=SAID, n=3), 400)["param"] == "n"
        long = {"prompt": "the", "max_tokens": 400, "ignore_eos": True, "stream": True, "temperature": 0}
        with server.client.stream("POST", "/v1/completions", json=long) as first:
            assert first.status_code == 200
            with server.client.stream("POST", "/v1/completions", json=long) as second:
                assert second.status_code == 200
                assert soon(lambda: server.service.queue.taken == 2)
                answer = server.post("/v1/completions", prompt="the", max_tokens=2)
                error_of(answer, 429)
                assert int(answer.headers["Retry-After"]) >= 1
        assert soon(lambda: server.service.queue.taken == 0)
        assert server.complete(prompt="the", max_tokens=2)["choices"]


def test_a_failing_sequence_fails_alone(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception while one sequence verifies is that request's 500, and its neighbours never notice."""
    from lookahead.engine import text

    push = text.TextStream.push_token

    def broken(self: Any, token: int) -> bool:
        if self._stops.stops == ("BOOM",):
            raise OSError("a secret detail")
        return push(self, token)

    monkeypatch.setattr(text.TextStream, "push_token", broken)
    expected = server.complete(prompt="the", max_tokens=60, temperature=0, ignore_eos=True)
    long = {"prompt": "the", "max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=long) as neighbour:
        answer = server.post("/v1/completions", prompt="the", max_tokens=20, stop="BOOM", temperature=0)
        error = error_of(answer, 500)
        assert "secret" not in answer.text
        assert error["type"] == "server_error"
        lines = [line[6:] for line in neighbour.iter_lines() if line.startswith("data: {")]
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines) == expected["choices"][0]["text"]
    assert server.client.get("/ready").status_code == 200
