r"""Half a character ("\ud83d") anywhere in a body is a 400 that names the field."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from http_server import Running

from lookahead.serve.errors import ApiError
from lookahead.serve.surrogates import check_surrogates, find, may_have_lone
from lookahead.serve.tools import CallReader, Toolbox

LONE = "a\ud83db"
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
SAID = {"messages": [{"role": "user", "content": "hello"}]}
TOOL: dict[str, Any] = {"name": "add", "description": "adds"}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}


def said(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", **fields}]}


def tool(**fields: Any) -> dict[str, Any]:
    return {**SAID, "tools": [{"type": "function", "function": {**TOOL, **fields}}]}


def schema(given: dict[str, Any]) -> dict[str, Any]:
    return {**SAID, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": given}}}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TEXT, {"prompt": LONE}, "prompt"),
        (TEXT, {"prompt": LONE, "echo": True}, "prompt"),
        (TEXT, {"prompt": LONE, "echo": True, "logprobs": 1, "max_tokens": 0}, "prompt"),
        (TEXT, {"prompt": LONE, "stream": True}, "prompt"),
        (TEXT, {"prompt": ["good", LONE]}, "prompt[1]"),
        (TEXT, {"prompt": "x", "stop": ["y", LONE]}, "stop[1]"),
        (TEXT, {"prompt": "x", "logit_bias": {LONE: 1}}, "logit_bias"),
        (TEXT, {"prompt": "x", "user": LONE}, "user"),
        (TEXT, {"prompt": "x", "model": LONE}, "model"),
        ("/tokenize", {"prompt": LONE}, "prompt"),
        ("/tokenize", said(content=LONE), "messages[1].content"),
        ("/detokenize", {"tokens": [1], "model": LONE}, "model"),
        (CHAT, said(content=LONE), "messages[1].content"),
        (CHAT, said(content=[{"type": "text", "text": LONE}]), "messages[1].content[0].text"),
        (CHAT, said(content="", name=LONE), "messages[1].name"),
        (
            CHAT,
            said(tool_calls=[{**CALL, "function": {"name": "add", "arguments": LONE}}]),
            "messages[1].tool_calls[0].function.arguments",
        ),
        (CHAT, {**SAID, "prediction": {"type": "content", "content": LONE}}, "prediction.content"),
        (CHAT, {**SAID, "metadata": {"a": LONE}}, "metadata.a"),
        (CHAT, {**SAID, "metadata": {LONE: "a"}}, "metadata"),
        (CHAT, {**SAID, "user": LONE}, "user"),
        (CHAT, {**SAID, "stop": LONE}, "stop"),
        (CHAT, {**SAID, LONE: 1}, None),
        (CHAT, {**SAID, "lookahead": {"sources": [LONE]}}, "lookahead.sources[0]"),
        (CHAT, tool(name=LONE), "tools[0].function.name"),
        (CHAT, tool(description=LONE), "tools[0].function.description"),
        (CHAT, tool(parameters={"properties": {LONE: {}}}), "tools[0].function.parameters.properties"),
        (CHAT, schema({"enum": [LONE]}), "response_format.json_schema.schema.enum[0]"),
        (CHAT, schema({"properties": {LONE: {}}}), "response_format.json_schema.schema.properties"),
        (RESPONSES, {"input": LONE}, "input"),
        (RESPONSES, {"input": [{"role": "user", "content": LONE}]}, "input[0].content"),
        (RESPONSES, {"input": "x", "instructions": LONE}, "instructions"),
        (RESPONSES, {"input": "x", "metadata": {"a": LONE}}, "metadata.a"),
        (RESPONSES, {"input": "x", "metadata": {"a": LONE}, "stream": True}, "metadata.a"),
        (RESPONSES, {"input": "x", "user": LONE}, "user"),
    ],
)
def test_every_field_is_named(server: Running, path: str, body: dict[str, Any], param: str | None) -> None:
    answer = post(server, path, body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["type"], error["code"]) == (param, "invalid_request_error", "lone_surrogate")
    what = param or "the body"
    says = r"has a lone surrogate (\ud83d), which is not text; send the whole character"
    assert error["message"] in (f"{what} {says}", f"a key of {what} {says}")


def post(server: Running, path: str, body: dict[str, Any]) -> Any:
    """Send a body whose characters are all escaped."""
    content = json.dumps(body).encode()
    return server.client.post(path, content=content, headers={"Content-Type": "application/json"})


def test_whole_characters_and_escaped_backslashes_pass(json_server: Running) -> None:
    """Python's json writes every emoji as a pair of escapes. A text may also speak about escapes."""
    for text in ("\U0001f600 ok", r"a \ud83d b", "\\\\\U0001f600", "\\" * 3 + "ud83d"):
        answer = post(json_server, TEXT, {"prompt": text, "max_tokens": 1, "echo": True})
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"].startswith(text)


def test_the_quick_look_agrees_with_the_parser() -> None:
    rng = random.Random(1)
    parts = ["\\\\", r"\ud83d", r"\udc00", r"\uD83D", r"\uDE00", r"\n", r"\"", "x", r"\u0041", "ud83d"]
    lone = 0
    for _ in range(3000):
        body = ('{"a": "' + "".join(rng.choices(parts, k=rng.randrange(1, 7))) + '"}').encode()
        found = find(json.loads(body))
        assert may_have_lone(body) == (found is not None), body
        lone += found is not None
    assert 500 < lone < 2900


def test_an_ordinary_body_is_not_parsed_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(text: Any) -> None:
        raise AssertionError("the body was parsed")

    monkeypatch.setattr("lookahead.serve.surrogates.json.loads", never)
    check_surrogates(json.dumps({"messages": ["plain", "\U0001f600", "\\ud83d", "ä"]}).encode())
    with pytest.raises(AssertionError, match="was parsed"):
        check_surrogates(json.dumps(["\ud83d"]).encode())


def test_what_is_overwritten_or_no_json_is_left_to_the_parser() -> None:
    check_surrogates(rb'{"a": "\ud83d", "a": 1}')
    check_surrogates(rb'{"a": "\ud83d"')
    with pytest.raises(ApiError, match=r"a\.b\[0\] has a lone surrogate \(\\udc00\)"):
        check_surrogates(rb'{"a": {"b": ["\udc00"]}}')


def test_arguments_that_have_one_inside_their_json(json_server: Running) -> None:
    """They are text themselves. A template gets them as they are, and a call that the model writes keeps its escape."""
    call = {**CALL, "function": {"name": "add", "arguments": r'{"a": "\ud83d"}'}}
    body = {**tool(), "messages": said(tool_calls=[call])["messages"], "max_tokens": 2}
    answer = json_server.post(CHAT, **body)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("written", [r'{"a": "\ud83d"}', r'"\ud83d"'])
def test_a_call_with_half_a_character_can_be_sent(written: str) -> None:
    from lookahead.serve.chat_protocol import ChatBody

    tools = tuple(ChatBody.model_validate(tool()).tools or ())
    reader = CallReader(Toolbox(tools))
    (call,) = reader.push(f'<tool_call>{{"name": "add", "arguments": {written}}}</tool_call>')[1]
    assert call.arguments.encode()
    assert call.arguments in (r'{"a": "\ud83d"}', "?")
