"""Chats: templates, streams, structured output along the tree, tools, and predicted outputs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from http_server import Running, running

from lookahead.serve.chat_protocol import Tool
from lookahead.serve.grammar import closed
from lookahead.serve.tools import Toolbox, style_of

PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["ann", "bob"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"$ref": "#/$defs/digit"}},
            "required": ["a", "b"],
            "additionalProperties": False,
            "$defs": {"digit": {"enum": [1, 22]}},
        },
    },
}
LLAMA = "{% if tools %}Environment: ipython {{ tools | tojson }}{% endif %}"
BARE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MESSAGES = [{"role": "user", "content": "hello"}]


def chat(server: Running, **body: Any) -> dict[str, Any]:
    answer = server.post("/v1/chat/completions", **{"messages": MESSAGES, "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(server: Running, **body: Any) -> list[dict[str, Any]]:
    body = {"messages": MESSAGES, "temperature": 0, **body, "stream": True}
    with server.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.thinned(1, most=1)
def test_a_chat_is_what_the_library_generates(server: Running, temperature: float) -> None:
    expected = server.model.generate(MESSAGES, max_tokens=30, temperature=temperature, seed=5)
    body = {"max_tokens": 30, "temperature": temperature, "seed": 5}
    (choice,) = chat(server, **body)["choices"]
    assert choice["message"]["content"] == expected.text
    chunks = streamed(server, **body, stream_options={"include_usage": True})
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    said = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1]]
    assert "".join(said) == expected.text
    assert chunks[-2]["choices"][0]["finish_reason"] == choice["finish_reason"]
    steps = chunks[-1]["usage"]["lookahead"]["steps"]
    assert len([text for text in said if text]) <= steps  # a step's block is one chunk


def test_the_log_probabilities_of_a_stream_are_those_of_the_whole(server: Running) -> None:
    body = {"max_tokens": 20, "logprobs": True, "top_logprobs": 2}
    (choice,) = chat(server, **body)["choices"]
    told = choice["logprobs"]["content"]
    assert (
        bytes(byte for one in told for byte in one["bytes"]).decode("utf-8", "replace") == choice["message"]["content"]
    )
    parts = [chunk["choices"][0]["logprobs"] for chunk in streamed(server, **body)]
    assert [one["token"] for part in parts if part for one in part["content"]] == [one["token"] for one in told]


def test_content_parts_and_the_developer_role(server: Running) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}]
    assert chat(server, messages=parts, max_tokens=8)["choices"] == chat(server, max_tokens=8)["choices"]
    roles = [[{"role": role, "content": "be brief"}, *MESSAGES] for role in ("system", "developer")]
    both = [chat(server, messages=messages, max_tokens=8)["choices"] for messages in roles]
    assert both[0] == both[1]


# Structured output.


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("strict", [True, None])
@pytest.mark.thinned(1, most=2)
def test_a_schema_holds_with_guesses_and_without(json_server: Running, temperature: float, strict: bool | None) -> None:
    format = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": strict}}
    body = {"response_format": format, "temperature": temperature, "seed": 2, "max_tokens": 60, "n": 2}
    guessed, plain = chat(json_server, **body), chat(json_server, **body, lookahead=False)
    assert guessed["choices"] == plain["choices"]
    for choice in guessed["choices"]:
        found = json.loads(choice["message"]["content"])
        assert found["name"] in ("ann", "bob")
        assert 0 <= found["age"] <= 99
        assert choice["finish_reason"] == "stop"
    assert guessed["usage"]["lookahead"]["tried"] > 0


def test_guesses_are_accepted_inside_of_a_grammar(json_server: Running) -> None:
    schema = {"type": "array", "items": {"const": "again and again"}, "minItems": 8, "maxItems": 8}
    format = {"type": "json_schema", "json_schema": {"name": "list", "schema": schema}}
    reply = chat(json_server, response_format=format, max_tokens=400)
    assert json.loads(reply["choices"][0]["message"]["content"]) == ["again and again"] * 8
    assert reply["usage"]["lookahead"]["steps"] < reply["usage"]["completion_tokens"] / 2


def test_an_object_of_any_kind(json_server: Running) -> None:
    body = {"response_format": {"type": "json_object"}, "max_tokens": 40, "temperature": 1.0, "seed": 8}
    text = chat(json_server, **body)["choices"][0]["message"]["content"]
    assert text.startswith("{")
    assert text == chat(json_server, **body, lookahead=False)["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "nonsense"}, "schema cannot be compiled"),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}}, "schema cannot be compiled"),
        ({"type": "string", "pattern": "("}, "schema cannot be compiled"),
    ],
)
def test_a_schema_that_cannot_be_compiled_is_refused(json_server: Running, schema: Any, says: str) -> None:
    format = {"type": "json_schema", "json_schema": {"name": "bad", "schema": schema}}
    answer = json_server.post("/v1/chat/completions", messages=MESSAGES, response_format=format)
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]


# Tools.


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_forced_call_is_parsed_back(json_server: Running, choice: Any) -> None:
    body = {"tools": [ADD], "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 120}
    (found,) = chat(json_server, **body)["choices"]
    assert found["finish_reason"] == "tool_calls"
    assert found["message"]["content"] is None
    (call,) = found["message"]["tool_calls"]
    assert call["function"]["name"] == "add"
    arguments = json.loads(call["function"]["arguments"])
    assert arguments.keys() == {"a", "b"}
    assert arguments["b"] in (1, 22)
    plain = chat(json_server, **body, lookahead=False)["choices"][0]["message"]["tool_calls"][0]
    assert plain["function"] == call["function"]
    deltas = [chunk["choices"][0]["delta"] for chunk in streamed(json_server, **body)]
    (told,) = [delta["tool_calls"] for delta in deltas if delta.get("tool_calls")]
    assert told[0]["function"] == call["function"]
    assert told[0]["index"] == 0


@pytest.mark.parametrize("template", [BARE, LLAMA + BARE])
def test_calls_with_other_templates(make_json_model: Callable[[str], Any], template: str) -> None:
    with running(make_json_model(template)) as server:
        body = {"tools": [ADD], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 120}
        reply = chat(server, **body)
        (call,) = reply["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"])["b"] in (1, 22)
        said = [
            {"role": "user", "content": "add"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": "23"},
        ]
        assert chat(server, messages=said, tools=[ADD], max_tokens=5)["choices"][0]["message"]["role"] == "assistant"


def test_strict_tools_hold_once_a_call_has_begun(json_server: Running) -> None:
    strict = {**ADD, "function": {**ADD["function"], "strict": True}}
    body = {"tools": [strict], "max_tokens": 30, "temperature": 1.0, "seed": 1}
    assert chat(json_server, **body)["choices"] == chat(json_server, **body, lookahead=False)["choices"]


@pytest.mark.parametrize(
    ("schema", "shut"),
    [
        ({"type": "object", "properties": {"a": {}}}, True),
        ({"type": "object", "properties": {"a": {}}, "additionalProperties": True}, False),
        ({"type": "object", "properties": {"a": {}}, "required": ["b"]}, False),
        ({"type": "object", "properties": {"a": {}}, "anyOf": [{"required": ["b"]}]}, False),
        ({"type": "object"}, False),
        ({"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}, False),
        ({"const": {"properties": {"a": 1}}}, False),
    ],
)
def test_objects_are_closed_unless_their_schema_says_otherwise(schema: dict[str, Any], shut: bool) -> None:
    inner = {"type": "array", "items": schema}
    found = closed({"type": "object", "properties": {"properties": inner}})
    assert found["properties"].keys() == {"properties"}  # that is this property's name
    assert found["properties"]["properties"]["items"] == ({**schema, "additionalProperties": False} if shut else schema)
    assert found.get("additionalProperties") == (None if "allOf" in schema else False)


def test_a_model_that_must_call_invents_no_arguments(json_server: Running) -> None:
    function = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"enum": [1, 2]}}}}
    body = {"tools": [{"type": "function", "function": function}], "tool_choice": "required", "max_tokens": 200}
    for seed in range(2):
        reply = chat(json_server, **body, parallel_tool_calls=False, temperature=1.5, seed=seed)
        (call,) = reply["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) in ({}, {"a": 1}, {"a": 2})


PERSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}


@pytest.mark.parametrize("calls", [True, False])
@pytest.mark.thinned(1, most=1)
def test_tools_beside_a_response_format(json_server: Running, calls: bool) -> None:
    """The reply is a call, or an answer that follows the schema. A bias makes the model's choice: for or against "<",
    which begins a call."""
    vocabulary = json_server.model.tokenizer.get_vocab().items()
    bias = {str(token): 20 if calls else -100 for piece, token in vocabulary if "<" in piece}
    body = {"tools": [ADD], "response_format": PERSON_FORMAT, "max_tokens": 150, "temperature": 1.5, "logit_bias": bias}
    for seed in range(2):
        message, plain = (
            chat(json_server, **body, seed=seed, lookahead=way)["choices"][0]["message"] for way in (True, False)
        )
        assert ("tool_calls" in message) == calls
        if calls:
            found, expected = ([call["function"] for call in one["tool_calls"]] for one in (message, plain))
            assert found == expected
            assert all(json.loads(call["arguments"])["b"] in (1, 22) for call in found)
        else:
            assert message == plain
            assert json.loads(message["content"])["name"] in ("ann", "bob")


def test_calls_without_tags_do_not_go_with_a_response_format(make_json_model: Callable[[str], Any]) -> None:
    with running(make_json_model(LLAMA + BARE)) as server:
        body = {"messages": MESSAGES, "tools": [ADD], "response_format": PERSON_FORMAT, "max_tokens": 60}
        answer = server.post("/v1/chat/completions", **body)
        assert answer.status_code == 400
        assert "cannot be combined for this model, whose calls have no tags" in answer.json()["error"]["message"]
        assert chat(server, **body, tool_choice="required")["choices"][0]["message"]["tool_calls"]
        assert "content" in chat(server, **body, tool_choice="none")["choices"][0]["message"]


@pytest.mark.parametrize("field", [{"min_tokens": 25}, {"ignore_eos": True}])
@pytest.mark.thinned(1, most=1)
def test_a_grammar_goes_on_as_long_as_it_can(json_server: Running, field: dict[str, Any]) -> None:
    """Digits for ever: the end is always allowed, and the field keeps it away. A text that is complete ends."""
    digits = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
    end = str(json_server.model.tokenizer.eos_token_id)
    schema = {"type": "object", "properties": {"d": digits}, "required": ["d"], "additionalProperties": False}
    format = {"type": "json_schema", "json_schema": {"name": "digits", "schema": schema}}
    for seed in range(3):
        body = {"response_format": format, "max_tokens": 30, "temperature": 1.0, "seed": seed, "logit_bias": {end: 9}}
        reply = chat(json_server, **body, **field)
        assert reply["choices"] == chat(json_server, **body, **field, lookahead=False)["choices"]
    reply = chat(json_server, response_format=PERSON_FORMAT, max_tokens=100, min_tokens=90)
    assert json.loads(reply["choices"][0]["message"]["content"])["name"] in ("ann", "bob")
    assert reply["choices"][0]["finish_reason"] == "stop"
    # A tool that may be called, or not: there the end is allowed in every place.
    strict = {**ADD, "function": {**ADD["function"], "strict": True}}
    body = {"tools": [strict], "max_tokens": 30, "temperature": 1.0, "seed": 1, "logit_bias": {end: 100}}
    assert chat(json_server, **body)["usage"]["completion_tokens"] == 1
    reply = chat(json_server, **body, **field)
    assert reply["usage"]["completion_tokens"] == (30 if "ignore_eos" in field else 26)
    assert reply["choices"] == chat(json_server, **body, **field, lookahead=False)["choices"]


def box(style: str = "hermes", single: bool = False, must: bool = False) -> Toolbox:
    return Toolbox((Tool.model_validate(ADD),), style, True, must=must, single=single)


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 22}}\n</tool_call>'


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("style", "text", "said", "calls"),
    [
        ("hermes", f"Let me add.{CALL}", "Let me add.", 1),
        ("hermes", f"{CALL}\n{CALL}", "", 2),
        ("hermes", CALL.removesuffix("\n</tool_call>"), "", 1),
        ("hermes", f"<tool_call>[{CALL[12:-13]}]</tool_call>", "", 1),
        ("hermes", "a <tool_call> is no call", "a <tool_call> is no call", 0),
        ("hermes", '<tool_call>{"name": "nobody"}</tool_call>!', '<tool_call>{"name": "nobody"}</tool_call>!', 0),
        ("hermes", '<tool_call>{"name": {}}</tool_call>', '<tool_call>{"name": {}}</tool_call>', 0),
        ("hermes", f"<tool_call>{'[' * 5000}</tool_call>", f"<tool_call>{'[' * 5000}</tool_call>", 0),
        ("hermes", "1 < 2 <to", "1 < 2 <to", 0),
        ("llama", '{"name": "add", "parameters": {"a": 1, "b": 22}}', "", 1),
        ("llama", '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 22}}', "", 1),
        ("llama", '{"name": "other"} is JSON', '{"name": "other"} is JSON', 0),
        ("llama", "It is {not} a call", "It is {not} a call", 0),
    ],
)
def test_calls_are_read_from_pieces_of_any_size(style: str, text: str, said: str, calls: int, size: int) -> None:
    reader = box(style).reader()
    parts = [reader.push(text[start : start + size]) for start in range(0, len(text), size)]
    parts.append(reader.finish())
    assert "".join(part for part, _ in parts) == said
    found = [call for _, some in parts for call in some]
    assert [(call.name, json.loads(call.arguments)) for call in found] == [("add", {"a": 1, "b": 22})] * calls


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    ("style", "must", "text", "said"),
    [
        ("hermes", True, '<tool_call>\n{"name": "add", "argu', ""),
        ("hermes", True, "<tool_c", ""),
        ("hermes", False, 'Let me add.<tool_call>\n{"name": "a', "Let me add."),
        ("hermes", False, "Let me add.<tool_call>\n", "Let me add."),
        ("hermes", False, "The tag <tool_call> begins", "The tag <tool_call> begins"),
        ("hermes", False, "1 < 2 <to", "1 < 2 <to"),
        ("llama", True, '{"na', ""),
        ("llama", False, '{"name": "add", "parame', ""),
        ("llama", False, '<|python_tag|>{"na', ""),
        ("llama", False, '{"answer": "4', '{"answer": "4'),
    ],
)
def test_half_a_call_is_no_text(style: str, must: bool, text: str, said: str, size: int) -> None:
    reader = box(style, must=must).reader()
    parts = [reader.push(text[start : start + size]) for start in range(0, len(text), size)]
    parts.append(reader.finish(cut=True))
    assert "".join(part for part, _ in parts) == said
    assert not reader.calls


def test_a_forced_call_that_is_cut_leaves_no_text(json_server: Running) -> None:
    body = {"tools": [ADD], "tool_choice": "required", "parallel_tool_calls": False}
    whole = chat(json_server, **body, max_tokens=120)["usage"]["completion_tokens"]
    for most in (1, 5, whole // 2, whole - 3):
        (found,) = chat(json_server, **body, max_tokens=most)["choices"]
        assert found["finish_reason"] == "length"
        assert not found["message"]["content"]
        assert "tool_calls" not in found["message"]
        deltas = [chunk["choices"][0]["delta"] for chunk in streamed(json_server, **body, max_tokens=most)]
        assert not any(delta.get("content") or delta.get("tool_calls") for delta in deltas)
    flat = [{"type": "function", **ADD["function"]}]
    given = {"input": "x", "tools": flat, "tool_choice": "required", "max_output_tokens": whole // 2}
    found = json_server.post("/v1/responses", **given).json()
    assert found["status"] == "incomplete"
    assert not any(part["text"] for item in found["output"] for part in item.get("content", ()))


def test_arguments_that_are_nested_too_deeply_are_refused(json_server: Running) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": "[" * 100_000}}
    said = [{"role": "user", "content": "add"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    answer = json_server.post("/v1/chat/completions", messages=said, tools=[ADD], max_tokens=5)
    assert answer.status_code == 400
    assert "arguments are nested more than 64 levels deep" in answer.json()["error"]["message"]


def test_templates_show_their_style() -> None:
    assert style_of(BARE) == ("hermes", False)
    assert style_of(LLAMA) == ("llama", True)
    assert style_of("{% if tools %}<tool_call>{% endif %}") == ("hermes", True)


def test_a_choice_without_its_tool_is_refused(json_server: Running) -> None:
    named = {"type": "function", "function": {"name": "sub"}}
    for body, says in (
        ({"tools": [ADD], "tool_choice": named}, "no tool 'sub'; there is add"),
        ({"tool_choice": "required"}, "there are no tools"),
    ):
        answer = json_server.post("/v1/chat/completions", messages=MESSAGES, **body)
        assert answer.status_code == 400
        assert says in answer.json()["error"]["message"]


# Predicted outputs.


def test_a_prediction_is_accepted_and_counted(server: Running) -> None:
    body = {"max_tokens": 60, "lookahead": {"window": 0, "sources": ["suffix"], "budget": 32}}
    plain = chat(server, **body)
    text = plain["choices"][0]["message"]["content"]
    predicted = chat(server, **body, prediction={"type": "content", "content": text})
    assert predicted["choices"] == plain["choices"]
    details = predicted["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] >= 50
    assert predicted["usage"]["lookahead"]["steps"] < plain["usage"]["lookahead"]["steps"] / 2
    wrong = chat(server, **body, prediction={"type": "content", "content": "zzz qqq " * 10})
    assert wrong["choices"] == plain["choices"]
    assert wrong["usage"]["completion_tokens_details"]["rejected_prediction_tokens"] > 20
